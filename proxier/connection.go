package proxier

import (
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/enum"
)

// ConnectionObserver is an Observer that also hears of every connection, from an
// engine that takes part in them itself: userspace does.
type ConnectionObserver interface {
	// ObserveConnection is called when a connection, or a client's UDP flow, has
	// ended, by several goroutines at once. It must return soon.
	ObserveConnection(report ConnectionReport)
}

// ConnectionReport is about a TCP connection, or the UDP flow of a client.
type ConnectionReport struct {
	Name     changetracker.ServicePortName
	Family   v1.IPFamily
	Protocol desired.Protocol
	// Client is where it came from, and Asked what it was sent to, as far as that is
	// known: the VIP or node address, or else the proxy's own socket.
	Client, Asked netip.AddrPort
	// Endpoint is who served it; zero when nobody did.
	Endpoint netip.AddrPort
	Outcome  Outcome
	// Attempts are those to reach an endpoint, in order. All but the last have
	// failed, and that too when Outcome is OutcomeUnreachable.
	Attempts []Attempt
	// Began is when it was accepted.
	Began time.Time
	// Held is how long it waited for endpoints, 0 if there were some.
	Held time.Duration
	// Duration is the time from Began to its end.
	Duration time.Duration
	// Sent and Received count the bytes to and from the endpoint, as the client sees
	// it.
	Sent, Received int64
	// Err says why it was not served, or was cut.
	Err error
}

// Attempt is one try to reach an endpoint.
type Attempt struct {
	Endpoint netip.AddrPort
	Began    time.Time
	Duration time.Duration
	Err      error // nil for success
}

// Outcome is how a connection went.
type Outcome uint8

// The outcomes.
const (
	// OutcomeServed says that both ends have said what they wanted, or were quiet for
	// too long.
	OutcomeServed Outcome = iota + 1
	// OutcomeCut says that it was served until the proxy, or an error, ended it.
	OutcomeCut
	// OutcomeNotAdmitted says that its source may not use the Service.
	OutcomeNotAdmitted
	// OutcomeNoEndpoints says that there were none, or that none came in time.
	OutcomeNoEndpoints
	// OutcomeUnreachable says that no endpoint answered.
	OutcomeUnreachable
	// OutcomeTooMany says that too many others waited for endpoints already, or had
	// descriptors of this process.
	OutcomeTooMany
)

// Outcomes are all of them.
func Outcomes() []Outcome {
	return []Outcome{OutcomeServed, OutcomeCut, OutcomeNotAdmitted, OutcomeNoEndpoints, OutcomeUnreachable, OutcomeTooMany}
}

// String is a word fit for the label of a metric.
func (o Outcome) String() string {
	return enum.Name(o, "", "served", "cut", "not_admitted", "no_endpoints", "unreachable", "too_many")
}
