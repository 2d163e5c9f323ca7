package proxiertest_test

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// What follows are the shapes of kube-proxy's package pkg/proxy, for a program that was written for them: its own code
// stays as it is, and these lines take the place of its copy. A program may take them as they are.

// oldServicePort is pkg/proxy.ServicePort.
type oldServicePort struct{ *changetracker.ServicePort }

func (p oldServicePort) ClusterIP() net.IP        { return p.ServicePort.ClusterIP.AsSlice() }
func (p oldServicePort) Port() int                { return int(p.ServicePort.Port) }
func (p oldServicePort) NodePort() int            { return int(p.ServicePort.NodePort) }
func (p oldServicePort) HealthCheckNodePort() int { return int(p.ServicePort.HealthCheckNodePort) }
func (p oldServicePort) Protocol() v1.Protocol    { return p.Name.Protocol }
func (p oldServicePort) StickyMaxAgeSeconds() int {
	return int(p.SessionAffinity.Seconds())
}
func (p oldServicePort) InternalPolicyLocal() bool  { return p.ServicePort.InternalPolicyLocal }
func (p oldServicePort) ExternalPolicyLocal() bool  { return p.ServicePort.ExternalPolicyLocal }
func (p oldServicePort) ExternalIPs() []net.IP      { return oldIPs(p.ServicePort.ExternalIPs) }
func (p oldServicePort) LoadBalancerVIPs() []net.IP { return oldIPs(p.ServicePort.LoadBalancerVIPs) }

func (p oldServicePort) SessionAffinityType() v1.ServiceAffinity {
	if p.SessionAffinity > 0 {
		return v1.ServiceAffinityClientIP
	}
	return v1.ServiceAffinityNone
}

func (p oldServicePort) LoadBalancerSourceRanges() (all []*net.IPNet) {
	for _, r := range p.ServicePort.LoadBalancerSourceRanges {
		all = append(all, &net.IPNet{IP: r.Addr().AsSlice(), Mask: net.CIDRMask(r.Bits(), r.Addr().BitLen())})
	}
	return all
}

func (p oldServicePort) String() string {
	return fmt.Sprintf("%s/%s", net.JoinHostPort(p.ClusterIP().String(), fmt.Sprint(p.Port())), p.Protocol())
}

func oldIPs(addrs []netip.Addr) (all []net.IP) {
	for _, a := range addrs {
		all = append(all, a.AsSlice())
	}
	return all
}

// oldEndpoint is pkg/proxy.Endpoint.
type oldEndpoint struct {
	changetracker.Endpoint

	local bool
}

func (e oldEndpoint) String() string              { return e.Addr.String() }
func (e oldEndpoint) IP() string                  { return e.Addr.Addr().String() }
func (e oldEndpoint) Port() int                   { return int(e.Addr.Port()) }
func (e oldEndpoint) IsLocal() bool               { return e.local }
func (e oldEndpoint) IsReady() bool               { return e.Ready }
func (e oldEndpoint) IsServing() bool             { return e.Serving }
func (e oldEndpoint) IsTerminating() bool         { return e.Terminating }
func (e oldEndpoint) ZoneHints() sets.Set[string] { return sets.New(e.Endpoint.ZoneHints...) }
func (e oldEndpoint) NodeHints() sets.Set[string] { return sets.New(e.Endpoint.NodeHints...) }

// oldMaps are pkg/proxy.ServicePortMap and EndpointsMap of an IP family.
type oldMaps struct {
	services  map[changetracker.ServicePortName]oldServicePort
	endpoints map[changetracker.ServicePortName][]oldEndpoint
}

// Update is the Update of both maps, followed by the sync: it calls sync with the names of the Services that have changed, and
// what sync cannot program comes again in the next Update, which kube-proxy's maps would forget.
func (m *oldMaps) Update(tracker *changetracker.Tracker, family v1.IPFamily, sync func(updated sets.Set[types.NamespacedName]) (failed []changetracker.ServicePortName, err error)) error {
	return tracker.Apply(family, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		updated := sets.New[types.NamespacedName]()
		if delta.Full {
			m.services, m.endpoints = map[changetracker.ServicePortName]oldServicePort{}, map[changetracker.ServicePortName][]oldEndpoint{}
			for name, port := range delta.After.All() {
				m.set(delta.After, name, port)
				updated.Insert(name.NamespacedName)
			}
		}
		for _, c := range delta.Changes {
			m.set(delta.After, c.Name, c.After)
			updated.Insert(c.Name.NamespacedName)
		}
		return sync(updated)
	})
}

func (m *oldMaps) set(state *changetracker.State, name changetracker.ServicePortName, port *changetracker.ServicePort) {
	delete(m.services, name)
	delete(m.endpoints, name)
	if port == nil {
		return
	}
	m.services[name] = oldServicePort{port}
	view := state.For(state.Node())
	state.EachEndpoint(name, func(e *changetracker.Endpoint) {
		m.endpoints[name] = append(m.endpoints[name], oldEndpoint{*e, view.Local(e)})
	})
}

// From here on it is the program's own: a proxier of flows in a switch, as a network plugin has it, which knows kube-proxy's
// shapes alone.
type flowProxier struct {
	oldMaps

	installed map[changetracker.ServicePortName]string
	broken    string // the address that the switch refuses
	written   []string
}

func (p *flowProxier) syncProxyRules(updated sets.Set[types.NamespacedName]) (failed []changetracker.ServicePortName, err error) {
	for name := range maps.Clone(p.installed) {
		if _, exists := p.services[name]; !exists {
			delete(p.installed, name)
			p.written = append(p.written, "delete "+name.Name)
		}
	}
	for name, port := range p.services {
		var ready []string
		for _, e := range p.endpoints[name] {
			if e.IsReady() && (!port.InternalPolicyLocal() || e.IsLocal()) {
				ready = append(ready, e.String())
			}
		}
		flow := fmt.Sprintf("%v sticky %d to %s", port, port.StickyMaxAgeSeconds(), strings.Join(ready, ","))
		switch {
		case p.installed[name] == flow || !updated.Has(name.NamespacedName):
		case p.broken != "" && strings.Contains(flow, p.broken):
			failed = append(failed, name)
		default:
			p.installed[name] = flow
			p.written = append(p.written, flow)
		}
	}
	slices.Sort(p.written)
	return failed, nil
}

// TestGlueOfKubeProxysTypes: a program that was written for kube-proxy's types keeps its code.
func TestGlueOfKubeProxysTypes(t *testing.T) {
	t.Parallel()
	tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}, Node: changetracker.Node{Name: "n1"}})
	if err != nil {
		t.Fatal(err)
	}
	p := &flowProxier{installed: map[changetracker.ServicePortName]string{}}
	want := func(when string, lines ...string) {
		t.Helper()
		p.written = nil
		if err := p.Update(tracker, v1.IPv4Protocol, p.syncProxyRules); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(p.written, lines) {
			t.Errorf("%s: the switch got %q, want %q", when, p.written, lines)
		}
	}
	service := func(name, ip string, options ...proxiertest.ServiceOption) {
		tracker.Services.Update(nil, proxiertest.Service("shop", name, append(options, proxiertest.ClusterIPs(ip), proxiertest.Port("", v1.ProtocolTCP, 80))...))
	}
	slice := func(name string, endpoints ...proxiertest.SliceOption) {
		tracker.Endpoints.EndpointSliceUpdate(proxiertest.Slice("shop", name, discovery.AddressTypeIPv4, append(endpoints, proxiertest.SlicePort("", v1.ProtocolTCP, 8080))...), false)
	}
	here, there := proxiertest.Endpoint("10.1.0.1", proxiertest.OnNode("n1")), proxiertest.Endpoint("10.2.0.1", proxiertest.OnNode("n2"))
	service("web", "10.96.0.1", proxiertest.ClientAffinity(60e9))
	service("local", "10.96.0.2", proxiertest.InternalPolicyLocal())
	slice("web", here, there)
	slice("local", here, there)
	want("at first", "10.96.0.1:80/TCP sticky 60 to 10.1.0.1:8080,10.2.0.1:8080", "10.96.0.2:80/TCP sticky 0 to 10.1.0.1:8080")
	want("without a change")
	p.broken = "10.3.0.1"
	slice("web", here, proxiertest.Endpoint("10.3.0.1"))
	slice("local", proxiertest.Endpoint("10.1.0.2", proxiertest.OnNode("n1")))
	want("one fails", "10.96.0.2:80/TCP sticky 0 to 10.1.0.2:8080")
	p.broken = ""
	want("what failed comes again", "10.96.0.1:80/TCP sticky 60 to 10.1.0.1:8080,10.3.0.1:8080")
	tracker.Services.Delete(types.NamespacedName{Namespace: "shop", Name: "local"})
	want("one goes", "delete local")
	err = p.Update(tracker, v1.IPv4Protocol, func(sets.Set[types.NamespacedName]) ([]changetracker.ServicePortName, error) {
		return nil, errors.New("away")
	})
	if err == nil {
		t.Error("Update returns no error, want that of the sync")
	}
}
