package changetracker

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// portKey is what a Service and its slices know a port by.
type portKey struct {
	port     string
	protocol v1.Protocol
}

func (k portKey) compare(o portKey) int {
	if c := strings.Compare(k.port, o.port); c != 0 {
		return c
	}
	return strings.Compare(string(k.protocol), string(o.protocol))
}

// portEndpoints are the endpoints that one slice has for one port: sorted by
// address, without duplicates, never empty. Immutable once in a heldSlice.
type portEndpoints struct {
	portKey
	endpoints []Endpoint
}

// maxScratch is how many endpoints the buffers are kept for. Slices that the
// endpoint slice controller writes have 100 endpoints and few ports.
const maxScratch = 4096

// maxInterned bounds the table of hints.
const maxInterned = 256

// sliceParser turns EndpointSlices into portEndpoints. Its result lies in buffers
// that the next call overwrites, so that a slice that brings nothing new costs no
// allocation.
type sliceParser struct {
	store *store
	// sources are the usable endpoints of the slice, by address and position.
	sources   []endpointSource
	ports     []numberedKey
	endpoints []Endpoint
	result    []portEndpoints
	// interned holds the hint lists of one name. All endpoints share few of them.
	interned map[string][]string
}

// endpointSource is an endpoint of the slice with everything but the port.
type endpointSource struct {
	index    int
	endpoint Endpoint // Addr.Port is 0
}

type numberedKey struct {
	portKey
	number uint16
}

// parse reads a slice of the family. What is wrong with it goes into f.
func (p *sliceParser) parse(slice *discovery.EndpointSlice, family int, f *findings) []portEndpoints {
	p.parsePorts(slice, f)
	p.parseEndpoints(slice, family, f)
	p.endpoints = slices.Grow(p.endpoints[:0], len(p.ports)*len(p.sources))
	p.result = p.result[:0]
	if len(p.sources) == 0 {
		return nil
	}
	for first := 0; first < len(p.ports); {
		end := first + 1
		for end < len(p.ports) && p.ports[end].portKey == p.ports[first].portKey {
			end++
		}
		p.result = append(p.result, portEndpoints{
			portKey:   p.ports[first].portKey,
			endpoints: p.expand(slice, p.ports[first:end]),
		})
		first = end
	}
	return p.result
}

// release forgets the objects that the buffers refer to.
func (p *sliceParser) release() {
	if cap(p.endpoints) > maxScratch || cap(p.sources) > maxScratch {
		p.sources, p.endpoints = nil, nil
	}
	clear(p.sources)
	clear(p.ports)
	clear(p.endpoints)
	clear(p.result)
	if len(p.interned) > maxInterned {
		p.interned = nil
	}
}

// expand makes the endpoints of one port, whose numbers there may be several of
// (EPS-14, EPS-18).
func (p *sliceParser) expand(slice *discovery.EndpointSlice, numbers []numberedKey) []Endpoint {
	start := len(p.endpoints)
	for _, n := range numbers {
		for i := range p.sources {
			source := &p.sources[i]
			e := source.endpoint
			e.Addr = netip.AddrPortFrom(e.Addr.Addr(), n.number)
			p.store.decorateEndpoint(&e, &slice.Endpoints[source.index])
			p.endpoints = append(p.endpoints, e)
		}
	}
	list := p.endpoints[start:]
	if len(numbers) > 1 {
		slices.SortStableFunc(list, compareByAddr)
	}
	list = dropDuplicates(list)
	p.endpoints = p.endpoints[:start+len(list)]
	return list
}

func compareByAddr(a, b Endpoint) int { return a.Addr.Compare(b.Addr) }

// dropDuplicates keeps the preferred record of each address of a sorted list
// (EPS-19, W-04).
func dropDuplicates(list []Endpoint) []Endpoint {
	kept := list[:0]
	for i := range list {
		last := len(kept) - 1
		switch {
		case last < 0 || kept[last].Addr != list[i].Addr:
			kept = append(kept, list[i])
		case list[i].preference(&kept[last]) > 0:
			kept[last] = list[i]
		}
	}
	return kept
}

// preference is positive when e is the better record of its address, and 0 only
// for records that are alike but for Ext.
func (e *Endpoint) preference(o *Endpoint) int {
	return cmp.Or(
		cmp.Compare(e.rank(), o.rank()),
		strings.Compare(o.Node, e.Node), // from here on anything that is stable will do
		strings.Compare(o.Zone, e.Zone),
		slices.Compare(o.ZoneHints, e.ZoneHints),
		slices.Compare(o.NodeHints, e.NodeHints),
	)
}

// parsePorts reads the ports (EPS-10). A nil protocol is the API's default (W-01).
func (p *sliceParser) parsePorts(slice *discovery.EndpointSlice, f *findings) {
	p.ports = p.ports[:0]
	for i := range slice.Ports {
		if port, ok := parseEndpointPort(&slice.Ports[i], i, f); ok {
			p.ports = append(p.ports, port)
		}
	}
	slices.SortFunc(p.ports, func(a, b numberedKey) int {
		return cmp.Or(a.compare(b.portKey), cmp.Compare(a.number, b.number))
	})
}

func parseEndpointPort(api *discovery.EndpointPort, i int, f *findings) (p numberedKey, ok bool) {
	if api.Name == nil {
		f.add(ReasonMissing, "", "ports[%d].name", i)
		return p, false
	}
	p.portKey = portKey{port: *api.Name, protocol: v1.ProtocolTCP}
	if api.Protocol != nil && *api.Protocol != "" {
		p.protocol = *api.Protocol
	}
	if !validProtocol(p.protocol) {
		f.add(ReasonInvalidProtocol, string(p.protocol), "ports[%d].protocol", i)
		return p, false
	}
	if api.Port == nil {
		f.add(ReasonMissing, "", "ports[%d].port", i)
		return p, false
	}
	number, ok := portNumber(*api.Port)
	if !ok || number == 0 {
		f.add(ReasonInvalidPort, strconv.Itoa(int(*api.Port)), "ports[%d].port", i)
		return p, false
	}
	p.number = number
	return p, true
}

// parseEndpoints reads the endpoints, and sorts them by address.
func (p *sliceParser) parseEndpoints(slice *discovery.EndpointSlice, family int, f *findings) {
	p.sources = p.sources[:0]
	sorted := true
	for i := range slice.Endpoints {
		api := &slice.Endpoints[i]
		addr, ok := parseEndpointAddr(api, i, family, f)
		if !ok {
			continue
		}
		if n := len(p.sources); n > 0 && addr.Less(p.sources[n-1].endpoint.Addr.Addr()) {
			sorted = false
		}
		p.sources = append(p.sources, endpointSource{index: i, endpoint: p.endpoint(addr, api)})
	}
	if !sorted {
		slices.SortFunc(p.sources, func(a, b endpointSource) int {
			return cmp.Or(a.endpoint.Addr.Compare(b.endpoint.Addr), cmp.Compare(a.index, b.index))
		})
	}
}

// parseEndpointAddr reads the one address that counts (EPS-12). Wrong and foreign
// ones are dropped (W-01).
func parseEndpointAddr(api *discovery.Endpoint, i, family int, f *findings) (addr netip.Addr, ok bool) {
	if len(api.Addresses) == 0 {
		f.add(ReasonMissing, "", "endpoints[%d].addresses", i)
		return addr, false
	}
	addr, ok = parseAddr(api.Addresses[0])
	switch {
	case !ok || !dialable(addr):
		f.add(ReasonInvalidAddress, api.Addresses[0], "endpoints[%d].addresses[0]", i)
		return addr, false
	case addrFamily(addr) != family:
		f.add(ReasonWrongFamily, api.Addresses[0], "endpoints[%d].addresses[0]", i)
		return addr, false
	}
	return addr, true
}

// endpoint reads everything of an endpoint but its port (EPS-15 to EPS-17).
func (p *sliceParser) endpoint(addr netip.Addr, api *discovery.Endpoint) Endpoint {
	e := Endpoint{
		Addr:        netip.AddrPortFrom(addr, 0),
		Ready:       api.Conditions.Ready == nil || *api.Conditions.Ready,
		Serving:     api.Conditions.Serving == nil || *api.Conditions.Serving,
		Terminating: api.Conditions.Terminating != nil && *api.Conditions.Terminating,
	}
	if api.Zone != nil {
		e.Zone = *api.Zone
	}
	if api.NodeName != nil {
		e.Node = *api.NodeName
		e.Local = p.store.node.hosts(e.Node)
	}
	if api.Hints != nil {
		e.ZoneHints = hintNames(p, api.Hints.ForZones, func(z discovery.ForZone) string { return z.Name })
		e.NodeHints = hintNames(p, api.Hints.ForNodes, func(n discovery.ForNode) string { return n.Name })
	}
	return e
}

func hintNames[T any](p *sliceParser, hints []T, name func(T) string) []string {
	switch len(hints) {
	case 0:
		return nil
	case 1:
		return p.intern(name(hints[0]))
	}
	names := make([]string, len(hints))
	for i, hint := range hints {
		names[i] = name(hint)
	}
	return canonicalNames(names)
}

// intern returns the list that holds only name.
func (p *sliceParser) intern(name string) []string {
	list, ok := p.interned[name]
	if !ok {
		if p.interned == nil {
			p.interned = map[string][]string{}
		}
		list = []string{name}
		p.interned[name] = list
	}
	return list
}
