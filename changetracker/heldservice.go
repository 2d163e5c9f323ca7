package changetracker

import (
	"cmp"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// heldSlice is the stored content of an EndpointSlice, or of the hand-built endpoints of one
// port, which have no name. It is immutable. Every port has all the endpoints; they are stored
// once, because a slice may have thousands of both.
type heldSlice struct {
	sliceName
	created   time.Time
	ports     []numberedKey // sorted, never empty
	endpoints []Endpoint    // sorted by address, never empty
}

// numberedKey is a port of a slice. Several may have the same name (EPS-14, EPS-18). Number 0
// is for hand-built endpoints, which have their own.
type numberedKey struct {
	portKey
	number uint16
}

// sliceName identifies a slice within its namespace. Two Sources may have slices of the same
// name.
type sliceName struct{ from, name string }

func (n sliceName) compare(o sliceName) int {
	return cmp.Or(strings.Compare(n.from, o.from), strings.Compare(n.name, o.name))
}

// keys appends the names of the ports, in order, to buffer.
func (h *heldSlice) keys(buffer []portKey) []portKey {
	if h == nil {
		return buffer
	}
	for i := range h.ports {
		buffer = append(buffer, h.ports[i].portKey)
	}
	return buffer
}

// contributions yields those for a port, in order of number.
func (h *heldSlice) contributions(key portKey) iter.Seq[contribution] {
	return func(yield func(contribution) bool) {
		if h == nil {
			return
		}
		i, _ := slices.BinarySearchFunc(h.ports, key, func(p numberedKey, key portKey) int { return p.compare(key) })
		for ; i < len(h.ports) && h.ports[i].portKey == key; i++ {
			if !yield(contribution{slice: h, number: h.ports[i].number, endpoints: h.endpoints}) {
				return
			}
		}
	}
}

// succeeds reports whether the slice wins over o for an address of which both have an equally
// good record: the newer slice does, then the one whose Source and name sort first.
func (h *heldSlice) succeeds(o *heldSlice) bool {
	if c := h.created.Compare(o.created); c != 0 {
		return c > 0
	}
	return h.compare(o.sliceName) < 0
}

// heldService holds the objects of one Service in one family. States are built from it.
type heldService struct {
	ports []*ServicePort // sorted by name
	// offers are the ports of each Source, sorted by Source. None is empty, and the first one
	// counts. Nil if only the tracker itself, which is the Source without a name, has ports.
	offers []offer
	slices []*heldSlice // sorted by name
	// byHand has the hand-built endpoints of each Source, sorted by Source. No list is empty.
	byHand map[portKey][]*heldSlice
	// overrides has no empty maps.
	overrides map[portKey]overrides
}

func (s *heldService) empty() bool {
	return len(s.ports)+len(s.slices)+len(s.byHand)+len(s.overrides) == 0
}

// offer is the ports that one Source has of a Service.
type offer struct {
	from  string
	ports []*ServicePort
}

// offer replaces the ports of a Source, and returns the ports that count.
func (s *heldService) offer(from string, ports []*ServicePort) []*ServicePort {
	switch {
	case len(s.offers) > 0:
	case from == "":
		return ports
	case len(ports) == 0:
		return s.ports
	case len(s.ports) > 0:
		s.offers = []offer{{ports: s.ports}}
	}
	i, found := slices.BinarySearchFunc(s.offers, from, func(o offer, from string) int { return strings.Compare(o.from, from) })
	if found {
		s.offers = slices.Delete(s.offers, i, i+1)
	}
	if len(ports) > 0 {
		s.offers = slices.Insert(s.offers, i, offer{from: from, ports: ports})
	}
	if len(s.offers) == 0 {
		return nil
	}
	first := s.offers[0]
	if len(s.offers) == 1 && first.from == "" {
		s.offers = nil
	}
	return first.ports
}

// override replaces an Override, and reports whether it was another one.
func (s *heldService) override(key portKey, addr netip.AddrPort, o Override) (changed bool) {
	if s.overrides == nil {
		s.overrides = map[portKey]overrides{}
	}
	if s.overrides[key] == nil {
		s.overrides[key] = overrides{}
	}
	changed = s.overrides[key].replace(addr, o)
	if len(s.overrides[key]) == 0 {
		delete(s.overrides, key)
	}
	return changed
}

// findSlice returns the position of a slice in a list that is sorted by name.
func findSlice(list []*heldSlice, name sliceName) (index int, found bool) {
	return slices.BinarySearchFunc(list, name, func(h *heldSlice, name sliceName) int { return h.compare(name) })
}

func sliceOf(list []*heldSlice, name sliceName) *heldSlice {
	if i, found := findSlice(list, name); found {
		return list[i]
	}
	return nil
}

// withSlice returns the list with a slice added or replaced, or removed if h is nil.
func withSlice(list []*heldSlice, name sliceName, h *heldSlice) []*heldSlice {
	i, found := findSlice(list, name)
	switch {
	case found && h == nil:
		return slices.Delete(list, i, i+1)
	case found:
		list[i] = h
	case h != nil:
		return slices.Insert(list, i, h)
	}
	return list
}

// endpointKeys appends the ports of the slices and of the hand-built endpoints to buffer,
// sorted.
func (s *heldService) endpointKeys(buffer []portKey) []portKey {
	buffer = slices.AppendSeq(buffer, maps.Keys(s.byHand))
	for _, h := range s.slices {
		buffer = h.keys(buffer)
	}
	slices.SortFunc(buffer, portKey.compare)
	return slices.Compact(buffer)
}

func (s *heldService) port(key portKey) *ServicePort {
	i, found := slices.BinarySearchFunc(s.ports, key, func(p *ServicePort, key portKey) int { return p.key().compare(key) })
	if !found {
		return nil
	}
	return s.ports[i]
}

// contribution is the endpoints that one slice has for a port.
type contribution struct {
	slice *heldSlice
	// number is the endpoints' port, whether their Addr has it or not. 0 means that each Addr
	// has its own.
	number    uint16
	endpoints []Endpoint
}

// addr returns the address of one of the endpoints, with its port.
func (c *contribution) addr(e *Endpoint) netip.AddrPort {
	if c.number == 0 {
		return e.Addr
	}
	return netip.AddrPortFrom(e.Addr.Addr(), c.number)
}

// complete reports whether the endpoints' Addr has the port.
func (c *contribution) complete() bool { return c.endpoints[0].Addr.Port() != 0 }

// find returns the endpoint with the address, or nil.
func (c *contribution) find(addr netip.AddrPort) *Endpoint {
	switch {
	case c.number != 0 && c.number != addr.Port():
		return nil
	case !c.complete():
		addr = netip.AddrPortFrom(addr.Addr(), 0)
	}
	return findEndpoint(c.endpoints, addr)
}

// contributions yields those of all slices.
func (s *heldService) contributions(key portKey) iter.Seq[contribution] {
	return func(yield func(contribution) bool) {
		for _, list := range [...][]*heldSlice{s.byHand[key], s.slices} {
			for _, h := range list {
				for c := range h.contributions(key) {
					if !yield(c) {
						return
					}
				}
			}
		}
	}
}
