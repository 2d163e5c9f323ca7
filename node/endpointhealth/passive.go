package endpointhealth

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// passiveWindow is how long a failed connection counts if no other one follows.
const passiveWindow = 30 * time.Second

// passive counts the failed connections to each endpoint, until one succeeds.
type passive struct {
	wake   chan struct{}
	places atomic.Int64 // len(records), to be quick while nothing fails

	mu      sync.Mutex // guards records
	records map[place]failureRecord
}

type failureRecord struct {
	failures int
	last     time.Time
	reason   string
	doubted  bool // clients may be the cause of one of them
}

func newPassive() passive {
	return passive{wake: make(chan struct{}, 1), records: map[place]failureRecord{}}
}

// Report tells how a connection to an endpoint went: nil if the endpoint answered, and otherwise
// why not. Errors that are no fault of the endpoint are ignored, such as a lack of descriptors. It
// may be called at any time, and returns soon. Reports about endpoints that are not checked do not
// matter.
func (c *Checker) Report(endpoint netip.AddrPort, protocol v1.Protocol, err error) {
	c.report(endpoint, protocol, err, false)
}

// Suspect is Report for connections of others, whose failures prove nothing: a client can send packets
// that no endpoint answers, or be stopped by a network policy. Where failures in a row would eject the
// endpoint, it is checked first, by the CheckPolicy's Probe, or by a connection to its port if that is TCP;
// it is ejected if that fails too.
func (c *Checker) Suspect(endpoint netip.AddrPort, protocol v1.Protocol, err error) {
	c.report(endpoint, protocol, err, true)
}

func (c *Checker) report(endpoint netip.AddrPort, protocol v1.Protocol, err error, doubted bool) {
	at := place{netip.AddrPortFrom(endpoint.Addr().Unmap(), endpoint.Port()), protocol}
	switch {
	case err == nil:
		c.passive.forget(at)
	case !isLocal(err):
		c.passive.failed(at, cause(err).Error(), time.Now(), doubted)
	}
}

func (p *passive) forget(at place) {
	if p.places.Load() == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.records, at)
	p.places.Store(int64(len(p.records)))
}

func (p *passive) failed(at place, reason string, now time.Time, doubted bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.records[at]
	if now.Sub(t.last) > passiveWindow {
		t.failures, t.doubted = 0, false
	}
	p.records[at] = failureRecord{t.failures + 1, now, reason, t.doubted || doubted}
	p.places.Store(int64(len(p.records)))
	select {
	case p.wake <- struct{}{}:
	default: // it will wake up anyway
	}
}

// each calls judge for each endpoint with failures, and forgets those for which it returns
// true.
func (p *passive) each(judge func(at place, seen failureRecord) (done bool)) {
	if p.places.Load() == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for at, t := range p.records {
		if judge(at, t) {
			delete(p.records, at)
		}
	}
	p.places.Store(int64(len(p.records)))
}

// Observer returns an Observer for proxier.Deps that reports the connections of package
// userspace to the Checker, and passes everything on to next, which may be nil.
func (c *Checker) Observer(next proxier.Observer) proxier.Observer {
	connections, _ := next.(connection.Observer)
	return observer{c, next, connections}
}

type observer struct {
	checker     *Checker
	next        proxier.Observer
	connections connection.Observer
}

var _ connection.Observer = observer{}

// ObserveSync implements proxier.Observer.
func (o observer) ObserveSync(report proxier.SyncReport) {
	if o.next != nil {
		o.next.ObserveSync(report)
	}
}

// ObserveConnection implements connection.Observer.
func (o observer) ObserveConnection(report connection.Report) {
	protocol := v1.Protocol(report.Protocol.String())
	for i := range report.Attempts {
		a := &report.Attempts[i]
		o.checker.Report(a.Endpoint, protocol, a.Err)
	}
	if o.connections != nil {
		o.connections.ObserveConnection(report)
	}
}
