package changetracker

import (
	"maps"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// Override is what somebody knows of an endpoint beside what slices say: a health
// checker of its own, or an operator. The zero value is none.
type Override struct {
	// Eject keeps new connections away, as if the endpoint had failed its readiness
	// probe: it stays in the State, neither Ready nor Serving. Where that would leave a
	// service port without a usable endpoint, on any node, nothing of it is ejected.
	Eject bool
	// Weight replaces Endpoint.Weight. 0 leaves it as it is.
	Weight uint16
}

// overrides are those of one service port.
type overrides map[netip.AddrPort]Override

// Override puts an Override in the place of an earlier one of the endpoint; the zero
// value takes it away, and the endpoint is again exactly as slices say. It stays while
// slices or Endpoints.Set have the endpoint, also when they change it or when another
// slice brings it. It ends at an Apply, whatever its outcome, that finds the service
// port without the endpoint. So it may come before the endpoint does, if no Apply comes
// between.
//
// It is a change like any other, of that service port alone. changed says whether an
// Apply may see a difference. While a service port has overrides, changed of other calls
// may be true for a difference that an override hides.
func (t *Tracker) Override(name ServicePortName, addr netip.AddrPort, o Override) (changed bool) {
	if !addr.IsValid() {
		return false
	}
	s := t.store
	s.mu.Lock()
	defer s.unlock()
	addr = netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port())
	f := s.families[addrFamily(addr.Addr())]
	return f != nil && f.override(name, addr, o)
}

// Refresh puts a service port into the next Delta, also if nothing of it differs, because
// something that the answer of a hook depends on has changed. Options.EditEndpoints runs
// again, and so does what the receiver of the Delta has, as desired.Resolver.EditSelection.
// changed says whether there is such a service port.
func (t *Tracker) Refresh(name ServicePortName) (changed bool) {
	s := t.store
	s.mu.Lock()
	defer s.unlock()
	key := portKey{port: name.Port, protocol: name.Protocol}
	for _, f := range s.families {
		if f == nil {
			continue
		}
		if held := f.services[name.NamespacedName]; held != nil && held.port(key) != nil {
			f.mark(name.NamespacedName).refresh(key)
			changed = true
		}
	}
	return changed
}

func (f *family) override(name ServicePortName, addr netip.AddrPort, o Override) (changed bool) {
	key := portKey{port: name.Port, protocol: name.Protocol}
	s := f.service(name.NamespacedName)
	defer f.dropIfEmpty(name.NamespacedName, s)
	if s.overrides[key][addr] == o {
		return false
	}
	s.override(key, addr, o)
	if !f.has(s, key, addr) {
		f.early[name.NamespacedName] = struct{}{}
		return false
	}
	f.mark(name.NamespacedName).touch(touched{portKey: key, again: true})
	return true
}

func (s *heldService) override(key portKey, addr netip.AddrPort, o Override) {
	if o == (Override{}) {
		if delete(s.overrides[key], addr); len(s.overrides[key]) == 0 {
			delete(s.overrides, key)
		}
		return
	}
	if s.overrides == nil {
		s.overrides = map[portKey]overrides{}
	}
	if s.overrides[key] == nil {
		s.overrides[key] = overrides{}
	}
	s.overrides[key][addr] = o
}

// has says whether the State to come has an endpoint, but for what EditEndpoints does.
func (f *family) has(s *heldService, key portKey, addr netip.AddrPort) bool {
	var buffer [16]contribution
	return f.uses(s, key) && winner(s.contributions(buffer[:0], key), addr).endpoint != nil
}

// endOverrides drops the overrides of endpoints that a Service does not have.
func (f *family) endOverrides(name types.NamespacedName) {
	s := f.services[name]
	if s == nil {
		return
	}
	for key, list := range s.overrides {
		maps.DeleteFunc(list, func(addr netip.AddrPort, _ Override) bool { return !f.has(s, key, addr) })
		if len(list) == 0 {
			delete(s.overrides, key)
		}
	}
	f.dropIfEmpty(name, s)
}

// apply returns list itself when there is nothing to do, or else a changed copy.
func (o overrides) apply(list []Endpoint) []Endpoint {
	if len(o) == 0 {
		return list
	}
	ejects := slices.ContainsFunc(list, func(e Endpoint) bool { return e.Usable() && !o[e.Addr].Eject })
	list = slices.Clone(list)
	for i := range list {
		e := &list[i]
		own := o[e.Addr]
		if own.Weight != 0 {
			e.Weight = canonicalWeight(own.Weight)
		}
		if own.Eject && ejects {
			e.Ready, e.Serving = false, false
		}
	}
	return list
}
