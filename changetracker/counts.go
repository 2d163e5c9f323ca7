package changetracker

import (
	"maps"

	"k8s.io/apimachinery/pkg/types"
)

// EventCounts counts the events that a Tracker has received and what is pending, over all families.
type EventCounts struct {
	// Services and EndpointSlices count the calls that added, changed or removed one.
	Services, EndpointSlices uint64
	// PendingServices is the number of Services that changed themselves and
	// PendingEndpointSlices the number of slice changes, both not consumed by an Apply yet.
	PendingServices, PendingEndpointSlices int
}

// pendingCounts holds the counters of one family.
type pendingCounts struct {
	// services holds, for each pending Service, the sequence number of its last change.
	services map[types.NamespacedName]uint64
	// sequence counts the changes of Services, and slices those of slices. slicesDone is how
	// many of slices a successful Apply has included.
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

// applied drops what was counted when the attempt began, except for Services that failed.
func (c *pendingCounts) applied(at pendingCounts, failed map[types.NamespacedName][]portKey) {
	c.slicesDone = at.slices
	maps.DeleteFunc(c.services, func(name types.NamespacedName, sequence uint64) bool {
		return sequence <= at.sequence && failed[name] == nil
	})
}
