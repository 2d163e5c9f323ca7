package proxier

import (
	"fmt"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
)

// DescriptorHolder is an Engine whose clients hold descriptors of this process, as
// those of userspace do.
type DescriptorHolder interface {
	// Descriptors may be called at any time, and must return soon. Its Limit is 0 where
	// nothing is counted.
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
	// ShortSince is since when clients are refused or ended; zero when none was for a
	// minute.
	ShortSince time.Time
	// Most is the service port whose clients have the most, MostUsed.
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
		Message: fmt.Sprintf("clients have %d of %d descriptors, and were refused (%d) or ended (%d) since the start; %v has the most, %d: "+
			"raise the limit of open files (RLIMIT_NOFILE), or find out who its clients are", d.Used, d.Limit, d.Refused, d.Ended, d.Most, d.MostUsed),
	}, true
}
