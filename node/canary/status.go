package canary

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/enum"
	"github.com/serviceplane/serviceplane/proxier"
)

// ConditionCanary is the type of the Conditions: the canary's connections fail, so those of
// clients may fail too, although the syncs succeed.
const ConditionCanary = "Canary"

// TestState is what the tests of an IP family say about its data plane.
type TestState uint8

// The states.
const (
	// StateWaiting is before the first result: until the Provider has synced, and until a test
	// has succeeded, or failed for Options.Threshold.
	StateWaiting TestState = iota
	// StatePassing means that connections reach the endpoint.
	StatePassing
	// StateFailing means that no connection has for Options.Threshold or longer.
	StateFailing
	// StateUntested means that the node cannot open the connections, whatever the rules do:
	// Failure says why. It is no fault of the data plane.
	StateUntested
)

// String is the name in logs and metrics.
func (s TestState) String() string {
	return enum.Name(s, "waiting", "passing", "failing", "untested")
}

// TestStatus is the result of the tests of one IP family.
type TestStatus struct {
	State TestState
	// Since is when the State began.
	Since time.Time
	// VIP is where the tests connect. Endpoint is the socket that answers; invalid before there
	// is one.
	VIP, Endpoint netip.AddrPort
	// Passed and Failed count the tests.
	Passed, Failed uint64
	// LastSuccess and LastFailure are when the last test of each result ended; zero if none did.
	LastSuccess, LastFailure time.Time
	// Failure is why the last failed test failed, and what to do; empty if none did.
	Failure string
	// Took is the duration of the last successful test: two round trips on the node.
	Took time.Duration

	failingSince time.Time // zero after a success
}

// Status returns the results by IP family. It may be called at any time.
func (c *Canary) Status() map[v1.IPFamily]TestStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.families)
}

// Conditions returns one Condition of type ConditionCanary for each IP family in StateFailing,
// IPv4 first.
func (c *Canary) Conditions() []proxier.Condition {
	status := c.Status()
	var conditions []proxier.Condition
	for _, name := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		if s, ok := status[name]; ok && s.State == StateFailing {
			conditions = append(conditions, proxier.Condition{
				Type: ConditionCanary, Family: name, Since: s.failingSince,
				Message: fmt.Sprintf("a connection to the canary's VIP %v does not reach %v: %s", s.VIP, s.Endpoint, s.Failure),
			})
		}
	}
	return conditions
}

// Extend returns a function with the result of status, which is a Provider's, and the
// Conditions. With it, health servers, metrics and the debug page report them.
func (c *Canary) Extend(status func() proxier.Status) func() proxier.Status {
	return func() proxier.Status {
		s := status()
		s.Conditions = append(slices.Clip(s.Conditions), c.Conditions()...)
		return s
	}
}
