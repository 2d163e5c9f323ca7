package changetracker

import (
	"maps"

	"k8s.io/apimachinery/pkg/types"
)

// Counts are what a Tracker has heard of, over all families.
type Counts struct {
	// Services and EndpointSlices count the calls that brought one, or its end.
	Services, EndpointSlices uint64
	// PendingServices is the number of Services that changed themselves, and
	// PendingEndpointSlices the number of changes of slices, that no Apply has
	// consumed.
	PendingServices, PendingEndpointSlices int
}

// pendingCounts is what Counts needs to know of one family.
type pendingCounts struct {
	// services holds the number, in order of arrival, of the last change of each
	// Service that is pending.
	services map[types.NamespacedName]uint64
	// sequence counts the changes of Services; slices those of slices, and
	// slicesDone those of them that a successful Apply has seen.
	sequence           uint64
	slices, slicesDone uint64
}

func (c *pendingCounts) serviceChanged(name types.NamespacedName) {
	if c.services == nil {
		c.services = map[types.NamespacedName]uint64{}
	}
	c.sequence++
	c.services[name] = c.sequence
}

// applied forgets what was there at the given moment, but for what failed.
func (c *pendingCounts) applied(at pendingCounts, failed map[types.NamespacedName][]portKey) {
	c.slicesDone = at.slices
	maps.DeleteFunc(c.services, func(name types.NamespacedName, sequence uint64) bool {
		return sequence <= at.sequence && failed[name] == nil
	})
}
