package changetracker

import (
	"cmp"
	"fmt"
	"iter"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// frontend is what a service port may be looked up by.
type frontend struct {
	addr     netip.AddrPort // the zero Addr for a node port
	protocol v1.Protocol
}

// walked is the result of iterating over a State, for comparison with lookups.
type walked struct {
	frontends map[frontend][]ServicePortName
	vips      map[netip.Addr][]*ServicePort
	health    map[uint16][]types.NamespacedName
	endpoints map[netip.Addr][]ServicePortName
}

func walkState(s *State) walked {
	w := walked{
		frontends: map[frontend][]ServicePortName{}, vips: map[netip.Addr][]*ServicePort{},
		health: map[uint16][]types.NamespacedName{}, endpoints: map[netip.Addr][]ServicePortName{},
	}
	for name, p := range s.All() {
		vips := map[netip.Addr]bool{}
		for _, a := range slices.Concat([]netip.Addr{p.ClusterIP}, p.ExternalIPs, p.LoadBalancerVIPs) {
			vips[a] = a.IsValid()
		}
		delete(vips, netip.Addr{})
		for a := range vips {
			at := frontend{netip.AddrPortFrom(a, p.Port), name.Protocol}
			w.frontends[at] = append(w.frontends[at], name)
			w.vips[a] = append(w.vips[a], p)
		}
		if p.NodePort != 0 {
			at := frontend{netip.AddrPortFrom(netip.Addr{}, p.NodePort), name.Protocol}
			w.frontends[at] = append(w.frontends[at], name)
		}
	}
	for name, port := range s.HealthCheckNodePorts() {
		w.health[port] = append(w.health[port], name)
	}
	for _, service := range s.services.All() {
		for _, p := range service.ports {
			addrs := map[netip.Addr]bool{}
			for _, e := range p.endpoints.Slice() {
				addrs[e.Addr.Addr()] = true
			}
			for a := range addrs {
				w.endpoints[a] = append(w.endpoints[a], p.name)
			}
		}
	}
	return w
}

// checkLookups compares all lookups in a State with its content: everything is found,
// and nothing else.
func checkLookups(s *State) error {
	w := walkState(s)
	for at, want := range w.frontends {
		slices.SortFunc(want, ServicePortName.Compare)
		got := s.ByAddr(at.addr, at.protocol)
		if !at.addr.Addr().IsValid() {
			got = s.ByNodePort(at.addr.Port(), at.protocol)
		}
		if err := sameLookup(fmt.Sprint(at), got, want); err != nil {
			return err
		}
	}
	entries := len(s.HealthCheckNodePorts())
	for _, names := range w.frontends {
		entries += len(names)
	}
	for addr, ports := range w.vips {
		slices.SortFunc(ports, func(a, b *ServicePort) int { return cmp.Or(cmp.Compare(a.Port, b.Port), a.Name.Compare(b.Name)) })
		var want []ServicePortName
		for _, p := range ports {
			want = append(want, p.Name)
		}
		if err := sameLookup("ByVIP "+addr.String(), s.ByVIP(addr), want); err != nil {
			return err
		}
	}
	for port, want := range w.health {
		slices.SortFunc(want, compareNames)
		if err := sameLookup(fmt.Sprint("ByHealthCheckNodePort ", port), s.ByHealthCheckNodePort(port), want); err != nil {
			return err
		}
	}
	for addr, want := range w.endpoints {
		slices.SortFunc(want, ServicePortName.Compare)
		if err := sameLookup("ByEndpoint "+addr.String(), s.ByEndpoint(addr), want); err != nil {
			return err
		}
		if s.indexEndpoints {
			entries += len(want)
		}
	}
	if got := s.index.Len(); got != entries {
		return fmt.Errorf("the index has %d entries, want %d", got, entries)
	}
	return nil
}

func sameLookup[T comparable](what string, got iter.Seq[T], want []T) error {
	if got := slices.Collect(got); !slices.Equal(got, want) {
		return fmt.Errorf("%s = %v, want %v", what, got, want)
	}
	for first := range got {
		if first != want[0] {
			return fmt.Errorf("%s again starts with %v, want %v", what, first, want[0])
		}
		break // which iter.Seq must allow
	}
	return nil
}

// Lookups: which addresses are equal, and what is not found.
func TestLookups(t *testing.T) {
	for _, indexed := range []bool{false, true} {
		tracker := mustTracker(t, func(o *Options) { o.IndexEndpoints = indexed })
		name := func(service, port string, protocol v1.Protocol) ServicePortName {
			return ServicePortName{types.NamespacedName{Namespace: "test", Name: service}, port, protocol}
		}
		tcp, udp, late := name("dns", "", v1.ProtocolTCP), name("dns", "", v1.ProtocolUDP), name("late", "", v1.ProtocolTCP)
		vip, shared := netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("192.0.2.1")
		for service, ports := range map[string][]ServicePort{
			"dns": {
				{Name: tcp, ClusterIP: vip, Port: 53, NodePort: 30053, HealthCheckNodePort: 32000, ExternalIPs: []netip.Addr{shared}},
				{Name: udp, ClusterIP: vip, Port: 53, ExternalIPs: []netip.Addr{shared}, LoadBalancerVIPs: []netip.Addr{shared}},
			},
			"late": {{Name: late, ClusterIP: vip.Next(), Port: 53, HealthCheckNodePort: 32000, ExternalIPs: []netip.Addr{shared}}},
		} {
			if _, err := tracker.Services.Set(types.NamespacedName{Namespace: "test", Name: service}, ports...); err != nil {
				t.Fatal(err)
			}
		}
		endpoint := netip.MustParseAddr("10.0.0.1")
		for _, n := range []ServicePortName{late, tcp} {
			if _, err := tracker.Endpoints.Set(n, Endpoint{Addr: netip.AddrPortFrom(endpoint, 53), Ready: true}, Endpoint{Addr: netip.AddrPortFrom(endpoint, 54), Ready: true}); err != nil {
				t.Fatal(err)
			}
		}
		s, _ := applyAll(t, tracker, v1.IPv4Protocol)
		mapped := netip.AddrFrom16(shared.As16())
		for what, c := range map[string]struct{ got, want any }{
			"a ClusterIP":           {slices.Collect(s.ByAddr(netip.AddrPortFrom(vip, 53), v1.ProtocolUDP)), []ServicePortName{udp}},
			"an IP of several":      {slices.Collect(s.ByAddr(netip.AddrPortFrom(shared, 53), v1.ProtocolTCP)), []ServicePortName{tcp, late}},
			"named twice":           {slices.Collect(s.ByAddr(netip.AddrPortFrom(shared, 53), v1.ProtocolUDP)), []ServicePortName{udp}},
			"IPv4-mapped":           {slices.Collect(s.ByAddr(netip.AddrPortFrom(mapped, 53), v1.ProtocolUDP)), []ServicePortName{udp}},
			"another port":          {slices.Collect(s.ByAddr(netip.AddrPortFrom(vip, 54), v1.ProtocolTCP)), []ServicePortName(nil)},
			"no address":            {slices.Collect(s.ByAddr(netip.AddrPortFrom(netip.Addr{}, 30053), v1.ProtocolTCP)), []ServicePortName(nil)},
			"no port":               {slices.Collect(s.ByAddr(netip.AddrPortFrom(vip, 0), v1.ProtocolTCP)), []ServicePortName(nil)},
			"a VIP":                 {slices.Collect(s.ByVIP(mapped)), []ServicePortName{tcp, udp, late}},
			"a node port":           {slices.Collect(s.ByNodePort(30053, v1.ProtocolTCP)), []ServicePortName{tcp}},
			"without node port":     {slices.Collect(s.ByNodePort(0, v1.ProtocolTCP)), []ServicePortName(nil)},
			"its other protocol":    {slices.Collect(s.ByNodePort(30053, v1.ProtocolUDP)), []ServicePortName(nil)},
			"a health check's port": {slices.Collect(s.ByHealthCheckNodePort(32000)), []types.NamespacedName{tcp.NamespacedName, late.NamespacedName}},
			"an endpoint":           {slices.Collect(s.ByEndpoint(netip.AddrFrom16(endpoint.As16()))), []ServicePortName{tcp, late}},
			"no endpoint":           {slices.Collect(s.ByEndpoint(vip)), []ServicePortName(nil)},
		} {
			if !reflect.DeepEqual(c.got, c.want) {
				t.Errorf("indexed %t: %s: %v, want %v", indexed, what, c.got, c.want)
			}
		}
	}
}
