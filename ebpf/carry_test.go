package ebpf

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// TestWhoCarries: each property that a socket cannot have leaves a frontend to the rules, and Plan says
// why.
func TestWhoCarries(t *testing.T) {
	t.Parallel()
	pods := desired.Globals{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}
	at := func(addresses ...string) desired.Endpoints {
		var all []netip.AddrPort
		for _, a := range addresses {
			all = append(all, netip.MustParseAddrPort(a))
		}
		return desired.EndpointsOf(all...)
	}
	clusterIP := desired.Frontend{Kind: desired.ClusterIP, VIP: netip.MustParseAddr("10.96.0.1"), Port: 80, Scope: desired.ScopeCluster, Action: desired.Forward, Masquerade: desired.MasqueradeNonPod}
	external := desired.Frontend{Kind: desired.LoadBalancer, VIP: netip.MustParseAddr("192.0.2.1"), Port: 80, Scope: desired.ScopeCluster, Action: desired.Forward, Masquerade: desired.MasqueradeAll}
	local := external
	local.Scope, local.Action, local.Masquerade, local.ShortCircuit = desired.ScopeLocal, desired.Drop, desired.MasqueradeNone, true
	for _, c := range []struct {
		name         string
		frontend     desired.Frontend
		service      func(*desired.Service)
		edit         func(*desired.Frontend, *desired.Globals)
		strict, fast reason
	}{
		{name: "ClusterIP", frontend: clusterIP, strict: bySockets, fast: bySockets},
		{name: "external, policy Cluster", frontend: external, strict: masqueraded, fast: bySockets},
		{name: "external, policy Local", frontend: local, strict: bySockets, fast: bySockets},
		{name: "masquerade all", frontend: clusterIP, edit: func(f *desired.Frontend, _ *desired.Globals) { f.Masquerade = desired.MasqueradeAll }, strict: masqueraded, fast: masqueraded},
		{name: "no detection", frontend: clusterIP, edit: func(_ *desired.Frontend, g *desired.Globals) { g.PodCIDRs = nil }, strict: podsUnknown, fast: podsUnknown},
		{name: "by interface", frontend: clusterIP, edit: func(_ *desired.Frontend, g *desired.Globals) { g.PodInterface = "pod*" }, strict: podsUnknown, fast: podsUnknown},
		{name: "node port", frontend: external, edit: func(f *desired.Frontend, _ *desired.Globals) { f.Kind, f.VIP = desired.NodePort, netip.Addr{} }, strict: atNodePorts, fast: atNodePorts},
		{name: "source ranges", frontend: local, edit: func(f *desired.Frontend, _ *desired.Globals) { f.Restricted = true }, strict: bySource, fast: bySource},
		{name: "rejected", frontend: clusterIP, edit: func(f *desired.Frontend, _ *desired.Globals) { f.Action = desired.Reject }, strict: refused, fast: refused},
		{name: "UDP", frontend: clusterIP, service: func(s *desired.Service) { s.Protocol = desired.UDP }, strict: byProtocol, fast: byProtocol},
		{name: "affinity", frontend: clusterIP, service: func(s *desired.Service) { s.Affinity = time.Hour }, strict: needsAffinity, fast: needsAffinity},
		{name: "hash", frontend: clusterIP, service: func(s *desired.Service) { s.Port.Balancing = changetracker.SourceHash }, strict: needsHash, fast: needsHash},
		{name: "ending", frontend: clusterIP, service: func(s *desired.Service) { s.Port.EndConnections = true }, strict: needsEnding, fast: needsEnding},
		{name: "weights", frontend: clusterIP, service: func(s *desired.Service) { s.ClusterWeights = []uint16{1, 2} }, strict: needsWeights, fast: needsWeights},
		{name: "least connections", frontend: clusterIP, service: func(s *desired.Service) { s.Port.Balancing = changetracker.LeastConnections }, strict: bySockets, fast: needsWeights},
		{name: "skipped", frontend: clusterIP, service: func(s *desired.Service) { s.Name.Port = "skipped" }, strict: skipped, fast: skipped},
		{name: "too many", frontend: clusterIP, service: func(s *desired.Service) { s.Cluster = many(maxEndpoints + 1) }, strict: tooManyEndpoints, fast: tooManyEndpoints},
	} {
		s := &desired.Service{Protocol: desired.TCP, Cluster: at("10.244.1.2:8080", "10.244.2.2:8080"), Port: &changetracker.ServicePort{}}
		g := pods
		if c.service != nil {
			c.service(s)
		}
		if c.edit != nil {
			c.edit(&c.frontend, &g)
		}
		s.Frontends = []desired.Frontend{c.frontend}
		for mode, want := range map[bool]reason{false: c.strict, true: c.fast} {
			sockets := Sockets{PodsKeepSource: mode, leastByWeights: mode, Choose: func(s *desired.Service) bool { return s.Name.Port != "skipped" }}
			if _, got := sockets.judge(s, &s.Frontends[0], &g); got != want {
				t.Errorf("%s, %v: reason %d, want %d", c.name, mode, got, want)
			}
			text := sockets.text(&desired.Update{Changes: desired.ChangesTo(s), Globals: g})
			if says := map[bool]string{true: "by sockets, ", false: "by rules, because " + want.String()}[want == bySockets]; !strings.Contains(text, says) {
				t.Errorf("%s, %v: Plan says %q, want %q", c.name, mode, text, says)
			}
			if carried := sockets.carry(s, &g); (carried != nil) != (want == bySockets) {
				t.Errorf("%s, %v: carry returns %v", c.name, mode, carried)
			}
		}
	}
}

func many(n int) desired.Endpoints {
	all := make([]netip.AddrPort, n)
	for i := range all {
		all[i] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 8080)
	}
	return desired.EndpointsOf(all...)
}
