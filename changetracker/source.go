package changetracker

import (
	"net/netip"
	"slices"
	"strings"
	"time"
)

// heldSlice is what is remembered of an EndpointSlice. It is immutable. The one
// without a name holds the hand-built endpoints of its Service: the API knows no
// object without name.
type heldSlice struct {
	name    string
	created time.Time
	ports   []portEndpoints // in any order
}

func (h *heldSlice) endpoints(key portKey) []Endpoint {
	if h == nil {
		return nil
	}
	for i := range h.ports {
		if h.ports[i].portKey == key {
			return h.ports[i].endpoints
		}
	}
	return nil
}

// same says that the slice was created then and holds just these ports, in this
// order.
func (h *heldSlice) same(ports []portEndpoints, created time.Time, equal func(a, b portEndpoints) bool) bool {
	if h == nil {
		return len(ports) == 0
	}
	return h.created.Equal(created) && slices.EqualFunc(h.ports, ports, equal)
}

// without is a copy of the ports but one.
func (h *heldSlice) without(key portKey) []portEndpoints {
	if h == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(h.ports), func(p portEndpoints) bool { return p.portKey == key })
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
}

func (s *source) empty() bool { return len(s.ports) == 0 && len(s.slices) == 0 }

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

// keys are the ports that the Service or one of its slices has, sorted, appended
// to buffer.
func (s *source) keys(buffer []portKey) []portKey {
	for _, p := range s.ports {
		buffer = append(buffer, p.key())
	}
	for _, h := range s.slices {
		for i := range h.ports {
			buffer = append(buffer, h.ports[i].portKey)
		}
	}
	slices.SortFunc(buffer, portKey.compare)
	return slices.Compact(buffer)
}

func (p *ServicePort) key() portKey { return portKey{port: p.Name.Port, protocol: p.Name.Protocol} }

func (s *source) port(key portKey) *ServicePort {
	for _, p := range s.ports {
		if p.key() == key {
			return p
		}
	}
	return nil
}

// contribution is the endpoints that one slice has for the port in question.
type contribution struct {
	slice     *heldSlice
	endpoints []Endpoint
}

// contributions are those of all slices, appended to buffer.
func (s *source) contributions(buffer []contribution, key portKey) []contribution {
	for _, h := range s.slices {
		if list := h.endpoints(key); len(list) > 0 {
			buffer = append(buffer, contribution{slice: h, endpoints: list})
		}
	}
	return buffer
}

// record is one slice's opinion of an address.
type record struct {
	slice    *heldSlice
	endpoint *Endpoint // nil: the slice does not have the address
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
		best = best.better(record{slice: c.slice, endpoint: findEndpoint(c.endpoints, addr)})
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
