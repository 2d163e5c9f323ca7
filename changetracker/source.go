package changetracker

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// heldSlice is what is remembered of an EndpointSlice, or of the hand-built
// endpoints of one port, which have no name. It is immutable. Every port has all
// the endpoints, which are held once: a slice may have thousands of both.
type heldSlice struct {
	name      string
	created   time.Time
	ports     []numberedKey // sorted, never empty
	endpoints []Endpoint    // sorted by address, never empty
}

// keys are the names of the ports, in order, appended to buffer.
func (h *heldSlice) keys(buffer []portKey) []portKey {
	if h == nil {
		return buffer
	}
	for i := range h.ports {
		buffer = append(buffer, h.ports[i].portKey)
	}
	return buffer
}

// contributions are those for a port, in order of number, appended to buffer.
func (h *heldSlice) contributions(buffer []contribution, key portKey) []contribution {
	if h == nil {
		return buffer
	}
	i, _ := slices.BinarySearchFunc(h.ports, key, func(p numberedKey, key portKey) int { return p.compare(key) })
	for ; i < len(h.ports) && h.ports[i].portKey == key; i++ {
		buffer = append(buffer, contribution{slice: h, number: h.ports[i].number, endpoints: h.endpoints})
	}
	return buffer
}

// succeeds says whether the slice wins over o for an address of which both have
// an equally good record: the newer one, then the one whose name comes first.
func (h *heldSlice) succeeds(o *heldSlice) bool {
	if c := h.created.Compare(o.created); c != 0 {
		return c > 0
	}
	return h.name < o.name
}

// source is everything known of one Service in one family: what States are built
// from.
type source struct {
	ports  []*ServicePort // sorted by name
	slices []*heldSlice   // sorted by name
	byHand map[portKey]*heldSlice
	// overrides has no empty maps.
	overrides map[portKey]overrides
}

func (s *source) empty() bool { return len(s.ports)+len(s.slices)+len(s.byHand)+len(s.overrides) == 0 }

func (s *source) find(slice string) (index int, found bool) {
	return slices.BinarySearchFunc(s.slices, slice, func(h *heldSlice, name string) int {
		return strings.Compare(h.name, name)
	})
}

func (s *source) slice(name string) *heldSlice {
	if i, found := s.find(name); found {
		return s.slices[i]
	}
	return nil
}

// put adds a slice, replaces it, or takes it out when h is nil.
func (s *source) put(name string, h *heldSlice) {
	i, found := s.find(name)
	switch {
	case found && h == nil:
		s.slices = slices.Delete(s.slices, i, i+1)
	case found:
		s.slices[i] = h
	case h != nil:
		s.slices = slices.Insert(s.slices, i, h)
	}
}

// endpointKeys are the ports of the slices and of the hand-built endpoints,
// sorted, appended to buffer.
func (s *source) endpointKeys(buffer []portKey) []portKey {
	buffer = slices.AppendSeq(buffer, maps.Keys(s.byHand))
	for _, h := range s.slices {
		buffer = h.keys(buffer)
	}
	slices.SortFunc(buffer, portKey.compare)
	return slices.Compact(buffer)
}

func (p *ServicePort) key() portKey { return portKey{port: p.Name.Port, protocol: p.Name.Protocol} }

func (s *source) port(key portKey) *ServicePort {
	i, found := slices.BinarySearchFunc(s.ports, key, func(p *ServicePort, key portKey) int { return p.key().compare(key) })
	if !found {
		return nil
	}
	return s.ports[i]
}

// contribution is the endpoints that one slice has for the port in question.
type contribution struct {
	slice *heldSlice
	// number is the endpoints' port, whether their Addr has it or not; 0 means that
	// each Addr has one of its own.
	number    uint16
	endpoints []Endpoint
}

// addr is the address of one of the endpoints, with its port.
func (c *contribution) addr(e *Endpoint) netip.AddrPort {
	if c.number == 0 {
		return e.Addr
	}
	return netip.AddrPortFrom(e.Addr.Addr(), c.number)
}

// complete says that the endpoints hold their port.
func (c *contribution) complete() bool { return c.endpoints[0].Addr.Port() != 0 }

// find is the endpoint that has the address, or nil.
func (c *contribution) find(addr netip.AddrPort) *Endpoint {
	switch {
	case c.number != 0 && c.number != addr.Port():
		return nil
	case !c.complete():
		addr = netip.AddrPortFrom(addr.Addr(), 0)
	}
	return findEndpoint(c.endpoints, addr)
}

// contributions are those of all slices, appended to buffer.
func (s *source) contributions(buffer []contribution, key portKey) []contribution {
	buffer = s.byHand[key].contributions(buffer, key)
	for _, h := range s.slices {
		buffer = h.contributions(buffer, key)
	}
	return buffer
}

// record is one slice's opinion of an address.
type record struct {
	slice *heldSlice
	addr  netip.AddrPort
	// endpoint is nil when the slice does not have the address. Its own Addr may
	// lack the port.
	endpoint *Endpoint
}

// value is the endpoint with its whole address.
func (r record) value() Endpoint {
	e := *r.endpoint
	e.Addr = r.addr
	return e
}

// better is the record that counts of two for the same address (W-04).
func (r record) better(o record) record {
	switch {
	case r.endpoint == nil:
		return o
	case o.endpoint == nil:
		return r
	}
	mine, theirs := r.endpoint.rank(), o.endpoint.rank()
	if theirs > mine || theirs == mine && o.slice.succeeds(r.slice) {
		return o
	}
	return r
}

// winner is the record of addr that counts among all contributions.
func winner(contributions []contribution, addr netip.AddrPort) record {
	var best record
	for _, c := range contributions {
		best = best.better(record{slice: c.slice, addr: addr, endpoint: c.find(addr)})
	}
	return best
}

// findEndpoint is the endpoint of a sorted list that has the address, or nil.
func findEndpoint(list []Endpoint, addr netip.AddrPort) *Endpoint {
	i, found := searchEndpoint(list, addr)
	if !found {
		return nil
	}
	return &list[i]
}

func searchEndpoint(list []Endpoint, addr netip.AddrPort) (index int, found bool) {
	low, high := 0, len(list)
	for low < high { // by hand, because an Endpoint is large to pass to a func
		middle := int(uint(low+high) >> 1)
		if list[middle].Addr.Compare(addr) < 0 {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low, low < len(list) && list[low].Addr == addr
}
