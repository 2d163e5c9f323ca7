// Package connection holds what engines tell of connections: their numbers by service port and
// endpoint, and a report about each that package userspace has served. It has only types, so that
// who reads them needs no engine.
package connection

import (
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/enum"
)

// Observer receives a report about every connection, if the Deps.Observer of a userspace
// engine implements it.
type Observer interface {
	// ObserveConnection is called when a TCP connection, or a client's UDP flow, has
	// ended. Several goroutines call it at once. It must return soon.
	ObserveConnection(report Report)
}

// Report is about a TCP connection, or the UDP flow of a client.
type Report struct {
	Name     changetracker.ServicePortName
	Family   v1.IPFamily
	Protocol desired.Protocol
	// Client is the source, and Dialled the destination: the VIP or node address if that
	// is known, or else the proxy's own socket.
	Client, Dialled netip.AddrPort
	// Endpoint is the endpoint that served the connection; zero if none did.
	Endpoint netip.AddrPort
	Outcome  Outcome
	// Attempts are the attempts to connect to an endpoint, in order. The last one
	// succeeded, unless Outcome is Unreachable.
	Attempts []Attempt
	// Began is when the proxy accepted the connection.
	Began time.Time
	// Held is how long the connection waited for endpoints; 0 if it did not wait.
	Held time.Duration
	// Duration is the time from Began to the end.
	Duration time.Duration
	// Sent counts the bytes from the client to the endpoint, Received those back.
	Sent, Received int64
	// Err is why the connection was not served, or was cut.
	Err error
}

// Attempt is one attempt to connect to an endpoint.
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
	// Served means that both ends closed the connection, or that the UDP flow was idle
	// for too long.
	Served Outcome = iota + 1
	// Cut means that the proxy, or an error, ended the connection.
	Cut
	// NotAdmitted means that the source may not use the Service.
	NotAdmitted
	// NoEndpoints means that there was no endpoint, or that none arrived in time.
	NoEndpoints
	// Unreachable means that no endpoint answered.
	Unreachable
	// TooMany means that too many connections waited for endpoints already, or that
	// no descriptor was free.
	TooMany
)

// Outcomes returns all outcomes.
func Outcomes() []Outcome {
	return []Outcome{Served, Cut, NotAdmitted, NoEndpoints, Unreachable, TooMany}
}

// String returns the outcome as the label value of a metric.
func (o Outcome) String() string {
	return enum.Name(o, "", "served", "cut", "not_admitted", "no_endpoints", "unreachable", "too_many")
}
