package changetracker

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
)

func prefixesOf(texts ...string) (all []netip.Prefix) {
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

func TestDeniedSources(t *testing.T) {
	for name, c := range map[string]struct{ ranges, denied, left []netip.Prefix }{
		"nothing":             {prefixesOf("10.0.0.0/8"), nil, prefixesOf("10.0.0.0/8")},
		"another range":       {prefixesOf("10.0.0.0/8"), prefixesOf("11.0.0.0/8"), prefixesOf("10.0.0.0/8")},
		"one address":         {prefixesOf("10.0.0.0/30"), prefixesOf("10.0.0.2/32"), prefixesOf("10.0.0.0/31", "10.0.0.3/32")},
		"of all":              {nil, prefixesOf("128.0.0.0/1"), prefixesOf("0.0.0.0/1")},
		"more than all":       {prefixesOf("10.0.0.0/8"), prefixesOf("10.0.0.0/7"), nil},
		"everything":          {nil, prefixesOf("0.0.0.0/0"), nil},
		"all in parts":        {nil, prefixesOf("0.0.0.0/1", "128.0.0.0/1"), nil},
		"a range in a denied": {prefixesOf("10.1.0.0/16", "10.2.0.0/16"), prefixesOf("10.1.0.0/16", "10.1.1.0/24"), prefixesOf("10.2.0.0/16")},
		"as IPv6":             {nil, prefixesOf("::ffff:128.0.0.0/97"), prefixesOf("0.0.0.0/1")},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t)
			setPort(t, tracker, "ns/1", 1, func(p *ServicePort) {
				p.LoadBalancerVIPs = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
				p.LoadBalancerSourceRanges, p.DeniedSources = c.ranges, c.denied
			})
			delta, _ := applyPart(t, tracker, Part{})
			got := delta.Changes[0].After
			if !slices.Equal(got.LoadBalancerSourceRanges, c.left) || got.DenyAllSources != (c.left == nil) {
				t.Errorf("ranges %v, denies all: %v; want %v", got.LoadBalancerSourceRanges, got.DenyAllSources, c.left)
			}
			again := got.clone()
			if err := again.canonicalise(1); err != nil || !again.Equal(got) {
				t.Errorf("canonicalise again = %v, and makes %v", err, again.LoadBalancerSourceRanges)
			}
		})
	}
}

// TestWhatIsClosedStaysClosed: nothing that is denied, any number of load balancer IPs and ports, and being made canonical
// again open no service port.
func TestWhatIsClosedStaysClosed(t *testing.T) {
	for _, denied := range [][]netip.Prefix{nil, prefixesOf("10.0.0.0/8"), prefixesOf("0.0.0.0/0")} {
		for _, vips := range []int{0, 1, 181, 182, 8000} {
			for _, ports := range []int{1, 100, 40_000} {
				p := ServicePort{Family: v1.IPv4Protocol, DenyAllSources: denied == nil, DeniedSources: slices.Clone(denied)}
				for i := range vips {
					p.LoadBalancerVIPs = append(p.LoadBalancerVIPs, vipOf(1+i))
				}
				p.denySources(ports)
				closed := p.DenyAllSources
				if p.denySources(ports); p.DenyAllSources != closed || !closed && (denied == nil || denied[0].Bits() == 0 || vips > 181) {
					t.Errorf("%v denied, %d load balancer IPs, %d ports: closed %v, and then %v", denied, vips, ports, closed, p.DenyAllSources)
				}
			}
		}
	}
}

// TestAnAddressIsAdmittedOrDenied: for random ranges, a source is admitted exactly if a source range has it and no denied one.
func TestAnAddressIsAdmittedOrDenied(t *testing.T) {
	has := func(ranges []netip.Prefix, a netip.Addr) bool {
		return slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for seed := range uint64(500) {
		r := rand.New(rand.NewPCG(seed, 47))
		draw := func(n int) (all []netip.Prefix) {
			for range r.IntN(n) {
				all = append(all, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(r.IntN(3)), byte(r.IntN(4)), byte(r.IntN(256))}), 9+r.IntN(24)).Masked())
			}
			return all
		}
		ranges, denied := draw(4), draw(6)
		p := ServicePort{Name: ServicePortName{Protocol: v1.ProtocolTCP}, Port: 80, LoadBalancerVIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
		p.LoadBalancerSourceRanges, p.DeniedSources = slices.Clone(ranges), slices.Clone(denied)
		if err := p.canonicalise(1); err != nil {
			t.Fatal(err)
		}
		for range 200 {
			a := netip.AddrFrom4([4]byte{10, byte(r.IntN(4)), byte(r.IntN(5)), byte(r.IntN(256))})
			want := (len(ranges) == 0 || has(ranges, a)) && !has(denied, a)
			open := len(p.LoadBalancerSourceRanges) == 0 && !p.DenyAllSources
			if got := open || has(p.LoadBalancerSourceRanges, a); got != want {
				t.Fatalf("seed %d: %v without %v is %v: source %v is admitted: %v", seed, ranges, denied, p.LoadBalancerSourceRanges, a, got)
			}
		}
	}
}

// TestDeniedSourcesAreBounded: a Service with more ranges than it may have admits nobody.
func TestDeniedSourcesAreBounded(t *testing.T) {
	port := func(n, vips int) *ServicePort {
		p := &ServicePort{Family: v1.IPv6Protocol}
		for i := range vips {
			p.LoadBalancerVIPs = append(p.LoadBalancerVIPs, netip.MustParseAddr(fmt.Sprintf("2001:db8::%x", 1+i)))
		}
		for i := range n {
			p.DeniedSources = append(p.DeniedSources, netip.MustParsePrefix(fmt.Sprintf("%x:%x::1/128", 0x2000+i%0x1000, i%0xffff)))
		}
		return p
	}
	for _, c := range []struct {
		n, vips, ports int
		closed         bool
	}{{200, 1, 1, false}, {300, 1, 1, true}, {200, 2, 1, true}, {200, 1, 2, true}, {100, 2, 1, false}, {100_000, 1, 1, true}, {1, 8000, 1, true}, {1, 1, 20_000, true}, {30, 1, 20_000, true}, {0, 1, 1, false}} {
		p := port(c.n, c.vips)
		p.denySources(c.ports)
		if n := len(p.LoadBalancerSourceRanges); p.DenyAllSources != c.closed || (n+c.vips)*c.vips*c.ports > maxSources && !c.closed || len(p.DeniedSources)*c.ports > maxSources {
			t.Errorf("%+v: %d ranges, closed %v", c, n, p.DenyAllSources)
		}
	}
}
