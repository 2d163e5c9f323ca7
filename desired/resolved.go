package desired

import (
	"cmp"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Resolved is a State on one node, in which each service port has the frontends that it gets:
// if several claim one, the first claim gets it. Nothing is computed in advance: a lookup costs what it
// is about, not the size of the State.
//
// The Kind of the frontend comes first: the API server allocates ClusterIPs and only controllers write the status of
// load balancers, but every user can write an external IP. Then the older Service comes first, and one of unknown age
// last. Then the UID and the name decide, so nobody can take a VIP that is in use by choosing a name. Of a VIP that
// is an address of the node, and accepts node ports, and a node port of the same number, the older Service wins, but
// a ClusterIP always does.
//
// It never changes, so several goroutines may use it at once. It keeps its State in memory. A
// nil Resolved has no service ports.
type Resolved struct {
	state    *changetracker.State
	resolver Resolver
	globals  Globals
	// nodeAddrs are the node's addresses that accept node ports. A VIP there conflicts with
	// another service port's node port.
	nodeAddrs []netip.Addr
	// claims is the State that decides who gets a frontend, if it is not state.
	claims      *changetracker.State
	firstClaims *firstClaims
	kept        kept
	// known are service ports as they were resolved when they were programmed, with the frontends that
	// they ask for.
	known map[changetracker.ServicePortName]selected
}

// kept are service ports that differ from those of a State, because programming them failed.
type kept struct {
	services map[changetracker.ServicePortName]keptPort
	holders  map[Key]changetracker.ServicePortName
}

// keptPort is a service port as an engine has it.
type keptPort struct {
	service   *Service                 // nil: does not exist
	endpoints []changetracker.Endpoint // all that it had when it was programmed
}

// sourceOf returns the change of a service port that failed: nothing is known of the States between.
func (k *keptPort) sourceOf(change *Change, now *changetracker.State) *changetracker.PortChange {
	source := &changetracker.PortChange{Name: change.Name, Added: now.Endpoints(change.Name), Removed: k.endpoints}
	if k.service != nil {
		source.Before = k.service.Port
	}
	if change.After != nil {
		source.After = change.After.Port
	}
	return source
}

// firstClaims caches the first claims to Keys that many service ports claim, because the
// claims are compared for each of them.
type firstClaims struct {
	mu     sync.Mutex // guards claims
	claims map[Key]claim
}

// manyClaims is how many claims a Key must have for its first claim to be cached.
const manyClaims = 8

func (c *firstClaims) get(key Key) (first claim, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first, ok = c.claims[key]
	return first, ok
}

func (c *firstClaims) put(key Key, first claim) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.claims == nil {
		c.claims = map[Key]claim{}
	}
	c.claims[key] = first
}

// NewResolved returns a State on the Resolver's node, with these Globals.
func NewResolved(state *changetracker.State, resolver Resolver, globals Globals) *Resolved {
	r := &Resolved{state: state, claims: state, resolver: resolver, globals: globals, firstClaims: &firstClaims{}}
	for _, a := range globals.NodeAddresses {
		if globals.AcceptsNodePorts(a) {
			r.nodeAddrs = append(r.nodeAddrs, a)
		}
	}
	return r
}

// View returns the State as the Resolver's node sees it: the endpoints with all fields that
// the trackers store. It is the zero View for nil.
func (r *Resolved) View() changetracker.View {
	if r == nil {
		return changetracker.View{}
	}
	return r.state.For(r.resolver.Node)
}

// State returns the State; nil for a nil Resolved.
func (r *Resolved) State() *changetracker.State {
	if r == nil {
		return nil
	}
	return r.state
}

// Changed returns the names of the Services that may differ between two Resolved, sorted: they
// have changed, or have won or lost a frontend because others have. all means that any Service
// may differ: the nodes or settings do, or an EditSelection decides, whose other inputs are
// unknown. Otherwise it costs about what has changed.
func (r *Resolved) Changed(since *Resolved) (names []types.NamespacedName, all bool) {
	switch {
	case r == since:
		return nil, false
	case r == nil || since == nil || !r.sameClaims(since) || !r.resolver.equal(&since.resolver):
		return nil, true
	}
	for name := range r.state.Changed(since.state) {
		names = append(names, name)
		for _, port := range slices.Concat(since.state.ServicePorts(name), r.state.ServicePorts(name)) {
			if was, is := since.port(port), r.port(port); was != is {
				for _, other := range r.moved(since, was, is) {
					if other.Name != "" {
						names = append(names, other.NamespacedName)
					}
				}
			}
		}
	}
	slices.SortFunc(names, func(a, b types.NamespacedName) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	return slices.Compact(names), false
}

// Service returns a service port with the frontends that it gets. ok is false if there is none
// of that name. It costs the endpoints of the service port; for those of an Update, see
// Change.Before.
func (r *Resolved) Service(name changetracker.ServicePortName) (s *Service, ok bool) {
	if r == nil {
		return nil, false
	}
	if port, kept := r.kept.services[name]; kept {
		return port.service, port.service != nil
	}
	if s, ok = r.asks(name); ok {
		s = s.without(r.lost(s.Name, s.Port))
	}
	return s, ok
}

// asks returns a service port with the frontends that it asks for.
func (r *Resolved) asks(name changetracker.ServicePortName) (s *Service, ok bool) {
	if t, ok := r.known[name]; ok {
		return t.service, true
	}
	return r.resolver.Resolve(r.state, name)
}

// All yields each service port with the frontends that it gets, in no particular order. It costs
// less than Service for each.
func (r *Resolved) All() iter.Seq[*Service] {
	return func(yield func(*Service) bool) {
		if r == nil {
			return
		}
		for _, port := range r.kept.services {
			if port.service != nil && !yield(port.service) {
				return
			}
		}
		all, contested := r.asked()
		for _, s := range all {
			if _, kept := r.kept.services[s.Name]; kept {
				continue
			}
			if contested(s) {
				s = s.without(r.lost(s.Name, s.Port))
			}
			if !yield(s) {
				return
			}
		}
	}
}

// asked returns all service ports with the frontends that they ask for. contested reports
// whether others may get some of them.
func (r *Resolved) asked() (all []*Service, contested func(*Service) bool) {
	all = make([]*Service, 0, r.state.Len())
	shared := make(map[Key]bool, 2*r.state.Len()) // false: only one service port claims it
	vipAtNode := false
	for name := range r.state.All() {
		s, ok := r.asks(name)
		if !ok {
			continue
		}
		all = append(all, s)
		for i := range s.Frontends {
			key := s.Key(&s.Frontends[i])
			_, shared[key] = shared[key]
			vipAtNode = vipAtNode || slices.Contains(r.nodeAddrs, key.VIP)
		}
	}
	for range r.state.Changed(r.claims) { // at the first difference
		return all, func(*Service) bool { return true }
	}
	return all, func(s *Service) bool {
		return vipAtNode || slices.ContainsFunc(s.Frontends, func(f Frontend) bool { return shared[s.Key(&f)] })
	}
}

// Owner returns the service port that gets what clients send to a Key. It may be one with a
// node port, if the VIP is an address of the node and its Service is older. ok is false if no
// service port claims the Key.
func (r *Resolved) Owner(key Key) (name changetracker.ServicePortName, ok bool) {
	if r == nil {
		return name, false
	}
	if name, ok = r.kept.holders[key]; ok {
		return name, true
	}
	owner, ok := r.winner(key)
	if _, kept := r.kept.services[owner.Name]; kept {
		return name, false
	}
	return owner.Name, ok
}

// port returns a service port as it counts in claims; nil if there is none.
func (r *Resolved) port(name changetracker.ServicePortName) *changetracker.ServicePort {
	port, _ := r.claims.Service(name)
	return port
}

// has reports whether some service port has the frontend of a Key.
func (r *Resolved) has(key Key) bool {
	if _, ok := r.kept.holders[key]; ok {
		return true
	}
	name, ok := r.holder(key)
	_, kept := r.kept.services[name]
	return ok && !kept
}

// first returns the first claim to a Key.
func (r *Resolved) first(key Key) (first claim, ok bool) {
	if first, ok = r.firstClaims.get(key); ok {
		return first, true
	}
	claiming := 0
	for name := range r.claimants(key) {
		claiming++
		port := r.port(name)
		kind, asks := r.resolver.kindOf(port, key.VIP)
		if c := claimOf(port, kind); asks && (!ok || c.compare(first) < 0) {
			first, ok = c, true
		}
	}
	if ok && claiming > manyClaims {
		r.firstClaims.put(key, first)
	}
	return first, ok
}

func (r *Resolved) claimants(key Key) iter.Seq[changetracker.ServicePortName] {
	protocol := v1.Protocol(key.Protocol.String())
	if key.VIP.IsValid() {
		return r.claims.ByAddr(netip.AddrPortFrom(key.VIP, key.Port), protocol)
	}
	return r.claims.ByNodePort(key.Port, protocol)
}

// winner returns the claim that gets what clients send to a Key.
func (r *Resolved) winner(key Key) (winner claim, ok bool) {
	winner, ok = r.first(key)
	if ok && slices.Contains(r.nodeAddrs, key.VIP) {
		if there, asks := r.first(Key{Protocol: key.Protocol, Port: key.Port}); asks && winner.yieldsTo(there) {
			return there, true
		}
	}
	return winner, ok
}

// lost returns the Keys that a service port claims and others own, and the addresses at which
// its node port does not count.
func (r *Resolved) lost(name changetracker.ServicePortName, p *changetracker.ServicePort) (lost []Key) {
	others := func(key Key) bool {
		winner, asked := r.winner(key)
		return asked && winner.Name != name
	}
	for _, key := range r.resolver.keys(p) {
		if others(key) {
			lost = append(lost, key)
			continue
		}
		if key.VIP.IsValid() {
			continue
		}
		for _, at := range r.Conflicting(key) {
			if others(at) {
				lost = append(lost, at)
			}
		}
	}
	slices.SortFunc(lost, Key.Compare)
	return slices.Compact(lost)
}

// moved returns the service ports that may have won or lost a frontend because one of them
// changed. The zero name may be among them.
func (r *Resolved) moved(before *Resolved, was, is *changetracker.ServicePort) (names []changetracker.ServicePortName) {
	keys := append(before.resolver.keys(was), r.resolver.keys(is)...)
	slices.SortFunc(keys, Key.Compare)
	for _, key := range slices.Compact(keys) {
		first, _ := before.first(key)
		now, _ := r.first(key)
		if first == now {
			continue
		}
		names = append(names, first.Name, now.Name)
		for _, other := range r.Conflicting(key) {
			if there, ok := r.first(other); ok {
				names = append(names, there.Name)
			}
		}
	}
	return names
}

// holder returns the service port that gets the frontend of a Key. There is none if the
// packets go to a node port whose service port does not claim the Key.
func (r *Resolved) holder(key Key) (name changetracker.ServicePortName, ok bool) {
	winner, ok := r.winner(key)
	if !ok || winner.Kind != NodePort || !key.VIP.IsValid() {
		return winner.Name, ok
	}
	p := r.port(winner.Name)
	return winner.Name, p.Port == key.Port && r.resolver.claims(p, key.VIP)
}

// Conflicting returns the Keys that conflict with a Key at an address of the node: the node
// port for a VIP, the VIPs for a node port.
func (r *Resolved) Conflicting(key Key) (others []Key) {
	if r == nil {
		return nil
	}
	if slices.Contains(r.nodeAddrs, key.VIP) {
		key.VIP = netip.Addr{}
		return []Key{key}
	}
	if !key.VIP.IsValid() {
		for _, key.VIP = range r.nodeAddrs {
			others = append(others, key)
		}
	}
	return others
}

// sameClaims reports whether the inputs of claims other than the service ports are equal.
func (r *Resolved) sameClaims(o *Resolved) bool {
	a, b := &r.resolver, &o.resolver
	return slices.Equal(a.Kinds, b.Kinds) && a.DenyNodeExternalIPs == b.DenyNodeExternalIPs && slices.Equal(a.ReservedExternalIPs, b.ReservedExternalIPs) &&
		slices.Equal(a.Node.PodCIDRs, b.Node.PodCIDRs) && slices.Equal(a.Node.Addresses, b.Node.Addresses) &&
		slices.Equal(r.nodeAddrs, o.nodeAddrs)
}
