package changetracker

import "time"

// Delta is the difference of one family to the State that was applied last: the work of one Apply.
type Delta struct {
	// Before is what has been applied, service port by service port: one that failed is in it
	// with its previous value. Its Node is that of the last Apply that succeeded, fully or
	// partly.
	Before *State
	// After is the newest State or, if there is More, Before with some Services of the newest State.
	After *State
	// More says that Tracker.ApplyPart has left changes for later.
	More bool
	// Full asks the receiver to check everything it has programmed against the State, on the
	// first Apply and after SetNode changed a value that all Services depend on. Changes still
	// lists what changed.
	Full bool
	// Changes has one item for each service port that differs or that Tracker.Refresh names,
	// sorted by name.
	Changes []PortChange
}

// PortChange is the difference of one service port. A nil Before or After means that the service
// port was not, or is not, proxied. Both are nil only with an EndpointChangeTracker on its
// own, which has no Services. After Tracker.Refresh there may be no difference.
type PortChange struct {
	Name          ServicePortName
	Before, After *ServicePort
	// Added and Removed are the endpoint differences, sorted by address. An endpoint whose
	// conditions, weight or other fields changed is in both.
	Added, Removed []Endpoint
	// Triggers are the times at which the control plane saw the causes, from the annotation
	// endpoints.kubernetes.io/last-change-trigger-time. Each is reported once, on the first
	// changed port of its Service, and is kept while syncs fail.
	Triggers []time.Time
}
