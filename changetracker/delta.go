package changetracker

import "time"

// Delta is what changed in one family since the last State that was applied
// with success.
type Delta struct {
	// Full asks the receiver to trust nothing it holds and to bring everything in
	// line with the State: on the first Apply, and after SetNode changed what all
	// Services depend on. Changes still lists what changed.
	Full bool
	// Changes has one item for each service port that differs, or that Tracker.Refresh asks
	// for, sorted by name.
	Changes []Change
}

// Change is the difference of one service port. A nil Before or After means that
// the service port was, or is, not proxied; both are nil only with an
// EndpointChangeTracker on its own, which knows of no Services. After Tracker.Refresh
// there may be no difference at all.
type Change struct {
	Name          ServicePortName
	Before, After *ServicePort
	// Added and Removed are the endpoint differences, sorted by address. An
	// endpoint whose conditions, weight or other fields changed is in both.
	Added, Removed []Endpoint
	// Triggers are the times at which the control plane saw the causes, from the
	// annotation endpoints.kubernetes.io/last-change-trigger-time. Each appears
	// once, on the first changed port of its Service, and survives failed syncs.
	Triggers []time.Time
}
