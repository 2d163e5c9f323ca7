package desired

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

var (
	clusterIP  = netip.MustParseAddr("10.96.0.10")
	externalIP = netip.MustParseAddr("192.0.2.20")
	vip        = netip.MustParseAddr("203.0.113.1")
	webName    = changetracker.ServicePortName{
		NamespacedName: types.NamespacedName{Namespace: "test", Name: "web"}, Port: "http", Protocol: v1.ProtocolTCP,
	}
)

// The endpoints differ in the last byte of their address.
func local(n byte) changetracker.Endpoint {
	e := remote(n)
	e.Node = "here"
	return e
}

func remote(n byte) changetracker.Endpoint {
	return changetracker.Endpoint{
		Addr:  netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, n}), 8080),
		Ready: true, Serving: true, Node: "there",
	}
}

func terminating(e changetracker.Endpoint) changetracker.Endpoint {
	e.Ready, e.Terminating = false, true
	return e
}

func notReady(e changetracker.Endpoint) changetracker.Endpoint {
	e.Ready, e.Serving, e.Terminating = false, false, true
	return e
}

func inZone(e changetracker.Endpoint, zones ...string) changetracker.Endpoint {
	e.ZoneHints = zones
	return e
}

// resolve puts a service port and its endpoints into a State and resolves it.
func resolve(t *testing.T, r Resolver, port changetracker.ServicePort, endpoints ...changetracker.Endpoint) (*Service, bool) {
	t.Helper()
	r.Node.Name = "here"
	tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}, Node: r.Node})
	if err != nil {
		t.Fatalf("new tracker: %v", err)
	}
	port.Name, port.Port = webName, 80
	if port.Family == "" { // otherwise it has no ClusterIP
		port.ClusterIP = clusterIP
	}
	if _, err := tracker.Services.Set(webName.NamespacedName, port); err != nil {
		t.Fatalf("set service: %v", err)
	}
	if _, err := tracker.Endpoints.Set(webName, endpoints...); err != nil {
		t.Fatalf("set endpoints: %v", err)
	}
	var s *Service
	ok := false
	err = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		state := delta.After
		s, ok = r.Resolve(state, webName)
		return nil, nil
	})
	if err != nil {
		t.Fatalf("apply: %v", err)
	}
	return s, ok
}

// text renders a frontend in a few words, for tables.
func text(f *Frontend) string {
	words := []string{f.Kind.String(), f.Action.String()}
	if f.Action == Forward {
		words = append(words, f.Scope.String(), "masquerade="+f.Masquerade.String())
	}
	if f.ShortCircuit {
		words = append(words, "short-circuit")
	}
	if f.Restricted {
		words = append(words, fmt.Sprint("from=", f.SourceRanges))
	}
	return strings.Join(words, " ")
}

func numbers(endpoints []netip.AddrPort) string {
	var ns []string
	for _, e := range endpoints {
		ns = append(ns, fmt.Sprint(e.Addr().As4()[3]))
	}
	return strings.Join(ns, ",")
}

// everywhere returns a service port with all kinds of frontends.
func everywhere() changetracker.ServicePort {
	return changetracker.ServicePort{
		NodePort: 30080, ExternalIPs: []netip.Addr{externalIP}, LoadBalancerVIPs: []netip.Addr{vip},
	}
}

func with(p changetracker.ServicePort, change func(*changetracker.ServicePort)) changetracker.ServicePort {
	change(&p)
	return p
}

func internalLocal(p *changetracker.ServicePort) { p.InternalPolicyLocal = true }

func externalLocal(p *changetracker.ServicePort) { p.ExternalPolicyLocal = true }

func TestFrontends(t *testing.T) {
	pods := Resolver{DetectsPods: true}
	for name, c := range map[string]struct {
		resolver       Resolver
		port           changetracker.ServicePort
		endpoints      []changetracker.Endpoint
		cluster, local string
		want           []string
	}{
		"PKT-01 PKT-03 ClusterIP keeps pods' sources": {
			resolver: pods, endpoints: []changetracker.Endpoint{remote(1), local(2)},
			cluster: "1,2", want: []string{"ClusterIP forward Cluster masquerade=non-pod"},
		},
		"PKT-01 masquerade all": {
			resolver: Resolver{DetectsPods: true, MasqueradeAll: true}, endpoints: []changetracker.Endpoint{remote(1)},
			cluster: "1", want: []string{"ClusterIP forward Cluster masquerade=all"},
		},
		"PKT-04 pods cannot be detected": {
			endpoints: []changetracker.Endpoint{remote(1)},
			cluster:   "1", want: []string{"ClusterIP forward Cluster masquerade=keep"},
		},
		"PKT-07 internal policy Local": {
			resolver: pods, port: with(changetracker.ServicePort{}, internalLocal), endpoints: []changetracker.Endpoint{remote(1), local(2)},
			local: "2", want: []string{"ClusterIP forward Local masquerade=non-pod"},
		},
		"PKT-08 internal policy Local without local endpoints": {
			resolver: pods, port: with(changetracker.ServicePort{}, internalLocal), endpoints: []changetracker.Endpoint{remote(1)},
			want: []string{"ClusterIP drop"},
		},
		"PKT-09 PKT-26 no endpoints": {
			resolver: pods, port: everywhere(),
			want: []string{"NodePort reject", "ClusterIP reject", "ExternalIP reject", "LoadBalancer reject"},
		},
		"PKT-20 PKT-28 external policy Cluster, whatever the internal one": {
			resolver: pods, port: with(everywhere(), internalLocal), endpoints: []changetracker.Endpoint{remote(1), local(2)},
			cluster: "1,2", local: "2",
			want: []string{
				"NodePort forward Cluster masquerade=all", "ClusterIP forward Local masquerade=non-pod",
				"ExternalIP forward Cluster masquerade=all", "LoadBalancer forward Cluster masquerade=all",
			},
		},
		"PKT-21 PKT-23 PKT-25 external policy Local": {
			resolver: pods, port: with(everywhere(), externalLocal), endpoints: []changetracker.Endpoint{remote(1), local(2)},
			cluster: "1,2", local: "2",
			want: []string{
				"NodePort forward Local masquerade=keep short-circuit", "ClusterIP forward Cluster masquerade=non-pod",
				"ExternalIP forward Local masquerade=keep short-circuit", "LoadBalancer forward Local masquerade=keep short-circuit",
			},
		},
		"PKT-22 external policy Local without local endpoints": {
			resolver: pods, port: with(everywhere(), externalLocal), endpoints: []changetracker.Endpoint{remote(1)},
			cluster: "1",
			want: []string{
				"NodePort drop short-circuit", "ClusterIP forward Cluster masquerade=non-pod",
				"ExternalIP drop short-circuit", "LoadBalancer drop short-circuit",
			},
		},
		"external policy Local on a ClusterIP alone changes nothing": {
			resolver: pods, port: with(changetracker.ServicePort{}, externalLocal), endpoints: []changetracker.Endpoint{remote(1)},
			cluster: "1", want: []string{"ClusterIP forward Cluster masquerade=non-pod"},
		},
		"PKT-71 the scopes fall back to terminating endpoints by themselves": {
			port: with(everywhere(), externalLocal), endpoints: []changetracker.Endpoint{remote(1), terminating(local(2)), terminating(remote(3))},
			cluster: "1", local: "2",
			want: []string{
				"NodePort forward Local masquerade=keep short-circuit", "ClusterIP forward Cluster masquerade=keep",
				"ExternalIP forward Local masquerade=keep short-circuit", "LoadBalancer forward Local masquerade=keep short-circuit",
			},
		},
		"PKT-72 endpoints that do not serve do not count": {
			endpoints: []changetracker.Endpoint{notReady(remote(1)), notReady(local(2))},
			want:      []string{"ClusterIP reject"},
		},
		"topology narrows Cluster and never Local": {
			resolver: Resolver{Node: changetracker.Node{Name: "here", Zone: "a"}}, port: with(everywhere(), externalLocal),
			endpoints: []changetracker.Endpoint{inZone(remote(1), "a"), inZone(local(2), "b"), inZone(remote(3), "a", "b")},
			cluster:   "1,3", local: "2",
			want: []string{
				"NodePort forward Local masquerade=keep short-circuit", "ClusterIP forward Cluster masquerade=keep",
				"ExternalIP forward Local masquerade=keep short-circuit", "LoadBalancer forward Local masquerade=keep short-circuit",
			},
		},
		"node ports off": {
			resolver: Resolver{Kinds: []Kind{ClusterIP, LoadBalancer, ExternalIP}}, port: changetracker.ServicePort{NodePort: 30080}, endpoints: []changetracker.Endpoint{remote(1)},
			cluster: "1", want: []string{"ClusterIP forward Cluster masquerade=keep"},
		},
		"ClusterIPs alone": {
			resolver: Resolver{DetectsPods: true, Kinds: []Kind{ClusterIP}, DenyNodeExternalIPs: true, Node: changetracker.Node{Addresses: []netip.Addr{externalIP}}},
			port:     everywhere(), endpoints: []changetracker.Endpoint{remote(1)}, cluster: "1", want: []string{"ClusterIP forward Cluster masquerade=non-pod"},
		},
		"all but ClusterIPs": {
			resolver: Resolver{Kinds: []Kind{NodePort, LoadBalancer, ExternalIP}}, port: everywhere(), endpoints: []changetracker.Endpoint{remote(1)}, cluster: "1",
			want: []string{"NodePort forward Cluster masquerade=all", "ExternalIP forward Cluster masquerade=all", "LoadBalancer forward Cluster masquerade=all"},
		},
		"a node port alone": {
			resolver: pods, port: changetracker.ServicePort{Family: v1.IPv4Protocol, NodePort: 30080, InternalPolicyLocal: true},
			endpoints: []changetracker.Endpoint{remote(1)}, cluster: "1", want: []string{"NodePort forward Cluster masquerade=all"},
		},
		"a node port alone, and node ports are off": {
			resolver: Resolver{Kinds: []Kind{ClusterIP, LoadBalancer, ExternalIP}}, port: changetracker.ServicePort{Family: v1.IPv4Protocol, NodePort: 30080},
			endpoints: []changetracker.Endpoint{remote(1)}, cluster: "1",
		},
		"VIPs alone, the node admitted by its address of the family": {
			resolver: Resolver{Node: changetracker.Node{Addresses: []netip.Addr{netip.MustParseAddr("fd00::7"), netip.MustParseAddr("192.168.0.7")}}},
			port: changetracker.ServicePort{
				Family: v1.IPv4Protocol, LoadBalancerVIPs: []netip.Addr{vip}, LoadBalancerSourceRanges: []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16")},
			},
			endpoints: []changetracker.Endpoint{remote(1)}, cluster: "1",
			want: []string{"LoadBalancer forward Cluster masquerade=all from=[192.168.0.0/16 " + vip.String() + "/32]"},
		},
		"an address that is external IP and load balancer has one frontend": {
			port:      changetracker.ServicePort{ExternalIPs: []netip.Addr{vip, clusterIP}, LoadBalancerVIPs: []netip.Addr{vip}},
			endpoints: []changetracker.Endpoint{remote(1)},
			cluster:   "1",
			want:      []string{"ClusterIP forward Cluster masquerade=keep", "LoadBalancer forward Cluster masquerade=all"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, ok := resolve(t, c.resolver, c.port, c.endpoints...)
			if !ok {
				t.Fatal("not resolved")
			}
			var got []string
			for i := range s.Frontends {
				got = append(got, text(&s.Frontends[i]))
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("frontends\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(c.want, "\n"))
			}
			if got := numbers(s.Cluster.Slice()); got != c.cluster {
				t.Errorf("cluster endpoints %q, want %q", got, c.cluster)
			}
			if got := numbers(s.Local.Slice()); got != c.local {
				t.Errorf("local endpoints %q, want %q", got, c.local)
			}
			if !slices.IsSortedFunc(s.Frontends, func(a, b Frontend) int { return s.Key(&a).Compare(s.Key(&b)) }) {
				t.Error("frontends are not in order of key")
			}
		})
	}
}

// PKT-40 to PKT-47.
func TestSourceRanges(t *testing.T) {
	lan := netip.MustParsePrefix("192.168.0.0/16")
	for name, c := range map[string]struct {
		node []netip.Addr
		port changetracker.ServicePort
		want string
	}{
		"no source ranges":     {port: changetracker.ServicePort{}, want: ""},
		"PKT-41 source ranges": {port: changetracker.ServicePort{LoadBalancerSourceRanges: []netip.Prefix{lan}}, want: " from=[192.168.0.0/16]"},
		"PKT-42 the node is admitted, so the VIPs are": {
			node: []netip.Addr{netip.MustParseAddr("192.168.1.1")},
			port: changetracker.ServicePort{LoadBalancerSourceRanges: []netip.Prefix{lan}},
			want: " from=[192.168.0.0/16 203.0.113.1/32]",
		},
		"PKT-42 the primary address is the first of the family": {
			node: []netip.Addr{netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("192.168.1.1"), netip.MustParseAddr("10.0.0.1")},
			port: changetracker.ServicePort{LoadBalancerSourceRanges: []netip.Prefix{lan}},
			want: " from=[192.168.0.0/16 203.0.113.1/32]",
		},
		"PKT-42 a second address admits no VIP": {
			node: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("192.168.1.1")},
			port: changetracker.ServicePort{LoadBalancerSourceRanges: []netip.Prefix{lan}},
			want: " from=[192.168.0.0/16]",
		},
		"PKT-43 the node is not admitted": {
			node: []netip.Addr{netip.MustParseAddr("10.0.0.1")},
			port: changetracker.ServicePort{LoadBalancerSourceRanges: []netip.Prefix{lan}},
			want: " from=[192.168.0.0/16]",
		},
		"W-07 closed when strict": {port: changetracker.ServicePort{DenyAllSources: true}, want: " from=[]"},
	} {
		t.Run(name, func(t *testing.T) {
			c.port.LoadBalancerVIPs, c.port.NodePort, c.port.ExternalIPs = []netip.Addr{vip}, 30080, []netip.Addr{externalIP}
			s, _ := resolve(t, Resolver{Node: changetracker.Node{Addresses: c.node}}, c.port, remote(1))
			for i := range s.Frontends {
				f := &s.Frontends[i]
				want := f.Kind.String() + " forward Cluster masquerade=all"
				switch f.Kind {
				case LoadBalancer:
					want += c.want
				case ClusterIP:
					want = "ClusterIP forward Cluster masquerade=keep"
				case ExternalIP, NodePort: // PKT-44: never restricted
				}
				if got := text(f); got != want {
					t.Errorf("%s, want %s", got, want)
				}
			}
		})
	}
}

// PKT-02, if the slice has no node name, or a wrong one.
func TestHairpinLeavesOutOnlyWhatIsElsewhere(t *testing.T) {
	for _, c := range []struct {
		node, endpoint, podCIDR string
		want                    bool
	}{
		{"node-1", "node-1", "", true},
		{"node-1", "", "", true},
		{"node-1", "NODE-1", "", true},
		{"node-1", "node-1.example.com", "", true},
		{"node-1.example.com", "Node-1", "", true},
		{"node-1.example.com", "node-1.EXAMPLE.com.", "", true},
		{"node-1.example.com", "node-1.example.org", "", false},
		{"node-1", "west/node-1", "", false}, // of another cluster
		{"node-1", "node-1.west/node-1", "", false},
		{"west/node-1", "west/node-1.example.com", "", true},
		{"node-1", "node-10", "", false},
		{"node-1", "node-2", "", false},
		{"node-1", "node-2", "10.99.0.0/16", false},
		{"node-1", "node-2", "10.0.0.0/8", true},
		{"", "node-2", "", true},
	} {
		r := Resolver{Node: changetracker.Node{Name: c.node}}
		if c.podCIDR != "" {
			r.Node.PodCIDRs = []netip.Prefix{netip.MustParsePrefix(c.podCIDR)}
		}
		e := remote(1)
		e.Node = c.endpoint
		if got := r.mayBeHere(&e); got != c.want {
			t.Errorf("node %q, endpoint %v on %q, pods %q: in hairpin %v, want %v", c.node, e.Addr, c.endpoint, c.podCIDR, got, c.want)
		}
	}
}

func TestMinimalKeepsOneFamilyWithoutOverlaps(t *testing.T) {
	in := []netip.Prefix{
		netip.MustParsePrefix("10.1.2.3/16"), netip.MustParsePrefix("10.1.0.0/24"),
		{},
		netip.MustParsePrefix("fd00::/8"),
		netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("10.1.0.0/16"),
	}
	if got, want := fmt.Sprint(Minimal(in, v1.IPv4Protocol)), "[10.0.0.0/16 10.1.0.0/16]"; got != want {
		t.Errorf("IPv4 = %s, want %s", got, want)
	}
	if got, want := fmt.Sprint(Minimal(in, v1.IPv6Protocol)), "[fd00::/8]"; got != want {
		t.Errorf("IPv6 = %s, want %s", got, want)
	}
}

func ExampleResolver() {
	name := changetracker.ServicePortName{
		NamespacedName: types.NamespacedName{Namespace: "shop", Name: "web"}, Port: "http", Protocol: v1.ProtocolTCP,
	}
	tracker, err := changetracker.New(changetracker.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = tracker.Services.Set(name.NamespacedName, changetracker.ServicePort{
		Name: name, ClusterIP: netip.MustParseAddr("10.96.0.10"), Port: 80, NodePort: 30080, ExternalPolicyLocal: true,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = tracker.Endpoints.Set(name, changetracker.Endpoint{Addr: netip.MustParseAddrPort("10.244.1.7:8080"), Ready: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		state := delta.After
		s, _ := (&Resolver{DetectsPods: true}).Resolve(state, name)
		for _, f := range s.Frontends {
			fmt.Println(f.Kind, s.Key(&f), f.Action, f.Masquerade)
		}
		return nil, nil
	})
	fmt.Println(err)
	// Output:
	// NodePort node port 30080/TCP drop keep
	// ClusterIP 10.96.0.10:80/TCP forward non-pod
	// <nil>
}

// Weights are set only if they differ, in the order of the endpoints.
func TestWeights(t *testing.T) {
	weighing := func(e changetracker.Endpoint, weight uint16) changetracker.Endpoint {
		e.Weight = weight
		return e
	}
	for name, c := range map[string]struct {
		endpoints      []changetracker.Endpoint
		cluster, local []uint16
	}{
		"no endpoints":              {},
		"the default":               {endpoints: []changetracker.Endpoint{remote(1), local(2)}},
		"0 and 1 are the same":      {endpoints: []changetracker.Endpoint{weighing(remote(1), 1), local(2)}},
		"all are equal":             {endpoints: []changetracker.Endpoint{weighing(remote(1), 7), weighing(local(2), 7)}},
		"the default counts as 1":   {endpoints: []changetracker.Endpoint{weighing(remote(1), 7), local(2)}, cluster: []uint16{7, 1}},
		"in the order of addresses": {endpoints: []changetracker.Endpoint{weighing(remote(3), 3), weighing(remote(2), 2), remote(1)}, cluster: []uint16{1, 2, 3}},
		"each scope has its own": {
			endpoints: []changetracker.Endpoint{weighing(remote(1), 1), weighing(local(2), 2), weighing(local(3), 3), weighing(remote(4), 65535)},
			cluster:   []uint16{1, 2, 3, 65535}, local: []uint16{2, 3},
		},
		"equal in one scope alone": {
			endpoints: []changetracker.Endpoint{weighing(remote(1), 5), weighing(local(2), 2), weighing(local(3), 2)}, cluster: []uint16{5, 2, 2},
		},
		"of endpoints that are used": {endpoints: []changetracker.Endpoint{weighing(terminating(remote(1)), 9), weighing(notReady(local(2)), 8), local(3)}},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := resolve(t, Resolver{}, with(everywhere(), externalLocal), c.endpoints...)
			if got := s.Weights(ScopeCluster); !slices.Equal(got, c.cluster) || (got == nil) != (c.cluster == nil) {
				t.Errorf("weights of %v = %v, want %v", s.Cluster, got, c.cluster)
			}
			if got := s.Weights(ScopeLocal); !slices.Equal(got, c.local) || (got == nil) != (c.local == nil) {
				t.Errorf("weights of %v = %v, want %v", s.Local, got, c.local)
			}
		})
	}
}
