package connection

import (
	"net/netip"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
)

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
	// Traffic says that traffic is counted: see CountTraffic of proxier.Config. Otherwise no Traffic grows, and
	// TrafficProblem is why, if that was asked for.
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
