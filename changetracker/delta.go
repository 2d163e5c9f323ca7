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

// Problem is one value of an API object that was set aside. Everything else of
// the object is used, as far as it makes sense without.
type Problem struct {
	// Object is the kind, namespace and name: "Service default/web", with " of source west"
	// for an object of that Source.
	Object string
	// Field is the path of the value in the object: "spec.externalIPs[1]".
	Field string
	// Value is the offending value as text, cut to a readable length.
	Value string
	// Reason says in a few words what is wrong with it, and is one of a fixed set
	// fit for a metric label: see the Reason constants.
	Reason Reason
}

// Reason is a bounded vocabulary of why values are set aside.
type Reason string

// The reasons for a Problem.
const (
	ReasonInvalidAddress  Reason = "invalid address"
	ReasonInvalidCIDR     Reason = "invalid CIDR"
	ReasonInvalidPort     Reason = "invalid port"
	ReasonInvalidProtocol Reason = "invalid protocol"
	ReasonWrongFamily     Reason = "wrong IP family"
	ReasonNoPorts         Reason = "no ports"
	ReasonDuplicate       Reason = "duplicate"
	ReasonMissing         Reason = "missing value"
	// ReasonRefused is an external IP that ExternalIPPolicy does not accept.
	ReasonRefused Reason = "refused by policy"
	// ReasonNoSourceRange is a list of source ranges without a valid one of the IP
	// family of a load balancer VIP.
	ReasonNoSourceRange Reason = "no source range of the IP family"
)

// Reasons are all of them.
func Reasons() []Reason {
	return []Reason{
		ReasonInvalidAddress, ReasonInvalidCIDR, ReasonInvalidPort, ReasonInvalidProtocol,
		ReasonWrongFamily, ReasonNoPorts, ReasonDuplicate, ReasonMissing,
		ReasonRefused, ReasonNoSourceRange,
	}
}
