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

// SocketCounts counts the sockets of an IP family that have connected, or sent a first datagram, to an address that
// engine ebpf translates, since its programs were attached for the first time, also by an earlier process.
type SocketCounts struct {
	// Translated sockets go to an endpoint.
	Translated uint64
	// Namespace, Bound, Empty and NoMemory are those that were left to the rules: in a network
	// namespace that Sockets.Namespaces excludes; sockets of the node that are bound to an address;
	// during a change; and because the kernel had no memory to remember the VIP.
	Namespace, Bound, Empty, NoMemory uint64
	// Ended are connected UDP sockets that this process has ended, because their endpoint was gone.
	Ended uint64
}

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

// Counts are the numbers of new connections through service ports, and their traffic.
type Counts struct {
	// Since is when counting began. It begins with the first sync, and again when the process
	// starts again; zero means that there was no sync yet.
	Since time.Time
	// ServicePorts has the service ports that have had connections.
	ServicePorts []ServicePortCounts
	// Connections says that new connections are counted: see CountConnections of proxier.Config. Otherwise
	// their numbers are 0.
	Connections bool
	// Traffic says that traffic is counted: see CountTraffic of proxier.Config. Otherwise no Traffic grows.
	// TrafficProblem is why, if that was asked for, or why some is missing.
	Traffic        bool
	TrafficProblem string
	// TrafficLosses is how often the kernel dropped notifications of flows that had ended. Each time,
	// the traffic of some flows since their last reading is missing.
	TrafficLosses uint64
}

// ServicePortCounts are the numbers of a service port.
type ServicePortCounts struct {
	Name changetracker.ServicePortName
	// Connections is the number of new connections that were sent to an endpoint. While the
	// service port exists, it never falls: it includes endpoints that are gone. The same holds for
	// Traffic.
	Connections uint64
	Traffic     Traffic
	// Refused is how many more have exceeded the changetracker.ClientLimit, if the engine counts Connections.
	Refused uint64
	// Endpoints has the endpoints that have had connections, of those that the service port
	// has now. An endpoint that was gone and returns begins at zero.
	Endpoints []EndpointCounts
}

// EndpointCounts are the numbers of an endpoint of a service port.
type EndpointCounts struct {
	Endpoint    netip.AddrPort
	Connections uint64
	Traffic     Traffic
}

// Traffic is what passed through connections, to the endpoint (In) and from it (Out). If the
// kernel counts it, the bytes include the headers of IP and above, and a packet is one of the
// kernel, which may be several on the wire. Engines with sockets of their own count the
// bytes that they copy, and no packets.
type Traffic struct {
	PacketsIn, PacketsOut, BytesIn, BytesOut uint64
}

// Plus returns the sum.
func (t Traffic) Plus(o Traffic) Traffic {
	return Traffic{t.PacketsIn + o.PacketsIn, t.PacketsOut + o.PacketsOut, t.BytesIn + o.BytesIn, t.BytesOut + o.BytesOut}
}

// Minus returns the difference.
func (t Traffic) Minus(o Traffic) Traffic {
	return Traffic{t.PacketsIn - o.PacketsIn, t.PacketsOut - o.PacketsOut, t.BytesIn - o.BytesIn, t.BytesOut - o.BytesOut}
}

// Descriptors counts the descriptors of this process that the clients of service ports
// hold. IP families, and Providers, that share a budget have the same figures.
type Descriptors struct {
	// Used is how many descriptors clients hold, and Limit how many they may hold now.
	Used, Limit int
	// Refused counts the clients that got no descriptor, and Ended those that were ended
	// in favor of others, since the start.
	Refused, Ended int
	// ShortSince is when the current shortage began: since then, clients were refused or
	// ended. It is zero if none was in the last minute.
	ShortSince time.Time
	// Most is the service port whose clients hold the most descriptors, and MostUsed
	// their number.
	Most     changetracker.ServicePortName
	MostUsed int
}
