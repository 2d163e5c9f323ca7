package changetracker

import "k8s.io/apimachinery/pkg/types"

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
	// sequence counts the changes of Services.
	sequence uint64
	// slices is how many changes of slices are pending, taken of which are in a Delta.
	slices, taken int
}

func (c *pendingCounts) serviceChanged(name types.NamespacedName) {
	if c.services == nil {
		c.services = map[types.NamespacedName]uint64{}
	}
	c.sequence++
	c.services[name] = c.sequence
}

// serviceApplied drops a Service that has not changed after a sequence number.
func (c *pendingCounts) serviceApplied(name types.NamespacedName, upTo uint64) {
	if c.services[name] <= upTo {
		delete(c.services, name)
	}
}

func (c *pendingCounts) slicesApplied() { c.slices, c.taken = c.slices-c.taken, 0 }
