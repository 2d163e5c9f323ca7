package desired

import (
	"iter"
	"net/netip"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Resolved is what the service ports of a State mean on one node, each with the frontends
// that it gets: of several that ask for one, Claim says which. Nothing is worked out
// before somebody asks, and a question costs what it is about, not what there is. It is
// for lookups, not to walk.
//
// It never changes, so any number of goroutines may ask it at once. It keeps its State in
// memory. A nil one has no service ports.
type Resolved struct {
	state    *changetracker.State
	resolver Resolver
	globals  Globals
	// nodeAddrs are those of the node's addresses that accept node ports: a VIP there
	// is in the way of another service port's node port.
	nodeAddrs []netip.Addr
	// claims is where it is decided who gets a frontend, if not in the state.
	claims    *changetracker.State
	contested *contested
	kept      kept
}

// kept are service ports that are not as in a State.
type kept struct {
	services map[changetracker.ServicePortName]*Service // nil: not there at all
	holders  map[Key]changetracker.ServicePortName
}

// contested are the first claims to Keys that many ask for: each of them wants to know.
type contested struct {
	mu     sync.Mutex // guards claims
	claims map[Key]Claim
}

// manyAsk is how many must ask for a Key before its first claim is remembered.
const manyAsk = 8

func (c *contested) claim(key Key) (first Claim, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first, ok = c.claims[key]
	return first, ok
}

func (c *contested) remember(key Key, first Claim) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.claims == nil {
		c.claims = map[Key]Claim{}
	}
	c.claims[key] = first
}

// NewResolved tells what a State means on the Resolver's node, with these Globals.
func NewResolved(state *changetracker.State, resolver Resolver, globals Globals) *Resolved {
	r := &Resolved{state: state, claims: state, resolver: resolver, globals: globals, contested: &contested{}}
	for _, a := range globals.NodeAddresses {
		if globals.AcceptsNodePorts(a) {
			r.nodeAddrs = append(r.nodeAddrs, a)
		}
	}
	return r
}

// View is what it was made of, as the Resolver's node sees it: the endpoints with all that
// the trackers know. The zero View if there is none.
func (r *Resolved) View() changetracker.View {
	if r == nil {
		return changetracker.View{}
	}
	return r.state.For(r.resolver.Node)
}

// Service returns a service port with the frontends that it gets. ok is false when there
// is none of that name.
func (r *Resolved) Service(name changetracker.ServicePortName) (s *Service, ok bool) {
	if r == nil {
		return nil, false
	}
	if s, kept := r.kept.services[name]; kept {
		return s, s != nil
	}
	if s, ok = r.resolver.Resolve(r.state, name); ok {
		s = s.without(r.lost(s.Name, s.Port))
	}
	return s, ok
}

// Owner returns the service port that gets what clients send to a Key. That may be one
// with a node port, if the VIP is an address of the node and its Service is older. ok is
// false when nobody asks for the Key.
func (r *Resolved) Owner(key Key) (name changetracker.ServicePortName, ok bool) {
	if r == nil {
		return name, false
	}
	if name, ok = r.kept.holders[key]; ok {
		return name, true
	}
	claim, ok := r.winner(key)
	if _, kept := r.kept.services[claim.Name]; kept {
		return name, false
	}
	return claim.Name, ok
}

// port is a service port that counts in who gets a frontend; nil if there is none.
func (r *Resolved) port(name changetracker.ServicePortName) *changetracker.ServicePort {
	port, _ := r.claims.Service(name)
	return port
}

// has says whether some service port has the frontend of a Key.
func (r *Resolved) has(key Key) bool {
	if _, ok := r.kept.holders[key]; ok {
		return true
	}
	name, ok := r.holder(key)
	_, kept := r.kept.services[name]
	return ok && !kept
}

// first is the first claim to a Key.
func (r *Resolved) first(key Key) (first Claim, ok bool) {
	if first, ok = r.contested.claim(key); ok {
		return first, true
	}
	asking := 0
	for name := range r.askers(key) {
		asking++
		port := r.port(name)
		kind, asks := r.resolver.kindOf(port, key.VIP)
		if claim := claimOf(port, kind); asks && (!ok || claim.Compare(first) < 0) {
			first, ok = claim, true
		}
	}
	if ok && asking > manyAsk {
		r.contested.remember(key, first)
	}
	return first, ok
}

func (r *Resolved) askers(key Key) iter.Seq[changetracker.ServicePortName] {
	protocol := v1.Protocol(key.Protocol.String())
	if key.VIP.IsValid() {
		return r.claims.ByAddr(netip.AddrPortFrom(key.VIP, key.Port), protocol)
	}
	return r.claims.ByNodePort(key.Port, protocol)
}

// winner is the claim that gets what clients send to a Key.
func (r *Resolved) winner(key Key) (winner Claim, ok bool) {
	winner, ok = r.first(key)
	if ok && slices.Contains(r.nodeAddrs, key.VIP) {
		if there, asks := r.first(Key{Protocol: key.Protocol, Port: key.Port}); asks && winner.YieldsTo(there) {
			return there, true
		}
	}
	return winner, ok
}

// lost are the keys that others have of those that a service port asks for, and of the
// addresses that it would have its node port at.
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
		for _, at := range r.inTheWay(key) {
			if others(at) {
				lost = append(lost, at)
			}
		}
	}
	slices.SortFunc(lost, Key.Compare)
	return slices.Compact(lost)
}

// moved are the service ports that may have won or lost something, because one of them was
// different before. The zero name may be among them.
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
		for _, other := range r.inTheWay(key) {
			if there, ok := r.first(other); ok {
				names = append(names, there.Name)
			}
		}
	}
	return names
}

// holder is the service port that gets the frontend of a Key. There is none if the packets
// go to a node port whose service port does not ask for the Key.
func (r *Resolved) holder(key Key) (name changetracker.ServicePortName, ok bool) {
	winner, ok := r.winner(key)
	if !ok || winner.Kind != NodePort || !key.VIP.IsValid() {
		return winner.Name, ok
	}
	p := r.port(winner.Name)
	return winner.Name, p.Port == key.Port && r.resolver.asks(p, key.VIP)
}

// inTheWay are the Keys at which an address of the node may be a VIP and have a node port.
func (r *Resolved) inTheWay(key Key) (others []Key) {
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

// sameClaims says whether the same service ports would get the same.
func (r *Resolved) sameClaims(o *Resolved) bool {
	a, b := &r.resolver, &o.resolver
	return slices.Equal(a.Kinds, b.Kinds) && a.DenyNodeExternalIPs == b.DenyNodeExternalIPs &&
		slices.Equal(a.Node.PodCIDRs, b.Node.PodCIDRs) && slices.Equal(a.Node.Addresses, b.Node.Addresses) &&
		slices.Equal(r.nodeAddrs, o.nodeAddrs)
}
