package counting

import (
	"net/netip"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/flows"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// mostOpen and mostOfPort are how many open flows a Traffic remembers, of all service ports and of
// one. What others have counts when they end.
const (
	mostOpen   = 1 << 18
	mostOfPort = mostOpen / 8
	// mostEnded is far more than end while one message of a listing is on its way.
	mostEnded = 1 << 15
)

// Traffic adds up the traffic of flows by service port and endpoint, in one family. A flow's
// traffic is known from listings of open flows, and when it ends. Calls must not overlap.
type Traffic struct {
	since    time.Time
	services map[changetracker.ServicePortName]*followed
	owners   map[desired.Key]*followed
	open     map[uint64]openFlow
	// ended and endedBefore are flows that ended lately: a listing may still have them.
	ended, endedBefore map[uint64]struct{}
	listing            uint32
	// mostOpen and mostOfPort are the constants, except in tests.
	mostOpen, mostOfPort int
}

// followed is a service port whose flows count.
type followed struct {
	*port

	service *desired.Service
	open    int
	deleted bool
}

// openFlow is the traffic of an open flow that is in the numbers, and whose it is: nil if that
// is not known yet.
type openFlow struct {
	traffic connection.Traffic
	of      *followed
	listing uint32 // the last one that had it
}

// NewTraffic returns a Traffic without service ports and numbers.
func NewTraffic() *Traffic {
	return &Traffic{
		services: map[changetracker.ServicePortName]*followed{}, owners: map[desired.Key]*followed{}, open: map[uint64]openFlow{},
		ended: map[uint64]struct{}{}, mostOpen: mostOpen, mostOfPort: mostOfPort,
	}
}

// Seen is a flow in a notification or a listing. Identity is unique among flows.
type Seen struct {
	Identity uint64
	flows.Flow
	Traffic connection.Traffic
}

// Begin is called for each flow that is open when counting begins: its traffic up to now does not
// count.
func (t *Traffic) Begin(f *Seen) {
	if _, known := t.open[f.Identity]; !known && f.Translated() && len(t.open) < t.mostOpen {
		t.open[f.Identity] = openFlow{traffic: f.Traffic, listing: t.listing}
	}
}

// Begun says when counting began. Further calls do nothing.
func (t *Traffic) Begun(now time.Time) {
	if t.since.IsZero() {
		t.since = now
	}
}

// BeginListing is called before a listing of open flows.
func (t *Traffic) BeginListing() {
	t.listing++
	t.forgetEnded()
}

func (t *Traffic) forgetEnded() { t.ended, t.endedBefore = map[uint64]struct{}{}, t.ended }

// Listed takes a flow that is open. nodePort reports whether an address accepts node ports.
func (t *Traffic) Listed(f *Seen, nodePort func(netip.Addr) bool) {
	_, now := t.ended[f.Identity]
	_, before := t.endedBefore[f.Identity]
	if now || before || !f.Translated() {
		return
	}
	last, known := t.open[f.Identity]
	if last.of == nil {
		of := t.owner(f, nodePort)
		switch {
		case !known && (of == nil || len(t.open) >= t.mostOpen || of.open >= t.mostOfPort):
			return
		case of == nil:
			last.listing = t.listing
			t.open[f.Identity] = last
			return
		}
		last.of = of
		of.open++
	}
	t.add(last.of, f, last.traffic)
	t.open[f.Identity] = openFlow{traffic: f.Traffic, of: last.of, listing: t.listing}
}

// EndListing is called when a listing was complete and the notifications up to its end were taken.
// It forgets flows that two listings did not have: nobody told their end.
func (t *Traffic) EndListing() {
	for identity, f := range t.open {
		if t.listing-f.listing > 1 {
			t.forget(identity, f)
		}
	}
}

// Ended takes a flow that has ended.
func (t *Traffic) Ended(f *Seen, nodePort func(netip.Addr) bool) {
	if !f.Translated() {
		return
	}
	last, known := t.open[f.Identity]
	of := last.of
	if of == nil {
		of = t.owner(f, nodePort)
	}
	if of == nil && !known {
		return
	}
	t.forget(f.Identity, last)
	t.add(of, f, last.traffic)
	if len(t.ended) >= mostEnded {
		t.forgetEnded()
	}
	t.ended[f.Identity] = struct{}{}
}

func (t *Traffic) forget(identity uint64, f openFlow) {
	delete(t.open, identity)
	if f.of != nil {
		f.of.open--
	}
}

// owner returns whose a flow is, nil if nobody's.
func (t *Traffic) owner(f *Seen, nodePort func(netip.Addr) bool) *followed {
	key := desired.Key{VIP: f.Dialled.Addr(), Protocol: f.Protocol, Port: f.Dialled.Port()}
	if of := t.owners[key]; of != nil {
		return of
	}
	key.VIP = netip.Addr{}
	if of := t.owners[key]; of != nil && nodePort(f.Dialled.Addr()) {
		return of
	}
	return nil
}

// add counts what a flow has more than before.
func (t *Traffic) add(of *followed, f *Seen, before connection.Traffic) {
	if of == nil || of.deleted {
		return
	}
	more := f.Traffic.Minus(before)
	if f.Traffic.BytesIn < before.BytesIn || f.Traffic.BytesOut < before.BytesOut { // another program has set the counters to 0
		more = f.Traffic
	}
	endpoint := f.Server
	if !has(of.service, endpoint) {
		endpoint = netip.AddrPort{}
	}
	of.add(endpoint, numbers{traffic: more})
}

// Applied is called after an update: flows of the service ports that follow selects count from
// now on. What comes again begins at zero.
func (t *Traffic) Applied(outcomes []desired.Applied, follow func(*desired.Service) bool) {
	for i := range outcomes {
		if of := t.services[outcomes[i].Name]; of != nil {
			t.disown(of)
		}
	}
	for i := range outcomes {
		if s := outcomes[i].Is; s != nil && follow(s) {
			t.follow(s)
		} else {
			t.remove(outcomes[i].Name)
		}
	}
}

func (t *Traffic) follow(s *desired.Service) {
	of := t.services[s.Name]
	if of == nil {
		of = &followed{port: newPort()}
		t.services[s.Name] = of
	}
	of.service = s
	of.keep(s)
	for i := range s.Frontends {
		t.owners[s.Key(&s.Frontends[i])] = of
	}
}

func (t *Traffic) remove(name changetracker.ServicePortName) {
	if of := t.services[name]; of != nil {
		t.disown(of)
		delete(t.services, name)
		of.deleted = true // open flows may still refer to it
		*of.port = port{}
	}
}

// disown forgets the frontends of a service port.
func (t *Traffic) disown(of *followed) {
	for i := range of.service.Frontends {
		if key := of.service.Key(&of.service.Frontends[i]); t.owners[key] == of {
			delete(t.owners, key)
		}
	}
}

// Counts returns the numbers of service ports with traffic, sorted.
func (t *Traffic) Counts() connection.Counts {
	ports := map[changetracker.ServicePortName]*port{}
	for name, of := range t.services {
		if of.gone != (numbers{}) || len(of.endpoints) > 0 {
			ports[name] = of.port
		}
	}
	return connection.Counts{Since: t.since, Traffic: true, ServicePorts: list(ports)}
}
