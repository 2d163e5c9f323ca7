package endpointhealth

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/enum"
)

// Summary is a snapshot of a Checker.
type Summary struct {
	// Checks were started. Of those that ended, and that a service port still needs, Passed
	// succeeded, Failures failed, and Untested could not be made for a reason on this node.
	Checks, Passed, Failures, Untested uint64
	// Ejections and Returns count changes of an endpoint of a service port, and Syncs the syncs
	// that were requested for all changes, also of weights. These seven count since the start.
	Ejections, Returns, Syncs uint64
	// Endpoints is how many endpoints are checked, each counted once for all service ports that
	// agree how. Failing is how many of them fail.
	Endpoints, Failing int
	// Ejected, Kept and Starting count endpoints of service ports by State.
	Ejected, Kept, Starting int
	// Refused is how many service ports, of each IP family, are not checked because Choose
	// returned an error or an invalid CheckPolicy. The log says why.
	Refused int
	// Late is how many checks are due and wait for others to end: see Options.Concurrency and Rate.
	Late int
	// Unusual lists the endpoints that Ejected, Kept and Starting count, sorted by service port
	// and address.
	Unusual []EndpointStatus
}

// EndpointState is what is unusual about an endpoint of a service port.
type EndpointState uint8

// The states.
const (
	// StateEjected endpoints get no new connections from the next sync on.
	StateEjected EndpointState = iota + 1
	// StateKept endpoints fail, and are used, because too many others are ejected.
	StateKept
	// StateStarting endpoints have returned, and have not their whole share yet.
	StateStarting
)

// String is the name in logs and metrics.
func (s EndpointState) String() string { return enum.Name(s, "", "ejected", "kept", "starting") }

// EndpointStatus is about an endpoint of a service port.
type EndpointStatus struct {
	Name     changetracker.ServicePortName
	Endpoint netip.AddrPort
	State    EndpointState
	// Reason is the last failure; empty if it starts. Since is when it failed, or returned.
	Reason string
	Since  time.Time
	// Until is when the ejection ends at the earliest.
	Until time.Time
}

// Status returns a snapshot. It may be called at any time. It costs the endpoints that are
// checked.
func (c *Checker) Status() Summary {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.run
	if r == nil {
		return Summary{}
	}
	status := r.counters
	status.Endpoints, status.Late = len(r.targets), r.waiting.length
	for _, t := range r.targets {
		status.Failing += count(t.failing)
	}
	for _, s := range r.ports {
		status.Refused += count(s.refused)
		for _, m := range s.members {
			status.add(s, m)
		}
	}
	slices.SortFunc(status.Unusual, func(a, b EndpointStatus) int {
		return cmp.Or(a.Name.Compare(b.Name), a.Endpoint.Compare(b.Endpoint))
	})
	return status
}

func (s *Summary) add(port *servicePort, m *member) {
	e := EndpointStatus{Name: port.name, Endpoint: m.addr, Reason: m.target.reason, Since: m.target.since}
	switch {
	case m.set.Eject:
		s.Ejected++
		e.State, e.Until = StateEjected, m.target.since.Add(m.target.hold)
	case m.target.failing:
		s.Kept++
		e.State = StateKept
	case !m.returned.IsZero():
		s.Starting++
		e.State, e.Since = StateStarting, m.returned
	default:
		return
	}
	s.Unusual = append(s.Unusual, e)
}
