// Package counting turns the counters of a kernel, which end with the rules or elements that
// hold them, into numbers of connections by service port and endpoint that only grow.
package counting

import (
	"net/netip"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// Owner is the endpoint whose connections a counter counts.
type Owner struct {
	Name     changetracker.ServicePortName
	Endpoint netip.AddrPort
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
}

// port has the numbers of a service port: of each endpoint, and of all endpoints that are gone.
type port struct {
	gone      uint64
	endpoints map[netip.AddrPort]uint64
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
		now.port, now.endpoint = l.port(owner.Name), owner.Endpoint
	}
	if now.port != nil && more > 0 {
		now.port.endpoints[now.endpoint] += more
	}
	l.seen[counter] = now
}

func (l *Ledger[K]) port(name changetracker.ServicePortName) *port {
	p := l.ports[name]
	if p == nil {
		p = &port{endpoints: map[netip.AddrPort]uint64{}}
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

// ForgetAll is for when no counter exists any more.
func (l *Ledger[K]) ForgetAll() {
	clear(l.seen)
	l.forget()
}

func (l *Ledger[K]) forget() {
	l.clock++
	l.forgotten = l.clock
}

// Keep removes the numbers of service ports that do not exist. It adds the numbers of endpoints
// that a service port does not have any more to those of its other endpoints that are gone.
// endpoints returns false for a service port that does not exist.
func (l *Ledger[K]) Keep(endpoints func(changetracker.ServicePortName) (map[netip.AddrPort]bool, bool)) {
	for name, p := range l.ports {
		has, exists := endpoints(name)
		if !exists {
			delete(l.ports, name)
			continue
		}
		for endpoint, n := range p.endpoints {
			if !has[endpoint] {
				p.gone += n
				delete(p.endpoints, endpoint)
			}
		}
	}
}

// Counts returns the numbers, sorted.
func (l *Ledger[K]) Counts() proxier.Counts {
	return proxier.Counts{Since: l.since, ServicePorts: list(l.ports)}
}
