// Package oracle says what a cluster's Services mean on one node: naively, from the API objects,
// for tests that compare.
package oracle

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// oracle decides what a cluster's Services mean on one node, in one IP family. It is a
// second and naive implementation of packages changetracker and desired: it starts from the
// API objects each time, compares everything with everything, and shares no code with them.
// It is written to be read: each method is one rule. It assumes that values are spelled
// canonically and that a slice has an address once.
type oracle struct {
	*Cluster

	family v1.IPFamily
	ports  []*servicePort
	owners map[desired.Key]claim
}

// Cluster is the input: the API objects, the node, and the configuration of the proxy.
type Cluster struct {
	Services map[string]*v1.Service
	Slices   map[string]*discovery.EndpointSlice
	Node     changetracker.Node

	ReservedExternalIPs []netip.AddrPort // for TCP

	DetectsPods, MasqueradeAll, StrictSourceRanges, DenyNodeExternalIPs bool

	Kinds             []string // that are programmed
	NodePortAddresses []netip.Prefix
	ServiceCIDRs      []netip.Prefix // for packets only
}

// Decision is what one service port means for packets.
type Decision struct {
	Affinity                time.Duration
	Cluster, Local, Serving []netip.AddrPort
	OnNode, Refused         []netip.Addr
	Frontends               []Frontend
	Lost                    []desired.Key // frontends that other service ports own
}

// Frontend is a VIP or node port of the service port.
type Frontend struct {
	Key                             desired.Key
	Kind, Action, Scope, Masquerade string
	ShortCircuit, Restricted        bool
	Ranges                          []netip.Prefix
}

// Decide returns what each service port of the family means.
func Decide(c *Cluster, family v1.IPFamily) map[changetracker.ServicePortName]Decision {
	return newOracle(c, family).decideAll()
}

func newOracle(c *Cluster, family v1.IPFamily) *oracle {
	o := &oracle{Cluster: c, family: family}
	o.findPorts()
	o.findOwners()
	return o
}

func (o *oracle) decideAll() map[changetracker.ServicePortName]Decision {
	all := map[changetracker.ServicePortName]Decision{}
	for _, p := range o.ports {
		all[p.name] = o.decide(p)
	}
	return all
}

// servicePort is a port of a Service in the family.
type servicePort struct {
	name      changetracker.ServicePortName
	service   *v1.Service
	protocol  desired.Protocol
	number    uint16
	nodePort  uint16
	clusterIP netip.Addr
	// The VIPs of the family. A load balancer without an address, or with the ipMode Proxy, has
	// none.
	loadBalancer, external []netip.Addr
}

// findPorts: a Service is proxied in the families in which it has a cluster IP, unless it is
// for another proxy. Headless Services and those of type ExternalName are not (PKT-13).
func (o *oracle) findPorts() {
	for _, s := range o.Services {
		_, elsewhere := s.Labels["service.kubernetes.io/service-proxy-name"]
		i := slices.Index(s.Spec.IPFamilies, o.family)
		if elsewhere || s.Spec.Type == v1.ServiceTypeExternalName || s.Spec.ClusterIP == v1.ClusterIPNone || i < 0 {
			continue
		}
		if ip, ok := o.vip(s.Spec.ClusterIPs[i]); ok {
			for _, port := range s.Spec.Ports {
				o.ports = append(o.ports, o.servicePort(s, port, ip))
			}
		}
	}
}

func (o *oracle) servicePort(s *v1.Service, port v1.ServicePort, ip netip.Addr) *servicePort {
	p := &servicePort{
		name: changetracker.ServicePortName{
			NamespacedName: types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, Port: port.Name, Protocol: port.Protocol,
		},
		service: s, number: uint16(port.Port), nodePort: uint16(port.NodePort), clusterIP: ip,
		protocol: map[v1.Protocol]desired.Protocol{"TCP": 6, "UDP": 17, "SCTP": 132}[port.Protocol],
	}
	if !exposed(s, &o.Node) {
		p.nodePort = 0
		return p
	}
	for _, ingress := range s.Status.LoadBalancer.Ingress {
		if a, ok := o.vip(ingress.IP); ok && (ingress.IPMode == nil || *ingress.IPMode == v1.LoadBalancerIPModeVIP) {
			p.loadBalancer = append(p.loadBalancer, a)
		}
	}
	for _, text := range s.Spec.ExternalIPs {
		if a, ok := o.vip(text); ok {
			p.external = append(p.external, a)
		}
	}
	return p
}

// vip parses an address of the family that a Service may have (TRK-18).
func (o *oracle) vip(text string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(text)
	return a, err == nil && a.Is4() == (o.family == v1.IPv4Protocol) && !a.IsUnspecified() && !a.IsMulticast() &&
		!a.IsLoopback() && !a.IsLinkLocalUnicast() && text != "255.255.255.255"
}

// hasHealthCheck reports whether a port is a health check node port (HC-03).
func (o *oracle) hasHealthCheck(port uint16) bool {
	return slices.ContainsFunc(o.ports, func(p *servicePort) bool {
		return uint16(p.service.Spec.HealthCheckNodePort) == port && exposed(p.service, &o.Node)
	})
}

// claim is a service port's request for a frontend.
type claim struct {
	*servicePort

	kind string
	key  desired.Key
}

// claims: an address that a service port has in several kinds counts as the first of them.
func (o *oracle) claims(p *servicePort) (all []claim) {
	add := func(kind string, vip netip.Addr, port uint16) {
		key := desired.Key{VIP: vip, Protocol: p.protocol, Port: port}
		if slices.Contains(o.Kinds, kind) && !slices.ContainsFunc(all, func(c claim) bool { return c.key == key }) {
			all = append(all, claim{p, kind, key})
		}
	}
	add("ClusterIP", p.clusterIP, p.number)
	for _, a := range p.loadBalancer {
		if !o.isPods(a) {
			add("LoadBalancer", a, p.number)
		}
	}
	for _, a := range p.external {
		if !o.refuses(p, a) {
			add("ExternalIP", a, p.number)
		}
	}
	if p.nodePort != 0 {
		add("NodePort", netip.Addr{}, p.nodePort)
	}
	return all
}

// isPods: no VIP must take over the traffic of pods.
func (o *oracle) isPods(a netip.Addr) bool { return within(o.Node.PodCIDRs, a) }

// refuses: an external IP must not take over the address of the API server either, nor an address of the
// node if configured so (CVE-2020-8554).
func (o *oracle) refuses(p *servicePort, a netip.Addr) bool {
	reserved := p.protocol == desired.TCP && slices.Contains(o.ReservedExternalIPs, netip.AddrPortFrom(a, p.number))
	return o.isPods(a) || reserved || o.DenyNodeExternalIPs && slices.Contains(o.Node.Addresses, a)
}

func within(ranges []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(a) })
}

// findOwners: of several service ports that claim one frontend, the kind decides, then the
// age. At an address of the node that accepts node ports, a VIP that is no cluster IP yields
// to the node port of an older Service.
func (o *oracle) findOwners() {
	first := map[desired.Key]claim{}
	for _, p := range o.ports {
		for _, c := range o.claims(p) {
			if best, taken := first[c.key]; !taken || c.precedes(best) {
				first[c.key] = c
			}
		}
	}
	o.owners = maps.Clone(first)
	for key, c := range first {
		there, taken := first[desired.Key{Protocol: key.Protocol, Port: key.Port}]
		if taken && o.acceptsNodePorts(key.VIP) && c.kind != "ClusterIP" && c.name != there.name && there.older(c.servicePort) {
			o.owners[key] = there
		}
	}
}

func (c claim) precedes(o claim) bool {
	order := []string{"ClusterIP", "LoadBalancer", "ExternalIP", "NodePort"}
	if mine, theirs := slices.Index(order, c.kind), slices.Index(order, o.kind); mine != theirs {
		return mine < theirs
	}
	return c.older(o.servicePort)
}

// older: a Service whose age is unknown is the youngest. UID and name decide between equals.
func (p *servicePort) older(o *servicePort) bool {
	mine, theirs := p.service.CreationTimestamp, o.service.CreationTimestamp
	if mine.IsZero() != theirs.IsZero() {
		return theirs.IsZero()
	}
	return cmp.Or(mine.Compare(theirs.Time), strings.Compare(string(p.service.UID), string(o.service.UID)), p.name.Compare(o.name)) < 0
}

// acceptsNodePorts is never true for loopback addresses (PKT-30 to PKT-32).
func (o *oracle) acceptsNodePorts(a netip.Addr) bool {
	return a.IsValid() && !a.IsLoopback() && slices.Contains(o.Node.Addresses, a) && within(o.NodePortAddresses, a)
}

func (o *oracle) decide(p *servicePort) (d Decision) {
	all := o.endpoints(p)
	endpoints, end := serving(p, all)
	internalLocal := ptr.Deref(p.service.Spec.InternalTrafficPolicy, "") == v1.ServiceInternalTrafficPolicyLocal
	accessible := p.nodePort != 0 || len(p.loadBalancer)+len(p.external) > 0
	externalLocal := accessible && p.service.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal
	var used []endpoint
	if !internalLocal || accessible {
		used = o.clusterEndpoints(endpoints)
		d.Cluster = addresses(used)
	}
	if internalLocal || externalLocal {
		local := o.localEndpoints(endpoints)
		d.Local, used = addresses(local), append(used, local...)
	}
	if end {
		all = endpoints
	}
	d.Serving = addresses(holding(p, all))
	d.OnNode = o.onNode(used)
	if spec := p.service.Spec; spec.SessionAffinity == v1.ServiceAffinityClientIP {
		d.Affinity = time.Duration(*spec.SessionAffinityConfig.ClientIP.TimeoutSeconds) * time.Second
	}
	d.Refused = o.refused(p)
	anywhere := slices.ContainsFunc(endpoints, func(e endpoint) bool { return e.ready || e.draining() })
	for _, c := range o.claims(p) {
		if o.owners[c.key].name != p.name {
			d.Lost = append(d.Lost, c.key)
			continue
		}
		f := o.frontend(c, internalLocal, externalLocal)
		d.act(&f, anywhere)
		d.Frontends = append(d.Frontends, f)
		if f.Kind == "NodePort" {
			d.Lost = append(d.Lost, o.lostNodePorts(p)...)
		}
	}
	slices.SortFunc(d.Frontends, func(a, b Frontend) int { return ByKey(a.Key, b.Key) })
	slices.SortFunc(d.Lost, ByKey)
	d.Lost = slices.Compact(d.Lost)
	return d
}

// refused are the load balancer IPs and the external IPs that are not programmed.
func (o *oracle) refused(p *servicePort) []netip.Addr {
	among := func(kind string, all []netip.Addr, refused func(netip.Addr) bool) (some []netip.Addr) {
		for _, a := range all {
			if refused(a) && slices.Contains(o.Kinds, kind) {
				some = append(some, a)
			}
		}
		slices.SortFunc(some, netip.Addr.Compare)
		return some
	}
	return append(among("LoadBalancer", p.loadBalancer, o.isPods),
		among("ExternalIP", p.external, func(a netip.Addr) bool { return o.refuses(p, a) })...)
}

// lostNodePorts: there is no node port where another service port has the VIP.
func (o *oracle) lostNodePorts(p *servicePort) (lost []desired.Key) {
	for key, owner := range o.owners {
		if key.Protocol == p.protocol && key.Port == p.nodePort && o.acceptsNodePorts(key.VIP) && owner.name != p.name {
			lost = append(lost, key)
		}
	}
	return lost
}

// ByKey orders frontends.
func ByKey(a, b desired.Key) int {
	return cmp.Or(a.VIP.Compare(b.VIP), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
}

// frontend says which endpoints answer, and whose source is masqueraded.
func (o *oracle) frontend(c claim, internalLocal, externalLocal bool) Frontend {
	f := Frontend{Key: c.key, Kind: c.kind, Scope: "Cluster"}
	switch {
	case c.kind == "ClusterIP": // PKT-01 to PKT-07: the traffic policy does not matter for the source
		if f.Masquerade = "keep"; o.MasqueradeAll {
			f.Masquerade = "all"
		} else if o.DetectsPods {
			f.Masquerade = "non-pod"
		}
		if internalLocal {
			f.Scope = "Local"
		}
	case externalLocal: // PKT-21 to PKT-25: keeps the source; does not bind pods and the node
		f.Scope, f.Masquerade, f.ShortCircuit = "Local", "keep", true
	default: // PKT-20: the reply must return through this node
		f.Masquerade = "all"
	}
	if c.kind == "LoadBalancer" { // PKT-40 to PKT-44: no other kind is restricted
		f.Restricted, f.Ranges = o.sourceRanges(c.servicePort)
	}
	return f
}

// act: no endpoint anywhere rejects (PKT-09, PKT-26); none in the scope drops (PKT-08, PKT-22).
func (d *Decision) act(f *Frontend, anywhere bool) {
	scope := d.Cluster
	if f.Scope == "Local" {
		scope = d.Local
	}
	switch {
	case !anywhere:
		f.Action = "reject"
	case len(scope) == 0:
		f.Action = "drop"
	default:
		f.Action = "forward"
	}
	f.ShortCircuit = f.ShortCircuit && len(d.Cluster) > 0
}

// sourceRanges: a /0 opens everything (PKT-45). A list without a range of the family opens
// too (PKT-46), unless it is configured to close. Denied sources are not admitted. Where the node's primary address is
// admitted, so are the VIPs, since they may be addresses of the node (PKT-42).
func (o *oracle) sourceRanges(p *servicePort) (restricted bool, ranges []netip.Prefix) {
	ranges, closed := o.givenRanges(p)
	if closed {
		return true, nil
	}
	denied := Denied(p.service, o.family)
	if len(ranges) == 0 && len(denied) == 0 {
		return false, nil
	}
	if len(ranges) == 0 {
		ranges = []netip.Prefix{everything(o.family)}
	}
	if ranges = without(outermost(ranges), denied); len(ranges) == 0 {
		return true, nil
	}
	ofFamily := slices.IndexFunc(o.Node.Addresses, func(a netip.Addr) bool { return a.Is4() == (o.family == v1.IPv4Protocol) })
	if ofFamily >= 0 && within(ranges, o.Node.Addresses[ofFamily]) {
		for _, a := range p.loadBalancer {
			ranges = append(ranges, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return true, outermost(ranges)
}

// givenRanges are those of the family; none is all, unless closed.
func (o *oracle) givenRanges(p *servicePort) (ranges []netip.Prefix, closed bool) {
	given := p.service.Spec.LoadBalancerSourceRanges
	for _, text := range given {
		r, err := netip.ParsePrefix(text)
		if err != nil || r.Addr().Is4() != (o.family == v1.IPv4Protocol) {
			continue
		}
		if r.Bits() == 0 {
			return nil, false
		}
		ranges = append(ranges, r.Masked())
	}
	return ranges, len(ranges) == 0 && len(given) > 0 && o.StrictSourceRanges
}

func everything(family v1.IPFamily) netip.Prefix {
	if family == v1.IPv4Protocol {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

// without cuts each denied range out: what remains around it is the other half of each range that has it.
func without(ranges, denied []netip.Prefix) []netip.Prefix {
	for _, d := range denied {
		var left []netip.Prefix
		for _, r := range ranges {
			if !r.Overlaps(d) {
				left = append(left, r)
				continue
			}
			for bits := d.Bits(); bits > r.Bits(); bits-- {
				other := d.Addr().AsSlice()
				other[(bits-1)/8] ^= 0x80 >> ((bits - 1) % 8)
				a, _ := netip.AddrFromSlice(other)
				left = append(left, netip.PrefixFrom(a, bits).Masked())
			}
		}
		ranges = left
	}
	return ranges
}

// outermost are the ranges that no other one has, sorted.
func outermost(ranges []netip.Prefix) (outer []netip.Prefix) {
	for _, r := range ranges {
		inside := func(o netip.Prefix) bool { return o.Bits() < r.Bits() && o.Contains(r.Addr()) }
		if !slices.ContainsFunc(ranges, inside) && !slices.Contains(outer, r) {
			outer = append(outer, r)
		}
	}
	slices.SortFunc(outer, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	return outer
}

// endpoint is what one slice says about one address. Absent conditions mean ready, serving
// and not terminating.
type endpoint struct {
	addr                        netip.AddrPort
	ready, serving, terminating bool
	maintenance                 bool
	group                       int
	node                        string
	nodeHints, zoneHints        []string
	slice                       *discovery.EndpointSlice
}

func newEndpoint(a netip.AddrPort, api *discovery.Endpoint, slice *discovery.EndpointSlice) endpoint {
	e := endpoint{
		addr: a, node: ptr.Deref(api.NodeName, ""), slice: slice, ready: ptr.Deref(api.Conditions.Ready, true),
		serving: ptr.Deref(api.Conditions.Serving, true), terminating: ptr.Deref(api.Conditions.Terminating, false),
	}
	if e.group, e.maintenance = standing(api); e.maintenance { // TOP-22
		e.ready, e.serving = false, e.ready || e.serving
	}
	for _, hint := range ptr.Deref(api.Hints, discovery.EndpointHints{}).ForNodes {
		e.nodeHints = append(e.nodeHints, hint.Name)
	}
	for _, hint := range ptr.Deref(api.Hints, discovery.EndpointHints{}).ForZones {
		e.zoneHints = append(e.zoneHints, hint.Name)
	}
	return e
}

func (e endpoint) draining() bool { return e.serving && e.terminating && !e.maintenance }

// endpoints returns the endpoints of a service port, sorted by address, each as the slice with the best record has it.
func (o *oracle) endpoints(p *servicePort) []endpoint {
	best := map[netip.AddrPort]endpoint{}
	for _, slice := range o.Slices {
		if slice.Labels[discovery.LabelServiceName] != p.name.Name || string(slice.AddressType) != string(o.family) {
			continue
		}
		for _, port := range slice.Ports {
			for i := range slice.Endpoints {
				a, ok := o.vip(slice.Endpoints[i].Addresses[0])
				if *port.Name != p.name.Port || *port.Protocol != p.name.Protocol || !ok || a.IsLoopback() || a.IsLinkLocalUnicast() {
					continue
				}
				e := newEndpoint(netip.AddrPortFrom(a, uint16(*port.Port)), &slice.Endpoints[i], slice)
				if old, known := best[e.addr]; !known || e.better(old) {
					best[e.addr] = e
				}
			}
		}
	}
	return slices.SortedFunc(maps.Values(best), func(a, b endpoint) int { return a.addr.Compare(b.addr) })
}

// better reports whether e comes before o: one that lives, then a ready one, then one that serves, then the newer
// slice's.
func (e endpoint) better(o endpoint) bool {
	for _, c := range [][2]bool{{!e.terminating, !o.terminating}, {e.ready, o.ready}, {e.serving, o.serving}} {
		if c[0] != c[1] {
			return c[0]
		}
	}
	if c := e.slice.CreationTimestamp.Compare(o.slice.CreationTimestamp.Time); c != 0 {
		return c > 0
	}
	return e.slice.Name < o.slice.Name
}

func only(list []endpoint, keep func(endpoint) bool) []endpoint {
	return slices.DeleteFunc(slices.Clone(list), func(e endpoint) bool { return !keep(e) })
}

func addresses(list []endpoint) (all []netip.AddrPort) {
	for _, e := range list {
		all = append(all, e.addr)
	}
	return all
}

// serving: the endpoints of the first group of which enough are ready (TOP-21), or else one is, or else one serves
// while it terminates (TOP-20). end says that nothing else goes on.
func serving(p *servicePort, all []endpoint) (group []endpoint, end bool) {
	share, end := failover(p.service)
	isReady := func(e endpoint) bool { return e.ready }
	for _, serves := range []func(list []endpoint) bool{
		func(list []endpoint) bool {
			expected := only(list, func(e endpoint) bool { return !e.terminating && !e.maintenance })
			ready := only(list, isReady)
			return len(ready) > 0 && 100*len(ready) >= share*len(expected)
		},
		func(list []endpoint) bool { return slices.ContainsFunc(list, isReady) },
		func(list []endpoint) bool { return slices.ContainsFunc(list, endpoint.draining) },
	} {
		for n := range 256 {
			if list := only(all, func(e endpoint) bool { return e.group == n }); serves(list) {
				return list, end
			}
		}
	}
	return nil, false
}

// holding: flows stay with what serves, and if the Service asks for it with what is only not ready (PKT-81).
func holding(p *servicePort, all []endpoint) []endpoint {
	keep := p.service.Annotations[annotationKeep] != ""
	return only(all, func(e endpoint) bool { return e.ready || e.serving || keep && !e.terminating })
}

// clusterEndpoints: the ready ones, or else those that still serve while they terminate
// (TOP-03). Hints count if each ready endpoint has some and one of them names this node, or
// else this zone (TOP-08 to TOP-10).
func (o *oracle) clusterEndpoints(all []endpoint) []endpoint {
	ready := only(all, func(e endpoint) bool { return e.ready })
	if len(ready) == 0 {
		return only(all, endpoint.draining)
	}
	for _, topology := range []struct {
		own   string
		hints func(endpoint) []string
	}{
		{o.Node.Name, func(e endpoint) []string { return e.nodeHints }},
		{o.Node.Zone, func(e endpoint) []string { return e.zoneHints }},
	} {
		unhinted := only(ready, func(e endpoint) bool { return len(topology.hints(e)) == 0 })
		matching := only(ready, func(e endpoint) bool { return slices.Contains(topology.hints(e), topology.own) })
		if topology.own != "" && len(unhinted) == 0 && len(matching) > 0 {
			return matching
		}
	}
	return ready
}

// localEndpoints returns the endpoints on this node, whatever the hints (TOP-04).
func (o *oracle) localEndpoints(all []endpoint) []endpoint {
	local := only(all, func(e endpoint) bool { return o.Node.Name != "" && e.node == o.Node.Name })
	if ready := only(local, func(e endpoint) bool { return e.ready }); len(ready) > 0 {
		return ready
	}
	return only(local, endpoint.draining)
}

// onNode: whose hairpin connections are masqueraded (PKT-02). A slice may lack the node's
// name, or spell it as DNS allows; an address of the node's pods is on the node in any case.
func (o *oracle) onNode(used []endpoint) (addrs []netip.Addr) {
	host := func(name string) string { return strings.TrimSuffix(strings.ToLower(name), ".") }
	for _, e := range used {
		mine, theirs := host(o.Node.Name), host(e.node)
		same := mine == theirs || strings.HasPrefix(theirs, mine+".") && !strings.Contains(mine, ".") ||
			strings.HasPrefix(mine, theirs+".") && !strings.Contains(theirs, ".")
		if e.node == "" || mine == "" || same || within(o.Node.PodCIDRs, e.addr.Addr()) {
			addrs = append(addrs, e.addr.Addr())
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}
