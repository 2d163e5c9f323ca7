package ipvs

import (
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
	both := []netip.AddrPort{endpointA(), endpointB()}
	return &desired.Service{
		Protocol: desired.TCP, Cluster: both, Local: both[:1], Serving: both, Frontends: frontends,
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
	nowhere := func(s *desired.Service) { s.Local = nil }
	circuited := func(s *desired.Service) {
		s.Local = nil
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
			change:    func(s *desired.Service) { s.Cluster, s.Local, s.Serving = nil, nil, nil },
			want:      map[string][]netip.AddrPort{},
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
					got[key.addr.String()] = slices.SortedFunc(maps.Keys(v.reals), netip.AddrPort.Compare)
					if key.protocol != desired.TCP || v.scheduler != "rr" || v.flags != 0 || v.timeout != 0 || !slices.Equal(v.serving, s.Serving) {
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
	tests := map[string]struct {
		config   Config
		protocol desired.Protocol
		affinity time.Duration
		want     settings
	}{
		"defaults":               {protocol: desired.TCP, want: settings{scheduler: "rr"}},
		"a scheduler":            {config: Config{Scheduler: "wlc"}, protocol: desired.SCTP, want: settings{scheduler: "wlc"}},
		"affinity":               {protocol: desired.TCP, affinity: 3 * time.Hour, want: settings{scheduler: "rr", flags: 0x1, timeout: 3 * time.Hour}},
		"one packet":             {config: Config{OnePacket: true}, protocol: desired.UDP, want: settings{scheduler: "rr", flags: 0x4}},
		"one packet, but TCP":    {config: Config{OnePacket: true}, protocol: desired.TCP, want: settings{scheduler: "rr"}},
		"one packet, affinity":   {config: Config{OnePacket: true}, protocol: desired.UDP, affinity: time.Minute, want: settings{scheduler: "rr", flags: 0x5, timeout: time.Minute}},
		"hash of ports, sh":      {config: hashing("sh"), protocol: desired.TCP, want: settings{scheduler: "sh", flags: 0x18}},
		"hash of ports, mh":      {config: hashing("mh"), protocol: desired.TCP, want: settings{scheduler: "mh", flags: 0x18}},
		"hash of ports, but rr":  {config: hashing("rr"), protocol: desired.TCP, want: settings{scheduler: "rr"}},
		"mh with fallback alone": {config: Config{Scheduler: "mh", HashFallback: true}, protocol: desired.TCP, want: settings{scheduler: "mh", flags: 0x8}},
		"sh with port alone":     {config: Config{Scheduler: "sh", HashPort: true}, protocol: desired.TCP, want: settings{scheduler: "sh", flags: 0x10}},
		"tuned": {
			config: Config{HashPort: true, Tune: func(*desired.Service) Tuning {
				return Tuning{Scheduler: "sh"}
			}}, protocol: desired.TCP, want: settings{scheduler: "sh", flags: 0x10},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := test.config.WithDefaults()
			s := plannedService(planned(desired.ClusterIP, "198.51.100.1", 80, desired.ScopeCluster))
			s.Protocol, s.Affinity = test.protocol, test.affinity
			p := planner{config: &config}
			v := p.virtuals(s)[serverKey{test.protocol, netip.MustParseAddrPort("198.51.100.1:80")}]
			if v == nil || v.settings != test.want {
				t.Errorf("virtual server = %+v, want %+v", v, test.want)
			}
		})
	}
}

// TestPoliciesChooseSchedulers, unless Tune does.
func TestPoliciesChooseSchedulers(t *testing.T) {
	t.Parallel()
	hashed := func(*desired.Service) Tuning { return Tuning{Scheduler: "sh", HashPort: true, HashFallback: true} }
	const mh, mhPort = flagHashFallback, flagHashFallback | flagHashPort
	for _, c := range []struct {
		policy          changetracker.Balancing
		config          Config
		equal, weighted settings
	}{
		{changetracker.Random, Config{}, settings{scheduler: "rr"}, settings{scheduler: "wrr"}},
		{changetracker.Random, Config{Scheduler: "lc"}, settings{scheduler: "lc"}, settings{scheduler: "wlc"}},
		{changetracker.Random, Config{Scheduler: "sed"}, settings{scheduler: "sed"}, settings{scheduler: "sed"}},
		{changetracker.SourceHash, Config{HashPort: true}, settings{scheduler: "mh", flags: mh}, settings{scheduler: "mh", flags: mh}},
		{changetracker.SourcePortHash, Config{}, settings{scheduler: "mh", flags: mhPort}, settings{scheduler: "mh", flags: mhPort}},
		{changetracker.LeastConnections, Config{Scheduler: "mh"}, settings{scheduler: "lc"}, settings{scheduler: "wlc"}},
		{changetracker.SourceHash, Config{Tune: func(*desired.Service) Tuning { return Tuning{Scheduler: "rr"} }}, settings{scheduler: "rr"}, settings{scheduler: "rr"}},
		{changetracker.Random, Config{Tune: hashed}, settings{scheduler: "sh", flags: mhPort}, settings{scheduler: "sh", flags: mhPort}},
	} {
		config := c.config.WithDefaults()
		p := planner{config: &config}
		s := plannedService(planned(desired.ClusterIP, "198.51.100.1", 80, desired.ScopeCluster))
		s.Port = &changetracker.ServicePort{Balancing: c.policy}
		if v := p.virtuals(s)[tcpKey("198.51.100.1:80")]; v.settings != c.equal || v.reals[endpointA()] != 1 || v.reals[endpointB()] != 1 {
			t.Errorf("%v: %+v, want %+v and weights 1", c.policy, v, c.equal)
		}
		s.ClusterWeights = slices.Repeat([]uint16{1}, len(s.Cluster))
		s.ClusterWeights[slices.Index(s.Cluster, endpointB())] = 65535
		if v := p.virtuals(s)[tcpKey("198.51.100.1:80")]; v.settings != c.weighted || v.reals[endpointA()] != 1 || v.reals[endpointB()] != 65535 {
			t.Errorf("%v: %+v, want %+v and weights 1 and 65535", c.policy, v, c.weighted)
		}
	}
	config := Config{Tune: func(*desired.Service) Tuning { return Tuning{OnePacket: true} }}.WithDefaults()
	p, s := planner{config: &config}, plannedService(planned(desired.ClusterIP, "198.51.100.1", 80, desired.ScopeCluster))
	s.Protocol = desired.UDP
	if v := p.virtuals(s)[serverKey{desired.UDP, netip.MustParseAddrPort("198.51.100.1:80")}]; v.flags != flagOnePacket {
		t.Errorf("one packet: flags %#x, want %#x", v.flags, flagOnePacket)
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
