// Package connection is what package userspace reports about each connection. It is a
// package of its own, so that metrics and tracing bring no proxy into a program that
// uses another engine. It has nothing but types, and builds everywhere.
package connection

import (
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/enum"
)

// Observer hears of every connection, if the Deps.Observer of a userspace engine is one.
type Observer interface {
	// ObserveConnection is called when a connection, or a client's UDP flow, has
	// ended, by several goroutines at once. It must return soon.
	ObserveConnection(report Report)
}

// Report is about a TCP connection, or the UDP flow of a client.
type Report struct {
	Name     changetracker.ServicePortName
	Family   v1.IPFamily
	Protocol desired.Protocol
	// Client is where it came from, and Dialled what it was sent to, as far as that is
	// known: the VIP or node address, or else the proxy's own socket.
	Client, Dialled netip.AddrPort
	// Endpoint is who served it; zero when nobody did.
	Endpoint netip.AddrPort
	Outcome  Outcome
	// Attempts are those to reach an endpoint, in order. All but the last have
	// failed, and that too when Outcome is Unreachable.
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
	// Served says that both ends have said what they wanted, or were quiet for
	// too long.
	Served Outcome = iota + 1
	// Cut says that it was served until the proxy, or an error, ended it.
	Cut
	// NotAdmitted says that its source may not use the Service.
	NotAdmitted
	// NoEndpoints says that there were none, or that none came in time.
	NoEndpoints
	// Unreachable says that no endpoint answered.
	Unreachable
	// TooMany says that too many others waited for endpoints already, or had
	// descriptors of this process.
	TooMany
)

// Outcomes are all of them.
func Outcomes() []Outcome {
	return []Outcome{Served, Cut, NotAdmitted, NoEndpoints, Unreachable, TooMany}
}

// String is a word fit for the label of a metric.
func (o Outcome) String() string {
	return enum.Name(o, "", "served", "cut", "not_admitted", "no_endpoints", "unreachable", "too_many")
}
