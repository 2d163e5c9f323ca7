package desired

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// nodesOf returns nodes n0, n1… in three zones, with pod ranges.
func nodesOf(n int) (all []changetracker.Node) {
	for i := range n {
		all = append(all, changetracker.Node{
			Name: fmt.Sprint("n", i), Labels: map[string]string{"pool": fmt.Sprint(i % 2)}, Zone: fmt.Sprint("zone-", i%3), Addresses: []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})},
			PodCIDRs: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(i), 0}), 24)},
		})
	}
	return all
}

// stateOf returns the State of one service port.
func stateOf(tb testing.TB, port changetracker.ServicePort, endpoints []changetracker.Endpoint) *changetracker.State {
	tb.Helper()
	return stateOn(tb, changetracker.Node{}, port, endpoints)
}

// stateOn is stateOf with a node of the tracker.
func stateOn(tb testing.TB, node changetracker.Node, port changetracker.ServicePort, endpoints []changetracker.Endpoint) *changetracker.State {
	tb.Helper()
	port.Name = webName
	tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}, Node: node})
	if err == nil {
		_, err = tracker.Services.Set(webName.NamespacedName, port)
	}
	if err == nil {
		_, err = tracker.Endpoints.Set(webName, endpoints...)
	}
	var state *changetracker.State
	if err == nil {
		err = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			state = delta.After
			return nil, nil
		})
	}
	if err != nil {
		tb.Fatal(err)
	}
	return state
}

// randomServicePort draws policies, VIPs that some node refuses or does not expose, and source ranges that have the
// address of some nodes.
func randomServicePort(r *rand.Rand) changetracker.ServicePort {
	flip := func() bool { return r.IntN(2) == 0 }
	p := changetracker.ServicePort{ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: 80, NodePort: 30080, InternalPolicyLocal: flip(), ExternalPolicyLocal: flip()}
	if flip() {
		p.LoadBalancerVIPs = []netip.Addr{netip.MustParseAddr("10.244.3.9"), netip.MustParseAddr("203.0.113.1")}
		p.ExternalIPs = []netip.Addr{netip.MustParseAddr("10.244.4.9"), netip.MustParseAddr("192.0.2.5")}
	}
	if flip() {
		p.LoadBalancerSourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/29")}
	}
	if r.IntN(4) == 0 {
		p.ExposeOn = "pool=1"
	}
	return p
}

// randomEndpoints draws endpoints on few nodes, whose names are spelled in several ways, or missing.
func randomEndpoints(r *rand.Rand) (all []changetracker.Endpoint) {
	hints := r.IntN(4)
	for i := range r.IntN(6) {
		on := r.IntN(4)
		e := changetracker.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(r.IntN(6)), byte(1 + i)}), 8080), Serving: true}
		e.Node = []string{"", fmt.Sprint("n", on), fmt.Sprint("N", on), fmt.Sprintf("n%d.example", on), "elsewhere"}[r.IntN(5)]
		e.Ready = r.IntN(3) > 0
		e.Terminating = !e.Ready
		if hints&1 != 0 {
			e.ZoneHints = []string{fmt.Sprint("zone-", r.IntN(3))}
		}
		if hints&2 != 0 {
			e.NodeHints = []string{fmt.Sprint("n", r.IntN(8))}
		}
		all = append(all, e)
	}
	return all
}

// On each node, ResolveNodes gives what Resolve gives, and nodes that share a result have the same one.
func TestResolveNodesIsResolve(t *testing.T) {
	t.Parallel()
	nodes := append(nodesOf(12), changetracker.Node{}, changetracker.Node{Name: "n1.example", Zone: "zone-1"})
	shared := 0
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 50))
		port, endpoints := randomServicePort(r), randomEndpoints(r)
		state := stateOn(t, nodes[r.IntN(len(nodes))], port, endpoints)
		resolver := Resolver{DenyNodeExternalIPs: r.IntN(2) == 0, DetectsPods: r.IntN(2) == 0}
		all := resolver.ResolveNodes(state, webName, nodes)
		distinct := map[*Service]bool{}
		for i, node := range nodes {
			of := state
			if port.ExposeOn != "" {
				of = stateOn(t, node, port, endpoints)
			}
			resolver.Node = node
			want, _ := resolver.Resolve(of, webName)
			if got := all[i]; !reflect.DeepEqual(got, want) {
				t.Fatalf("seed %d: node %+v: %+v, want %+v", seed, node, got, want)
			}
			distinct[all[i]] = true
		}
		shared += len(nodes) - len(distinct)
	}
	if shared < 2000 {
		t.Errorf("only %d rows are shared", shared)
	}
}

// TestNodesShareRows: without hints, those without an endpoint have one row together; with zone hints, those of a zone.
func TestNodesShareRows(t *testing.T) {
	t.Parallel()
	nodes := nodesOf(100)
	for name, c := range map[string]struct {
		port     changetracker.ServicePort
		hint     []string
		edit     bool
		distinct int
	}{
		"policy Cluster":    {distinct: 3},
		"policy Local":      {port: changetracker.ServicePort{InternalPolicyLocal: true}, distinct: 3},
		"zone hints":        {hint: []string{"zone-0"}, distinct: 2 + 3},
		"a VIP of one node": {port: changetracker.ServicePort{ExternalIPs: []netip.Addr{nodes[50].Addresses[0]}}, distinct: 3 + 1},
		"a hook":            {edit: true, distinct: 100},
	} {
		t.Run(name, func(t *testing.T) {
			c.port.ClusterIP, c.port.Port = netip.MustParseAddr("10.96.0.1"), 80
			endpoints := []changetracker.Endpoint{}
			for i := range byte(2) {
				endpoints = append(endpoints, changetracker.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, i, 1}), 80), Node: fmt.Sprint("n", i), Ready: true, Serving: true, ZoneHints: c.hint})
			}
			resolver := Resolver{DenyNodeExternalIPs: true}
			if c.edit {
				resolver.EditSelection = func(_ changetracker.View, _ *changetracker.ServicePort, s changetracker.Selection) changetracker.Selection {
					return s
				}
			}
			distinct := map[*Service]bool{}
			for _, s := range resolver.ResolveNodes(stateOf(t, c.port, endpoints), webName, nodes) {
				distinct[s] = true
			}
			if len(distinct) != c.distinct {
				t.Errorf("%d different rows, want %d", len(distinct), c.distinct)
			}
		})
	}
	if all := (&Resolver{}).ResolveNodes(stateOf(t, changetracker.ServicePort{ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: 80}, nil), changetracker.ServicePortName{}, nodes); all != nil {
		t.Errorf("rows %v of no service port, want none", all)
	}
}

// BenchmarkResolveNodes measures a Service with 1,000 endpoints on 10 of 100 nodes: ratio is the time of
// ResolveNodes divided by the time of Resolve on the 11 nodes that differ.
func BenchmarkResolveNodes(b *testing.B) {
	nodes := nodesOf(100)
	var endpoints []changetracker.Endpoint
	for i := range 1000 {
		endpoints = append(endpoints, changetracker.Endpoint{
			Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i % 10), byte(1 + i/10)}), 80), Node: fmt.Sprint("n", i%10), Ready: true, Serving: true,
		})
	}
	state := stateOf(b, changetracker.ServicePort{ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: 80, NodePort: 30080, ExternalPolicyLocal: true}, endpoints)
	var all, some time.Duration
	for b.Loop() {
		began := time.Now()
		(&Resolver{}).ResolveNodes(state, webName, nodes)
		all += time.Since(began)
		began = time.Now()
		for _, node := range nodes[:11] {
			(&Resolver{Node: node}).Resolve(state, webName)
		}
		some += time.Since(began)
	}
	b.ReportMetric(float64(all)/float64(some), "ratio")
}
