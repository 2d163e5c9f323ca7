package proxier

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Counts are the numbers of new connections through service ports, and their traffic.
type Counts struct {
	// Since is when counting began. It begins with the first sync, and again when the process
	// starts again; zero means that there was no sync yet.
	Since time.Time
	// ServicePorts has the service ports that have had connections.
	ServicePorts []ServicePortCounts
	// Connections says that new connections are counted: see Config.CountConnections. Otherwise their
	// numbers are 0.
	Connections bool
	// Traffic says that traffic is counted: see Config.CountTraffic. Otherwise no Traffic grows, and
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

// Counts returns the numbers of connections in an IP family, and their traffic. Concurrent calls
// share one reading of the kernel. The error is errors.ErrUnsupported if Config.CountConnections
// and Config.CountTraffic are off or the engine cannot count. Callers share the slices of the
// answer, and must not change them.
func (p *Proxier) Counts(ctx context.Context, name v1.IPFamily) (Counts, error) {
	for _, f := range p.families {
		if f.name == name {
			counts, err := f.counting.share(ctx, f.counts)
			if err != nil {
				err = fmt.Errorf("count connections of %s: %w", name, err)
			}
			return counts, err
		}
	}
	return Counts{}, fmt.Errorf("count connections of %s: the engine cannot: %w", name, errors.ErrUnsupported)
}

// counts joins what the engine counts with what connection tracking does.
func (f *family) counts(ctx context.Context) (counts Counts, err error) {
	if f.can.Counts != nil {
		counts, err = f.can.Counts(ctx)
	} else {
		err = fmt.Errorf("the engine cannot: %w", errors.ErrUnsupported)
	}
	if !f.traffic || err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return counts, err
	}
	return f.conntrack.AddTraffic(ctx, f.name, counts)
}

// sharedReading lets concurrent callers share a reading that begins after all of them called.
type sharedReading struct {
	mu   sync.Mutex
	next *pendingReading // has not begun; nil if nobody waits for it
	turn chan struct{}   // full while a reading runs
}

type pendingReading struct {
	done      chan struct{}
	abandoned bool // its caller has given up
	counts    Counts
	err       error
}

// errNoReading is what others get if the reading panics.
var errNoReading = errors.New("the reading panicked")

func newSharedReading() *sharedReading { return &sharedReading{turn: make(chan struct{}, 1)} }

// share returns the outcome of a reading. The first caller runs it, with its own context.
func (s *sharedReading) share(ctx context.Context, read func(context.Context) (Counts, error)) (Counts, error) {
	for {
		s.mu.Lock()
		p, leads := s.next, s.next == nil
		if leads {
			p = &pendingReading{done: make(chan struct{})}
			s.next = p
		}
		s.mu.Unlock()
		if leads {
			s.run(ctx, p, read)
			return p.counts, p.err
		}
		select {
		case <-p.done:
		case <-ctx.Done():
			return Counts{}, ctx.Err()
		}
		if !p.abandoned {
			return p.counts, p.err
		}
	}
}

func (s *sharedReading) run(ctx context.Context, p *pendingReading, read func(context.Context) (Counts, error)) {
	defer close(p.done)
	begin := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.next = nil
	}
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }() // also if read panics, as the caller's program may survive
		begin()
		p.err = errNoReading
		p.counts, p.err = read(ctx)
	case <-ctx.Done():
		begin()
		p.err = ctx.Err()
	}
	p.abandoned = ctx.Err() != nil
}
