package proxier

import (
	"fmt"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
)

// DescriptorHolder is an Engine whose clients use descriptors of this process, such as
// that of userspace.
type DescriptorHolder interface {
	// Descriptors may be called at any time, and must return soon. Limit is 0 if nothing
	// is counted.
	Descriptors() Descriptors
}

// Descriptors are those of this process that the clients of service ports hold. IP
// families, and Providers, may share one limit, and then have the same figures.
type Descriptors struct {
	// Used is how many they have, and Limit how many they may have at the moment.
	Used, Limit int
	// Refused counts the clients that got none, and Ended those that gave way to
	// others, since the start.
	Refused, Ended int
	// ShortSince is since when clients are refused or ended; zero if none was in the last
	// minute.
	ShortSince time.Time
	// Most is the service port whose clients have the most descriptors, and MostUsed how
	// many.
	Most     changetracker.ServicePortName
	MostUsed int
}

// condition is what to tell the operator while descriptors are short.
func (d *Descriptors) condition(time.Time) (c Condition, lasts bool) {
	if d.ShortSince.IsZero() {
		return Condition{}, false
	}
	return Condition{
		Type: ConditionDescriptors, Since: d.ShortSince,
		Message: fmt.Sprintf("clients use %d of %d descriptors; %d clients were refused and %d ended since the start; %v has the most, %d: "+
			"raise the limit of open files (RLIMIT_NOFILE), or look at the clients of that service port", d.Used, d.Limit, d.Refused, d.Ended, d.Most, d.MostUsed),
	}, true
}
