package changetracker

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// maxScratch is up to how many endpoints the buffers are kept. Slices of the endpoint slice
// controller have 100 endpoints and few ports.
const maxScratch = 4096

// maxInterned bounds the table of hints, and maxQualified that of nodes of other clusters.
const maxInterned, maxQualified = 256, 1 << 14

// sliceParser parses EndpointSlices. Its result is in buffers that the next call overwrites,
// so that an unchanged slice costs no allocation.
type sliceParser struct {
	*config

	ports     []numberedKey
	endpoints []Endpoint
	// interned holds the hint lists with one name, which endpoints share.
	interned map[string][]string
	// cluster is the cluster whose nodes the current slice names; empty for the tracker's own.
	// Without nodesKnown the names are ignored.
	cluster    string
	nodesKnown bool
	// qualified holds names of other clusters' nodes, by cluster and name.
	qualified map[[2]string]string
}

// parse returns the ports and the endpoints of a slice of the family, sorted and without
// duplicates; both are empty if one of them is. If there is only one port the Addr of the
// endpoints has it, so that States can share them. It adds problems to f.
func (p *sliceParser) parse(slice *discovery.EndpointSlice, family int, f *findings) ([]numberedKey, []Endpoint) {
	p.parsePorts(slice, f)
	p.parseEndpoints(slice, family, f)
	switch {
	case len(p.ports) == 0 || len(p.endpoints) == 0:
		return nil, nil
	case len(p.ports) == 1:
		for i := range p.endpoints {
			e := &p.endpoints[i]
			e.Addr = netip.AddrPortFrom(e.Addr.Addr(), p.ports[0].number)
		}
	}
	return p.ports, p.endpoints
}

// release drops the references of the buffers.
func (p *sliceParser) release() {
	if cap(p.endpoints) > maxScratch || cap(p.ports) > maxScratch {
		p.ports, p.endpoints = nil, nil
	}
	clear(p.ports)
	clear(p.endpoints)
	if len(p.interned) > maxInterned {
		p.interned = nil
	}
	if len(p.qualified) > maxQualified {
		p.qualified = nil
	}
}

// parsePorts parses the ports (EPS-10). A nil protocol means the default of the API (W-01).
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
	p.ports = slices.Compact(p.ports)
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

// parseEndpoints parses the endpoints and sorts them by address.
func (p *sliceParser) parseEndpoints(slice *discovery.EndpointSlice, family int, f *findings) {
	p.endpoints = p.endpoints[:0]
	sorted := true
	for i := range slice.Endpoints {
		api := &slice.Endpoints[i]
		addr, ok := p.parseAddr(api, i, family, f)
		if !ok {
			continue
		}
		if n := len(p.endpoints); n > 0 && addr.Less(p.endpoints[n-1].Addr.Addr()) {
			sorted = false
		}
		p.endpoints = append(p.endpoints, p.endpoint(addr, api, slice))
	}
	if !sorted {
		slices.SortStableFunc(p.endpoints, compareByAddr)
	}
	p.endpoints = dropDuplicates(p.endpoints)
}

// parseAddr parses the first address, which is the only one that counts (EPS-12). Invalid
// addresses and those of the other family are set aside (W-01).
func (p *sliceParser) parseAddr(api *discovery.Endpoint, i, family int, f *findings) (addr netip.Addr, ok bool) {
	if len(api.Addresses) == 0 {
		f.add(ReasonMissing, "", "endpoints[%d].addresses", i)
		return addr, false
	}
	addr, ok = ParseAddr(api.Addresses[0])
	switch {
	case !ok || !p.options.mayServe(addr):
		f.add(ReasonInvalidAddress, api.Addresses[0], "endpoints[%d].addresses[0]", i)
		return addr, false
	case addrFamily(addr) != family:
		f.add(ReasonWrongFamily, api.Addresses[0], "endpoints[%d].addresses[0]", i)
		return addr, false
	}
	return addr, true
}

// endpoint parses an endpoint; the port of its Addr is 0 (EPS-15 to EPS-17).
func (p *sliceParser) endpoint(addr netip.Addr, api *discovery.Endpoint, slice *discovery.EndpointSlice) Endpoint {
	e := Endpoint{
		Addr:        netip.AddrPortFrom(addr, 0),
		Ready:       api.Conditions.Ready == nil || *api.Conditions.Ready,
		Serving:     api.Conditions.Serving == nil || *api.Conditions.Serving,
		Terminating: api.Conditions.Terminating != nil && *api.Conditions.Terminating,
	}
	if api.Zone != nil {
		e.Zone = *api.Zone
	}
	if api.NodeName != nil && p.nodesKnown {
		e.Node = p.node(*api.NodeName)
	}
	if api.Hints != nil {
		e.ZoneHints = hintNames(p, api.Hints.ForZones, func(z discovery.ForZone) string { return z.Name })
	}
	if api.Hints != nil && p.nodesKnown {
		e.NodeHints = hintNames(p, api.Hints.ForNodes, func(n discovery.ForNode) string { return p.node(n.Name) })
	}
	p.decorateEndpoint(&e, api, slice)
	return e
}

// node returns the name under which the trackers store a node of the slice's cluster.
func (p *sliceParser) node(name string) string {
	if p.cluster == "" || name == "" {
		return name
	}
	key := [2]string{p.cluster, name}
	full, ok := p.qualified[key]
	if !ok {
		if p.qualified == nil {
			p.qualified = map[[2]string]string{}
		}
		full = qualified(p.cluster, name)
		p.qualified[key] = full
	}
	return full
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

// intern returns the list with only the name.
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
