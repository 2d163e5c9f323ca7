package ipvs

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// plannedNode has two addresses that accept node ports.
func plannedNode() []netip.Addr {
	return []netip.Addr{netip.MustParseAddr("192.0.2.250"), netip.MustParseAddr("192.0.2.251")}
}

// plannedService has a local endpoint A, and a remote endpoint B.
func plannedService(frontends ...desired.Frontend) *desired.Service {
	both := desired.EndpointsOf(endpointA(), endpointB())
	return &desired.Service{
		Protocol: desired.TCP, Cluster: both, Local: desired.EndpointsOf(endpointA()), Serving: both, Frontends: frontends,
	}
}

func planned(kind desired.Kind, vip string, port uint16, scope desired.Scope) desired.Frontend {
	f := desired.Frontend{Kind: kind, Port: port, Scope: scope, Action: desired.Forward}
	if vip != "" {
		f.VIP = netip.MustParseAddr(vip)
	}
	return f
}

func TestFrontendsBecomeVirtualServers(t *testing.T) {
	t.Parallel()
	const cluster, local = desired.ScopeCluster, desired.ScopeLocal
	all, here := []netip.AddrPort{endpointA(), endpointB()}, []netip.AddrPort{endpointA()}
	nowhere := func(s *desired.Service) { s.Local = desired.Endpoints{} }
	circuited := func(s *desired.Service) {
		s.Local = desired.Endpoints{}
		for i := range s.Frontends {
			s.Frontends[i].ShortCircuit, s.Frontends[i].Action = true, desired.Drop
		}
	}
	tests := map[string]struct {
		frontends []desired.Frontend
		change    func(*desired.Service)
		want      map[string][]netip.AddrPort
	}{
		"every kind of VIP": {
			frontends: []desired.Frontend{
				planned(desired.ClusterIP, "198.51.100.1", 80, cluster), planned(desired.LoadBalancer, "198.51.100.2", 80, cluster),
				planned(desired.ExternalIP, "198.51.100.3", 80, local),
			},
			want: map[string][]netip.AddrPort{"198.51.100.1:80": all, "198.51.100.2:80": all, "198.51.100.3:80": here},
		},
		"node port: one for each address": {
			frontends: []desired.Frontend{planned(desired.NodePort, "", 30080, cluster)},
			want:      map[string][]netip.AddrPort{"192.0.2.250:30080": all, "192.0.2.251:30080": all},
		},
		"local policy with endpoints here": {
			frontends: []desired.Frontend{planned(desired.NodePort, "", 30080, local)},
			want:      map[string][]netip.AddrPort{"192.0.2.250:30080": here, "192.0.2.251:30080": here},
		},
		"local policy without local endpoints: no real servers, but serving endpoints keep their connections (PKT-80)": {
			frontends: []desired.Frontend{planned(desired.ClusterIP, "198.51.100.1", 80, local)},
			change:    nowhere,
			want:      map[string][]netip.AddrPort{"198.51.100.1:80": nil},
		},
		"external local policy without local endpoints: pods and the node reach all (PKT-23)": {
			frontends: []desired.Frontend{planned(desired.LoadBalancer, "198.51.100.2", 80, local)},
			change:    circuited,
			want:      map[string][]netip.AddrPort{"198.51.100.2:80": all},
		},
		"no endpoints at all": {
			frontends: []desired.Frontend{planned(desired.ClusterIP, "198.51.100.1", 80, cluster)},
			change: func(s *desired.Service) {
				s.Cluster, s.Local, s.Serving = desired.Endpoints{}, desired.Endpoints{}, desired.Endpoints{}
			},
			want: map[string][]netip.AddrPort{},
		},
		"a VIP beside a node port with the same key: the VIP": {
			frontends: []desired.Frontend{
				planned(desired.NodePort, "", 30080, cluster), planned(desired.ExternalIP, "192.0.2.250", 30080, local),
			},
			want: map[string][]netip.AddrPort{"192.0.2.250:30080": here, "192.0.2.251:30080": all},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := plannedService(test.frontends...)
			if test.change != nil {
				test.change(s)
			}
			config := Config{}.WithDefaults()
			for _, frontends := range [][]desired.Frontend{test.frontends, reversed(test.frontends)} {
				s.Frontends = frontends
				if test.change != nil {
					test.change(s)
				}
				p := planner{config: &config, nodeAddrs: plannedNode()}
				got := map[string][]netip.AddrPort{}
				for key, v := range p.virtuals(s) {
					got[netip.AddrPortFrom(key.VIP, key.Port).String()] = slices.SortedFunc(maps.Keys(v.reals), netip.AddrPort.Compare)
					if key.Protocol != desired.TCP || v.scheduler != "rr" || v.flags != 0 || v.timeout != 0 || !v.serving.Equal(s.Serving) {
						t.Errorf("%v = %+v, want TCP, rr, no flags, and all that serve", key, v)
					}
				}
				if !maps.EqualFunc(got, test.want, slices.Equal) {
					t.Errorf("virtual servers = %v, want %v", got, test.want)
				}
			}
		})
	}
}

func reversed(frontends []desired.Frontend) []desired.Frontend {
	r := slices.Clone(frontends)
	slices.Reverse(r)
	return r
}

func TestSettingsOfAVirtualServer(t *testing.T) {
	t.Parallel()
	hashing := func(scheduler string) Config {
		return Config{Scheduler: scheduler, HashPort: true, HashFallback: true}
	}
	tuned := func(c Config, own Tuning) Config {
		c.Choose = func(*desired.Service) Tuning { return own }
		return c
	}
	tests := map[string]struct {
		config   Config
		protocol desired.Protocol // TCP if it is 0
		affinity time.Duration
		policy   changetracker.Balancing
		weights  []uint16
		want     settings
	}{
		"defaults":               {want: settings{scheduler: "rr"}},
		"a scheduler":            {config: Config{Scheduler: "wlc"}, protocol: desired.SCTP, want: settings{scheduler: "wlc"}},
		"affinity":               {affinity: 3 * time.Hour, want: settings{scheduler: "rr", flags: 0x1, timeout: 3 * time.Hour}},
		"one packet":             {config: Config{OnePacket: true}, protocol: desired.UDP, want: settings{scheduler: "rr", flags: 0x4}},
		"one packet, but TCP":    {config: Config{OnePacket: true}, want: settings{scheduler: "rr"}},
		"one packet, affinity":   {config: Config{OnePacket: true}, protocol: desired.UDP, affinity: time.Minute, want: settings{scheduler: "rr", flags: 0x5, timeout: time.Minute}},
		"hash of ports, sh":      {config: hashing("sh"), want: settings{scheduler: "sh", flags: 0x18}},
		"hash of ports, mh":      {config: hashing("mh"), want: settings{scheduler: "mh", flags: 0x18}},
		"hash of ports, but rr":  {config: hashing("rr"), want: settings{scheduler: "rr"}},
		"mh with fallback alone": {config: Config{Scheduler: "mh", HashFallback: true}, want: settings{scheduler: "mh", flags: 0x8}},
		"sh with port alone":     {config: Config{Scheduler: "sh", HashPort: true}, want: settings{scheduler: "sh", flags: 0x10}},

		"weights":                    {weights: []uint16{1, 2}, want: settings{scheduler: "wrr"}},
		"weights, lc":                {config: Config{Scheduler: "lc"}, weights: []uint16{1, 2}, want: settings{scheduler: "wlc"}},
		"weights, sh":                {config: Config{Scheduler: "sh"}, weights: []uint16{1, 2}, want: settings{scheduler: "sh"}},
		"hash of addresses":          {policy: changetracker.SourceHash, want: settings{scheduler: "mh", flags: 0x8}},
		"hash, whatever the config":  {config: hashing("sh"), policy: changetracker.SourceHash, want: settings{scheduler: "mh", flags: 0x8}},
		"hash of addresses, weights": {policy: changetracker.SourceHash, weights: []uint16{1, 2}, want: settings{scheduler: "mh", flags: 0x8}},
		"hash of ports":              {policy: changetracker.SourcePortHash, want: settings{scheduler: "mh", flags: 0x18}},
		"hash, affinity, one packet": {
			config: Config{OnePacket: true}, protocol: desired.UDP, affinity: time.Hour, policy: changetracker.SourcePortHash,
			want: settings{scheduler: "mh", flags: 0x1d, timeout: time.Hour},
		},
		"least connections":           {config: hashing("mh"), policy: changetracker.LeastConnections, want: settings{scheduler: "lc"}},
		"least connections, weights":  {policy: changetracker.LeastConnections, weights: []uint16{1, 2}, want: settings{scheduler: "wlc"}},
		"least connections, affinity": {policy: changetracker.LeastConnections, affinity: time.Hour, want: settings{scheduler: "lc", flags: 0x1, timeout: time.Hour}},

		"tuned":                   {config: tuned(Config{HashPort: true}, Tuning{Scheduler: "sh"}), want: settings{scheduler: "sh", flags: 0x10}},
		"tuned flags":             {config: tuned(Config{Scheduler: "mh"}, Tuning{HashPort: true, HashFallback: true}), want: settings{scheduler: "mh", flags: 0x18}},
		"tuned one packet":        {config: tuned(Config{}, Tuning{OnePacket: true}), protocol: desired.UDP, want: settings{scheduler: "rr", flags: 0x4}},
		"tuned against a policy":  {config: tuned(Config{}, Tuning{Scheduler: "sed"}), policy: changetracker.SourceHash, want: settings{scheduler: "sed"}},
		"tuned hash of a policy":  {config: tuned(Config{}, Tuning{HashPort: true}), policy: changetracker.SourceHash, want: settings{scheduler: "mh", flags: 0x18}},
		"tuned scheduler, weight": {config: tuned(Config{}, Tuning{Scheduler: "lc"}), weights: []uint16{3, 1}, want: settings{scheduler: "wlc"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := test.config.WithDefaults()
			s := plannedService(planned(desired.ClusterIP, "198.51.100.1", 80, desired.ScopeCluster))
			s.Protocol, s.Affinity, s.ClusterWeights = cmp.Or(test.protocol, desired.TCP), test.affinity, test.weights
			s.Port = &changetracker.ServicePort{Balancing: test.policy}
			p := planner{config: &config}
			v := p.virtuals(s)[keyOf(s.Protocol, netip.MustParseAddrPort("198.51.100.1:80"))]
			if v == nil || v.settings != test.want {
				t.Errorf("virtual server = %+v, want %+v", v, test.want)
			}
		})
	}
}

// TestOnlyMasqueradingChangesThePort: other methods forward to the endpoints that have the frontend's port, and
// node ports are always masqueraded.
func TestOnlyMasqueradingChangesThePort(t *testing.T) {
	t.Parallel()
	fits := netip.MustParseAddrPort("192.0.2.3:80")
	for name, c := range map[string]struct{ engine, own, want ForwardingMethod }{
		"masquerading":           {},
		"the engine's":           {ForwardDirect, ForwardMasquerade, ForwardDirect},
		"the service port's":     {ForwardMasquerade, ForwardTunnel, ForwardTunnel},
		"the service port first": {ForwardDirect, ForwardTunnel, ForwardTunnel},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := Config{Forward: c.engine, Choose: func(*desired.Service) Tuning { return Tuning{Forward: c.own} }}.WithDefaults()
			p := planner{config: &config, nodeAddrs: plannedNode()}
			s := plannedService(planned(desired.ClusterIP, "198.51.100.1", 80, desired.ScopeCluster), planned(desired.NodePort, "", 30080, desired.ScopeCluster))
			s.Cluster = s.Cluster.With(fits)
			all := p.virtuals(s)
			node, vip := all[tcpKey("192.0.2.250:30080")], all[tcpKey("198.51.100.1:80")]
			if node.forward != ForwardMasquerade || len(node.reals) != 3 || len(node.unfit) != 0 {
				t.Errorf("the node port's virtual server = %+v, want all endpoints masqueraded", node)
			}
			reals, unfit := 1, 2
			if c.want == ForwardMasquerade {
				reals, unfit = 3, 0
			}
			if vip.forward != c.want || len(vip.reals) != reals || len(vip.unfit) != unfit || vip.reals[fits] != 1 {
				t.Errorf("the VIP's virtual server = %+v, want method %v with %d real servers", vip, c.want, reals)
			}
			s.Protocol = desired.SCTP
			if sctp := p.virtuals(s)[keyOf(desired.SCTP, netip.MustParseAddrPort("198.51.100.1:80"))]; sctp.forward != ForwardMasquerade || p.traits(s).DirectReturn {
				t.Errorf("the virtual server of SCTP = %+v, want it masqueraded", sctp)
			}
			s.Protocol = desired.TCP
			if got := p.traits(s).DirectReturn; got != (c.want != ForwardMasquerade) {
				t.Errorf("DirectReturn = %v with method %v", got, c.want)
			}
		})
	}
}

// TestWeightsAreThoseOfTheScope: with few local endpoints, those of all endpoints do not count.
func TestWeightsAreThoseOfTheScope(t *testing.T) {
	t.Parallel()
	const cluster, local, circuit = "198.51.100.1", "198.51.100.2", "198.51.100.3"
	a, b := endpointA(), endpointB()
	config := Config{}.WithDefaults()
	s := plannedService(planned(desired.ClusterIP, cluster, 80, desired.ScopeCluster), planned(desired.LoadBalancer, local, 80, desired.ScopeLocal))
	s.ClusterWeights = []uint16{2, 65535}
	p := planner{config: &config}
	got := p.virtuals(s)
	if v := got[tcpKey(cluster+":80")]; !maps.Equal(v.reals, map[netip.AddrPort]int{a: 2, b: 65535}) || v.scheduler != "wrr" {
		t.Errorf("all endpoints = %+v, want weights 2 and 65535, and wrr", v)
	}
	if v := got[tcpKey(local+":80")]; !maps.Equal(v.reals, map[netip.AddrPort]int{a: 1}) || v.scheduler != "rr" {
		t.Errorf("local endpoints = %+v, want weight 1, and rr", v)
	}
	alone := planned(desired.ExternalIP, circuit, 80, desired.ScopeLocal)
	alone.ShortCircuit, alone.Action = true, desired.Drop
	s = plannedService(alone)
	s.Local, s.ClusterWeights, s.LocalWeights = desired.Endpoints{}, []uint16{1, 3}, nil
	if v := p.virtuals(s)[tcpKey(circuit+":80")]; !maps.Equal(v.reals, map[netip.AddrPort]int{a: 1, b: 3}) || v.scheduler != "wrr" {
		t.Errorf("endpoints for pods and the node = %+v, want weights 1 and 3, and wrr", v)
	}
}

func TestNodePortAddresses(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		local, accepting, want []string
	}{
		"all": {
			local:     []string{"192.0.2.9", "127.0.0.1", "192.0.2.1", "169.254.1.1", "192.0.2.9"},
			accepting: []string{"0.0.0.0/0"},
			want:      []string{"169.254.1.1", "192.0.2.1", "192.0.2.9"},
		},
		"ranges":             {local: []string{"192.0.2.1", "198.51.100.1", "203.0.113.1"}, accepting: []string{"198.51.100.0/24", "203.0.113.1/32"}, want: []string{"198.51.100.1", "203.0.113.1"}},
		"none accepts":       {local: []string{"192.0.2.1"}, want: nil},
		"loopback is named":  {local: []string{"127.0.0.1", "127.0.0.2"}, accepting: []string{"127.0.0.0/8"}, want: nil},
		"IPv6":               {local: []string{"::1", "fe80::1", "2001:db8::1"}, accepting: []string{"::/0"}, want: []string{"2001:db8::1"}},
		"no address at all ": {accepting: []string{"0.0.0.0/0"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var local []netip.Addr
			for _, a := range test.local {
				local = append(local, netip.MustParseAddr(a))
			}
			var accepting []netip.Prefix
			for _, p := range test.accepting {
				accepting = append(accepting, netip.MustParsePrefix(p))
			}
			var got []string
			for _, a := range nodePortAddrs(local, accepting) {
				got = append(got, a.String())
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("addresses = %q, want %q", got, test.want)
			}
		})
	}
}
