package healthcheck

import (
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/proxier"
)

// portTable holds the health check node ports of all Services, as the HealthUpdates
// describe them. It does no I/O.
type portTable struct {
	families map[v1.IPFamily]*familyPorts // those that have been updated
	sequence int                          // of the last new port
}

type familyPorts struct {
	services map[types.NamespacedName]servicePort
	ranges   []netip.Prefix // HealthUpdate.NodePortAddresses
}

// servicePort is the health check node port of a Service in one family.
type servicePort struct {
	port     uint16
	local    int // endpoints
	sequence int // order in which ports arrived; the families of a Service may disagree for a moment
}

// listenKey is an address to listen on for one Service. An empty family means both.
type listenKey struct {
	service          types.NamespacedName
	family           v1.IPFamily
	network, address string
}

// update takes over a HealthUpdate, and reports whether the addresses to listen on may
// have changed.
func (t *portTable) update(family v1.IPFamily, u proxier.HealthUpdate) bool {
	p, known := t.families[family]
	if !known {
		p = &familyPorts{services: map[types.NamespacedName]servicePort{}}
		t.families[family] = p
	}
	changed := !known || !slices.Equal(p.ranges, u.NodePortAddresses)
	p.ranges = slices.Clone(u.NodePortAddresses)
	for name, port := range u.Ports {
		changed = t.set(p, name, port, u.LocalEndpoints[name]) || changed
	}
	if u.Full {
		before := len(p.services)
		maps.DeleteFunc(p.services, func(name types.NamespacedName, _ servicePort) bool {
			_, exists := u.Ports[name]
			return !exists
		})
		changed = changed || len(p.services) != before
	}
	return changed
}

// set reports whether the port of a Service has changed.
func (t *portTable) set(p *familyPorts, name types.NamespacedName, port uint16, local int) bool {
	old := p.services[name] // port 0 if there is none
	switch port {
	case 0:
		delete(p.services, name)
	case old.port:
		p.services[name] = servicePort{port, local, old.sequence}
	default:
		t.sequence++
		p.services[name] = servicePort{port, local, t.sequence}
	}
	return port != old.port
}

// local returns the number of a Service's endpoints on this node in a family, or in the
// other family if the Service does not have this one.
func (t *portTable) local(name types.NamespacedName, family v1.IPFamily) int {
	for _, f := range []v1.IPFamily{family, v1.IPv4Protocol, v1.IPv6Protocol} {
		if p := t.families[f]; p != nil {
			if s, ok := p.services[name]; ok {
				return s.local
			}
		}
	}
	return 0
}

// needsAddresses reports whether where to listen depends on the node's addresses.
func (t *portTable) needsAddresses() bool {
	services, limited := false, false
	for _, p := range t.families {
		services = services || len(p.services) > 0
		limited = limited || p.limited()
	}
	return services && limited
}

// limited reports whether the family listens on some addresses only.
func (p *familyPorts) limited() bool { return len(p.ranges) > 0 && !p.anyAddress() }

// anyAddress reports whether the ranges include all addresses.
func (p *familyPorts) anyAddress() bool {
	return slices.ContainsFunc(p.ranges, func(r netip.Prefix) bool { return r.Bits() == 0 })
}

// keys returns where to listen, given the node's addresses: for every Service on all of them,
// whatever its families. A load balancer may check an IPv4 Service at a node's IPv6 address.
func (t *portTable) keys(nodeAddrs []netip.Addr) map[listenKey]struct{} {
	keys := map[listenKey]struct{}{}
	hosts := t.hosts(nodeAddrs)
	for name, s := range t.latest() {
		for _, h := range hosts {
			address := net.JoinHostPort(h.address, strconv.Itoa(int(s.port)))
			keys[listenKey{name, h.family, h.network, address}] = struct{}{}
		}
	}
	return keys
}

// latest returns one port per Service: the one that arrived last, if the families disagree.
func (t *portTable) latest() map[types.NamespacedName]servicePort {
	latest := map[types.NamespacedName]servicePort{}
	for _, p := range t.families {
		for name, s := range p.services {
			if s.sequence > latest[name].sequence {
				latest[name] = s
			}
		}
	}
	return latest
}

// hosts returns where to listen for all Services: keys without a Service, whose addresses have no port.
func (t *portTable) hosts(nodeAddrs []netip.Addr) []listenKey {
	v4, v6 := t.families[v1.IPv4Protocol], t.families[v1.IPv6Protocol]
	if v4 != nil && v6 != nil && v4.anyAddress() && v6.anyAddress() {
		return []listenKey{{network: "tcp"}}
	}
	var hosts []listenKey
	if v4 != nil {
		hosts = v4.hosts(listenKey{family: v1.IPv4Protocol, network: "tcp4", address: "0.0.0.0"}, nodeAddrs)
	}
	if v6 != nil {
		hosts = append(hosts, v6.hosts(listenKey{family: v1.IPv6Protocol, network: "tcp6", address: "::"}, nodeAddrs)...)
	}
	return hosts
}

// hosts returns the wildcard host, or the node's addresses in the ranges.
func (p *familyPorts) hosts(wildcard listenKey, nodeAddrs []netip.Addr) []listenKey {
	if p.anyAddress() {
		return []listenKey{wildcard}
	}
	var hosts []listenKey
	for _, a := range matching(p.ranges, nodeAddrs) {
		hosts = append(hosts, listenKey{family: wildcard.family, network: wildcard.network, address: a.String()})
	}
	return hosts
}

// matching returns the addresses in the ranges. It skips link-local addresses without a
// zone, which cannot be listened on.
func matching(ranges []netip.Prefix, addrs []netip.Addr) []netip.Addr {
	var found []netip.Addr
	for _, a := range addrs {
		a = a.Unmap()
		if a.Is6() && a.IsLinkLocalUnicast() && a.Zone() == "" {
			continue
		}
		if slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(a.WithZone("")) }) {
			found = append(found, a)
		}
	}
	return found
}
