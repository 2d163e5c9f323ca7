// Package counting turns the counters of a kernel, which end with the rules or elements that
// hold them, into numbers of connections by service port and endpoint that only grow.
package counting

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// ErrOff is the answer of an engine that does not count.
var ErrOff = fmt.Errorf("nothing is counted: set CountConnections or CountTraffic of the Config, nodeproxy's --count-connections or --count-traffic: %w", errors.ErrUnsupported)

// Owner is the endpoint whose connections a counter counts. Without an endpoint, the counter is one
// of an endpoint that the service port does not have any more.
type Owner struct {
	Name     changetracker.ServicePortName
	Endpoint netip.AddrPort
	// Refused means that the counter counts connections that a client limit has refused, of no endpoint.
	Refused bool
}

// Ledger holds the numbers of one family. K identifies a counter of the kernel. Calls must not
// overlap.
type Ledger[K comparable] struct {
	since time.Time
	clock uint64
	seen  map[K]reading
	// forgotten is the time of the last Forget.
	forgotten uint64
	ports     map[changetracker.ServicePortName]*port
}

// reading is the value of a counter up to which it is in the numbers, and whose it was.
type reading struct {
	value    uint64
	at       uint64 // the time of the Ledger's clock
	port     *port
	endpoint netip.AddrPort
	refused  bool
}

// port has the numbers of a service port: of each endpoint, and of all endpoints that are gone.
type port struct {
	gone      numbers
	endpoints map[netip.AddrPort]numbers
}

type numbers struct {
	connections uint64
	traffic     connection.Traffic
	refused     uint64
}

func (n numbers) plus(more numbers) numbers {
	return numbers{n.connections + more.connections, n.traffic.Plus(more.traffic), n.refused + more.refused}
}

func (n numbers) minus(less numbers) numbers {
	return numbers{n.connections - less.connections, n.traffic.Minus(less.traffic), n.refused - less.refused}
}

func newPort() *port { return &port{endpoints: map[netip.AddrPort]numbers{}} }

// add adds to the numbers of an endpoint, or of those that are gone.
func (p *port) add(endpoint netip.AddrPort, more numbers) {
	if more == (numbers{}) {
		return
	}
	if endpoint.IsValid() {
		p.endpoints[endpoint] = p.endpoints[endpoint].plus(more)
	} else {
		p.gone = p.gone.plus(more)
	}
}

// NewLedger returns a Ledger without numbers.
func NewLedger[K comparable]() *Ledger[K] {
	return &Ledger[K]{seen: map[K]reading{}, ports: map[changetracker.ServicePortName]*port{}}
}

// Begin sets when counting began. Further calls do nothing.
func (l *Ledger[K]) Begin(now time.Time) {
	if l.since.IsZero() {
		l.since = now
	}
}

// Value is what a counter had at its last Add, 0 if it is unknown.
func (l *Ledger[K]) Value(counter K) uint64 { return l.seen[counter].value }

// Len is how many counters are known.
func (l *Ledger[K]) Len() int { return len(l.seen) }

// Clock advances with each Add and Forget. Who reads counters takes the time before, for Add.
func (l *Ledger[K]) Clock() uint64 { return l.clock }

// Add adds what a counter has counted since its last Add, to the numbers of its owner, or of
// its last owner if it has none now. What a counter without any owner has counted is nobody's.
// If a value of the counter was added since the time began, this one is stale and is ignored.
func (l *Ledger[K]) Add(counter K, value uint64, owner Owner, began uint64) {
	now, known := l.seen[counter]
	if !known {
		now.at = l.forgotten
	}
	if now.at > began {
		return
	}
	l.clock++
	more := value - now.value
	if value < now.value { // another program has replaced the counter
		more = value
	}
	now.value, now.at = value, l.clock
	if owner != (Owner{}) {
		now.port, now.endpoint, now.refused = l.port(owner.Name), owner.Endpoint, owner.Refused
	}
	if now.port != nil {
		n := numbers{connections: more}
		if now.refused {
			n = numbers{refused: more}
		}
		now.port.add(now.endpoint, n)
	}
	l.seen[counter] = now
}

func (l *Ledger[K]) port(name changetracker.ServicePortName) *port {
	p := l.ports[name]
	if p == nil {
		p = newPort()
		l.ports[name] = p
	}
	return p
}

// Forget is for counters that do not exist any more. Values from before are stale.
func (l *Ledger[K]) Forget(counters ...K) {
	for _, c := range counters {
		delete(l.seen, c)
	}
	l.forget()
}

// ForgetIf is Forget for the counters that gone selects.
func (l *Ledger[K]) ForgetIf(gone func(K) bool) {
	maps.DeleteFunc(l.seen, func(counter K, _ reading) bool { return gone(counter) })
	l.forget()
}

// ForgetAll is for when no counter exists any more.
func (l *Ledger[K]) ForgetAll() {
	clear(l.seen)
	l.forget()
}

func (l *Ledger[K]) forget() {
	l.clock++
	l.forgotten = l.clock
}

// Applied is called after an update, when what its counters had is added. It removes the numbers
// of service ports that do not exist any more, and adds those of endpoints that a service port
// does not have any more to its total: what comes again begins at zero.
func (l *Ledger[K]) Applied(update *desired.Update) {
	if update.Full {
		gone := maps.Clone(l.ports)
		for s := range update.Services() {
			delete(gone, s.Name)
		}
		for name := range gone {
			delete(l.ports, name)
		}
	}
	for name := range update.Removed() {
		delete(l.ports, name)
	}
	for s := range update.Services() {
		if p := l.ports[s.Name]; p != nil {
			p.keep(s)
		}
	}
}

// keep keeps the numbers of the endpoints that the service port has.
func (p *port) keep(s *desired.Service) {
	for endpoint, n := range p.endpoints {
		if !has(s, endpoint) {
			p.gone = p.gone.plus(n)
			delete(p.endpoints, endpoint)
		}
	}
}

// has reports whether a service port has an endpoint.
func has(s *desired.Service, endpoint netip.AddrPort) bool {
	return s.Cluster.Has(endpoint) || s.Local.Has(endpoint)
}

// Counts returns the numbers, sorted.
func (l *Ledger[K]) Counts() connection.Counts {
	return connection.Counts{Since: l.since, Connections: true, ServicePorts: list(l.ports)}
}
