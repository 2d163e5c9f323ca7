package nftables

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/maglev"
	"github.com/serviceplane/serviceplane/proxier"
)

// placed is a service port with its elements. It is not changed after it was made.
type placed struct {
	frontends []placedFrontend // in order of key
	// lists holds the endpoints in the slots of each scope.
	lists [2]slotList
	// from are the endpoints in lists with one slot for each, if they are many.
	from [2]desired.Endpoints
	// balanced is nil with a slot for each endpoint, chosen at random.
	balanced *balanced
	hairpin  []netip.Addr
	// health is the health check node port, for a Front; 0 for none.
	health uint16
	// affinity is the number of the service port in affinity records, 0 without session
	// affinity; timeout is that of the records, draws the choice and the number of slots of
	// each scope.
	affinity uint32
	timeout  class
	draws    [2]class
	// fast means that established connections take the fast path.
	fast bool
}

// target is an endpoint in a slot.
type target struct {
	addr netip.AddrPort
	id   uint32 // of the endpoint in affinity records; 0 without affinity
}

// placedFrontend is a frontend with the values of its elements; 0 means no element.
type placedFrontend struct {
	key        desired.Key
	closed     bool   // at all other ports of its VIP
	direct     bool   // its packets are forwarded unchanged
	entry      uint32 // class, for everybody
	limit      uint32 // class, of the client limit
	firewalled uint32 // class, behind the source ranges and the client limit
	outside    uint32 // class, for outside traffic under external policy Local
	inside     uint32 // class, for pods and the node under external policy Local
	affinityID uint32
	uses       [2]bool // which of the lists it has
	ranges     []netip.Prefix
}

func scopeIndex(s desired.Scope) int { return int(s - desired.ScopeCluster) }

func indexScope(i int) desired.Scope { return desired.ScopeCluster + desired.Scope(i) }

// placer gives every endpoint an index and every frontend its classes.
type placer struct {
	class    func(class) uint32 // makes it exist
	affinity *affinityService   // nil without session affinity
	// holds is Behind.Holds. If it is not nil, the rules choose no endpoint, so the classes
	// do not depend on the number of endpoints.
	holds func(netip.Addr) bool
	// traits are those of the engine.
	traits desired.Traits
	// clientLimit gives a frontend the class of its client limit, 0 for none; nil means that no frontend has one.
	clientLimit func(*desired.Frontend) uint32
}

// assignIndexes keeps endpoints of prev at their indexes where possible: each move costs kernel
// writes.
func (pl placer) assignIndexes(prev *placed, s *desired.Service) *placed {
	p := &placed{frontends: make([]placedFrontend, len(s.Frontends)), hairpin: s.OnNode, fast: pl.traits.TakesFastPath(s)}
	if pl.holds != nil && s.Port != nil {
		p.health = s.Port.HealthCheckNodePort
	}
	if len(s.Frontends) == 0 { // nothing leads to its endpoints; numbers stay for when something does again
		return p
	}
	if pl.affinity != nil {
		pl.affinity.keep(s.Cluster, s.Local)
	}
	for i := range p.lists {
		pl.placeScope(p, prev, s, i)
	}
	if pl.affinity != nil {
		pl.placeAffinity(p, s)
	}
	for i := range s.Frontends {
		p.frontends[i] = pl.frontend(p, s, &s.Frontends[i])
	}
	return p
}

// closes reports whether other ports of the VIP are rejected: those of a ClusterIP, and of
// an address that the engine behind added to the node.
func (pl placer) closes(f *desired.Frontend) bool {
	if pl.holds != nil {
		return f.VIP.IsValid() && pl.holds(f.VIP)
	}
	return f.Kind == desired.ClusterIP || f.Kind == desired.LoadBalancer && pl.traits.ClosedLoadBalancerIPs
}

func (pl placer) placeAffinity(p *placed, s *desired.Service) {
	p.affinity, p.timeout = pl.affinity.key(), timeoutClass(s.Affinity)
	pl.class(p.timeout)
	for i := range p.lists {
		if n := p.lists[i].len(); n > 0 {
			p.draws[i] = drawClass(indexScope(i), p.choice(), n)
			pl.class(p.draws[i])
		}
	}
}

func (p *placed) list(i int) slotList {
	if p == nil {
		return nil
	}
	return p.lists[i]
}

// frontend chooses the classes in the order of the checks of a packet: source ranges,
// client limit, external or internal traffic, endpoints.
func (pl placer) frontend(p *placed, s *desired.Service, f *desired.Frontend) placedFrontend {
	pf := placedFrontend{key: s.Key(f), closed: pl.closes(f), ranges: f.SourceRanges}
	if pf.direct = pl.traits.DirectReturn && f.Kind != desired.NodePort; pf.direct {
		kept := *f
		kept.Masquerade, f = desired.MasqueradeNone, &kept
	}
	if p.affinity != 0 {
		pf.affinityID = p.affinity | uint32(p.timeout)
	}
	pf.entry = pl.action(&pf, p, f)
	if f.ShortCircuit {
		pf.uses[scopeIndex(desired.ScopeCluster)] = true
		pf.outside, pf.entry = pf.entry, classLocal
		pf.inside = pl.forward(p, treatment{desired.MasqueradeNone, desired.ScopeCluster})
	}
	if f.Restricted {
		pf.firewalled, pf.entry = pf.entry, classFirewall
	}
	if pl.clientLimit == nil {
		return pf
	}
	if pf.limit = pl.clientLimit(f); pf.limit != 0 {
		if !f.Restricted {
			pf.firewalled = pf.entry
		}
		pf.entry = pl.class(gateClass(f.Restricted))
	}
	return pf
}

// forward returns the class that forwards to the endpoints of a scope.
func (pl placer) forward(p *placed, t treatment) uint32 {
	switch {
	case p.affinity != 0:
		return affinityClass(t)
	case pl.holds != nil:
		return pl.class(forwardingClass(t, atRandom, 1))
	default:
		return pl.class(forwardingClass(t, p.choice(), p.lists[scopeIndex(t.scope)].len()))
	}
}

func (pl placer) action(pf *placedFrontend, p *placed, f *desired.Frontend) uint32 {
	switch f.Action {
	case desired.Forward:
		pf.uses[scopeIndex(f.Scope)] = true
		return pl.forward(p, treatment{f.Masquerade, f.Scope})
	case desired.Drop:
		return classDrop
	case desired.Reject:
		return classReject
	default:
		return classReject
	}
}

// limit is the largest number of endpoints of a service port. Further endpoints, in the
// order of their addresses, get no traffic.
func (pl placer) limit(s *desired.Service) int {
	switch {
	case pl.affinity != nil:
		return maxAffinitySlot
	case choiceOf(s, pl.traits) != atRandom:
		return maglev.MaxEndpoints
	default:
		return maxEndpoints
	}
}

func (pl placer) target(addr netip.AddrPort, scope int) target {
	if pl.affinity == nil {
		return target{addr: addr}
	}
	return target{addr: addr, id: pl.affinity.endpoint(addr) | scopeBit(scope)}
}

// scopeBit distinguishes the scopes in affinity numbers.
func scopeBit(scope int) uint32 {
	if indexScope(scope) == desired.ScopeLocal {
		return affinityLocal
	}
	return 0
}

// Plan is for proxier.Abilities.
func (e *Engine) Plan(update desired.Update) (string, error) { return e.plan(update, nil) }

func (e *Engine) plan(update desired.Update, holds func(netip.Addr) bool) (string, error) {
	scratch, err := NewEngine(e.config, e.family, proxier.Deps{})
	if err != nil {
		return "", err
	}
	scratch.holds, scratch.behind = holds, e.behind
	scratch.fast.Store(e.fast.Load())
	scratch.limits.Store(e.limits.Load())
	scratch.asksForLimits = scratch.limitsClients() && anyService(&update, asksForLimit)
	scratch.begin(scratch.layoutFor(&update.Globals), false)
	t := &scratch.step
	scratch.placeAllInto(&update, t)
	v := view{layout: &scratch.state.layout, table: e.config.Names.Table, verdicts: map[setID][]string{}}
	for class, to := range staticClasses() {
		v.lead(class, to.chain, to.from)
	}
	if scratch.fastAfter() > 0 {
		v.flows = []flowtable{wantedFlowtable()}
	}
	v.chains = scratch.state.layout.chains()
	for _, c := range t.classes {
		v.lead(uint32(c), c.chain(), c.reachedFrom())
		v.chains = append(v.chains, scratch.state.layout.classChain(c))
	}
	v.elements = func(s *setSpec) []string {
		if slices.Contains(intervalSets(), s.id) {
			return prefixTexts(prefixesOf(&update.Globals, s.id))
		}
		return elementTexts(s, v.addrLen(), t.adds[s.id].buf)
	}
	var b strings.Builder
	err = v.print(&b)
	return b.String(), err
}

// placeAllInto adds all elements of a new table to one transaction.
func (e *Engine) placeAllInto(update *desired.Update, t *transaction) {
	for s := range update.Services() {
		e.change(t, s.Name, s)
	}
	e.state.flushCounts(t)
}
