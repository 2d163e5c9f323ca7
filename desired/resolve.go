package desired

import (
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Resolve decides what the data plane must do for one service port. ok is false if the State
// has no such service port.
func (r *Resolver) Resolve(state *changetracker.State, name changetracker.ServicePortName) (s *Service, ok bool) {
	port, ok := state.Service(name)
	if !ok {
		return nil, false
	}
	t, ok := r.resolve(state, port, selected{})
	return t.service, ok
}

// resolve is Resolve of a service port of the State that goes on from an earlier version, which may be empty.
func (r *Resolver) resolve(state *changetracker.State, port *changetracker.ServicePort, since selected) (t selected, ok bool) {
	protocol, ok := ProtocolOf(port.Name.Protocol)
	if !ok {
		return selected{}, false
	}
	s := &Service{Name: port.Name, Protocol: protocol, Affinity: port.SessionAffinity, Port: port}
	if r.EditSelection != nil {
		s.Frontends = r.frontends(s, r.takeEdited(s, state))
		return selected{service: s}, true
	}
	t = r.setEndpoints(s, state, since)
	s.Frontends = r.frontends(s, t.choice.Any)
	return t, true
}

// frontends returns the frontends in order of Key. Of two with the same Key, the kind that
// comes first in the list of kinds remains.
func (r *Resolver) frontends(s *Service, anyEndpoint bool) []Frontend {
	p := s.Port
	all := make([]Frontend, 0, 2+len(p.LoadBalancerVIPs)+len(p.ExternalIPs))
	add := func(f Frontend) {
		if kind, asks := r.kindOf(p, f.VIP); asks && kind == f.Kind {
			all = append(all, f)
		}
	}
	add(r.clusterIP(p))
	refuse := func(kind Kind, vip netip.Addr) {
		if r.has(kind) && r.refuses(kind, p, vip) {
			s.Refused = append(s.Refused, vip)
		}
	}
	for _, vip := range p.LoadBalancerVIPs {
		refuse(LoadBalancer, vip)
		f := external(p, LoadBalancer, vip, p.Port)
		f.Restricted, f.SourceRanges = r.sources(p)
		add(f)
	}
	for _, vip := range p.ExternalIPs {
		refuse(ExternalIP, vip)
		add(external(p, ExternalIP, vip, p.Port))
	}
	add(external(p, NodePort, netip.Addr{}, p.NodePort))
	slices.SortFunc(all, func(a, b Frontend) int { return s.Key(&a).Compare(s.Key(&b)) })
	for i := range all {
		s.decide(&all[i], anyEndpoint)
	}
	return all
}

// decide sets the Action of a frontend from the endpoints of its scope.
func (s *Service) decide(f *Frontend, anyEndpoint bool) {
	switch {
	case !anyEndpoint:
		f.Action, f.ShortCircuit = Reject, false
	case s.Endpoints(f.Scope).Len() == 0:
		f.Action = Drop
	default:
		f.Action = Forward
	}
	f.ShortCircuit = f.ShortCircuit && s.Cluster.Len() > 0
}

// clusterIP returns the frontend for traffic from inside the cluster. The internal traffic
// policy selects its endpoints and does not change what is masqueraded.
func (r *Resolver) clusterIP(p *changetracker.ServicePort) Frontend {
	f := Frontend{Kind: ClusterIP, VIP: p.ClusterIP, Port: p.Port, Scope: ScopeCluster}
	if p.InternalPolicyLocal {
		f.Scope = ScopeLocal
	}
	switch {
	case r.MasqueradeAll:
		f.Masquerade = MasqueradeAll
	case r.DetectsPods:
		f.Masquerade = MasqueradeNonPod
	default:
		f.Masquerade = MasqueradeNone
	}
	return f
}

// external returns a frontend for traffic from outside the cluster. Policy Cluster may send it
// to another node, so that the reply must return through this one; policy Local keeps the
// client's address.
func external(p *changetracker.ServicePort, kind Kind, vip netip.Addr, port uint16) Frontend {
	f := Frontend{Kind: kind, VIP: vip, Port: port, Scope: ScopeCluster, Masquerade: MasqueradeAll}
	if p.ExternalPolicyLocal {
		f.Scope, f.Masquerade, f.ShortCircuit = ScopeLocal, MasqueradeNone, true
	}
	return f
}

// sources returns the sources that may use the load balancer IPs. If the node's primary
// address, the first one of the family, is admitted, the VIPs are admitted as sources too: if
// a VIP is an address of the node, the node's connections to it have it as source.
func (r *Resolver) sources(p *changetracker.ServicePort) (restricted bool, ranges []netip.Prefix) {
	if p.DenyAllSources {
		return true, nil
	}
	ranges = p.LoadBalancerSourceRanges
	if len(ranges) == 0 {
		return false, nil
	}
	if !r.admits(p, ranges) {
		return true, ranges
	}
	admitted := ranges
	ranges = slices.Clone(ranges)
	for _, vip := range p.LoadBalancerVIPs {
		if !containsSorted(admitted, vip) {
			ranges = append(ranges, netip.PrefixFrom(vip, vip.BitLen()))
		}
	}
	slices.SortFunc(ranges, comparePrefixes)
	return true, ranges
}

// admits reports whether ranges have the node's primary address, the first one of the family.
func (r *Resolver) admits(p *changetracker.ServicePort, ranges []netip.Prefix) bool {
	primary := slices.IndexFunc(r.Node.Addresses, func(a netip.Addr) bool { return a.Is4() == (p.Family == v1.IPv4Protocol) })
	return primary >= 0 && contains(ranges, r.Node.Addresses[primary])
}

// mayBeHere reports whether an endpoint may run on this node. Slices that are written by hand may
// spell the node's name differently, or have a wrong name.
func (r *Resolver) mayBeHere(e *changetracker.Endpoint) bool {
	return e.Node == "" || r.Node.Name == "" || sameHost(e.Node, r.Node.Name) || contains(r.Node.PodCIDRs, e.Addr.Addr())
}

// sameHost compares host names as DNS does (RFC 4343). A name without a domain equals all
// names that begin with it. A node of another Source is a different host.
func sameHost(a, b string) bool {
	a, b = strings.TrimSuffix(a, "."), strings.TrimSuffix(b, ".")
	if len(a) > len(b) {
		a, b = b, a
	}
	for i := range len(a) {
		if a[i] != b[i] && lower(a[i]) != lower(b[i]) {
			return false // as most names
		}
	}
	host := strings.LastIndexByte(a, '/') + 1
	if a[:host] != b[:strings.LastIndexByte(b, '/')+1] {
		return false
	}
	return len(a) == len(b) || b[len(a)] == '.' && !strings.Contains(a[host:], ".")
}

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		c += 'a' - 'A'
	}
	return c
}
