package proxier

import (
	"fmt"

	"github.com/serviceplane/serviceplane/userspace/connection"
)

// descriptorHolder is an Engine whose clients use descriptors of this process.
type descriptorHolder interface {
	Descriptors() connection.Descriptors
}

// shortOfDescriptors is what to tell the operator while descriptors are short.
func shortOfDescriptors(d *connection.Descriptors) (c Condition, lasts bool) {
	if d.ShortSince.IsZero() {
		return Condition{}, false
	}
	return Condition{
		Type: ConditionDescriptors, Since: d.ShortSince,
		Message: fmt.Sprintf("clients use %d of %d descriptors; %d clients were refused and %d ended since the start; %v has the most, %d: "+
			"raise the limit of open files (RLIMIT_NOFILE), or look at the clients of that service port", d.Used, d.Limit, d.Refused, d.Ended, d.Most, d.MostUsed),
	}, true
}
