package changetracker

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
)

func TestSourceRangesOfTheOtherFamily(t *testing.T) {
	const (
		open = "open"
		shut = "shut"
		some = "some"
	)
	for name, c := range map[string]struct {
		ranges        []string
		loose, strict [2]string // IPv4, IPv6
	}{
		"none":                  {nil, [2]string{open, open}, [2]string{open, open}},
		"blank":                 {[]string{" "}, [2]string{open, open}, [2]string{open, open}},
		"TRK-13 W-07 only IPv4": {[]string{"10.0.0.0/8"}, [2]string{some, open}, [2]string{some, shut}},
		"TRK-13 W-07 only IPv6": {[]string{"fd00::/8"}, [2]string{open, some}, [2]string{shut, some}},
		"W-07 all invalid":      {[]string{"x"}, [2]string{open, open}, [2]string{shut, shut}},
		"TRK-12 a /0":           {[]string{"10.0.0.0/8", "0.0.0.0/0"}, [2]string{open, open}, [2]string{open, shut}},
	} {
		t.Run(name, func(t *testing.T) {
			for strict, want := range map[bool][2]string{false: c.loose, true: c.strict} {
				tracker := mustTracker(t, func(o *Options) { o.StrictSourceRanges = strict })
				tracker.Services.Update(nil, webService(func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = c.ranges }))
				for i, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
					state, _ := peek(t, tracker, family)
					p := mustService(t, state, portName("http", v1.ProtocolTCP))
					got := open
					switch {
					case p.DenyAllSources && len(p.LoadBalancerSourceRanges) == 0:
						got = shut
					case len(p.LoadBalancerSourceRanges) > 0 && !p.DenyAllSources:
						got = some
					}
					if got != want[i] {
						t.Errorf("strict %v, %s: %s, want %s", strict, family, got, want[i])
					}
				}
			}
		})
	}
}

func TestUnrestrictedVIPsAreProblems(t *testing.T) {
	vips := []v1.LoadBalancerIngress{{IP: "203.0.113.1"}, {IP: "2001:db8::1"}}
	for name, c := range map[string]struct {
		ranges []string
		vips   []v1.LoadBalancerIngress
		want   []string
	}{
		"none":             {nil, vips, nil},
		"both":             {[]string{"10.0.0.0/8", "fd00::/8"}, vips, nil},
		"IPv4 only":        {[]string{"10.0.0.0/8"}, vips, []string{"IPv6: "}},
		"IPv6 only":        {[]string{"fd00::/8"}, vips, []string{"IPv4: "}},
		"no VIP of it":     {[]string{"10.0.0.0/8"}, vips[:1], nil},
		"all malformed":    {[]string{"x"}, vips, []string{"IPv4: ", "IPv6: "}},
		"an address":       {[]string{"10.0.0.1", "fd00::1"}, vips, nil},
		"a mapped address": {[]string{"::ffff:10.0.0.1"}, vips[:1], nil},
	} {
		for strict, effect := range map[bool]string{false: "open to everybody", true: "closed to everybody"} {
			tracker := mustTracker(t, func(o *Options) { o.StrictSourceRanges = strict })
			tracker.Services.Update(nil, webService(func(s *v1.Service) {
				s.Spec.LoadBalancerSourceRanges, s.Status.LoadBalancer.Ingress = c.ranges, c.vips
			}))
			var got, want []string
			for _, p := range tracker.Problems() {
				if p.Reason == ReasonNoSourceRange {
					got = append(got, p.Value)
				}
			}
			for _, family := range c.want {
				want = append(want, family+effect)
			}
			if !slices.Equal(got, want) || tracker.ProblemCounts()[ReasonNoSourceRange] != len(want) {
				t.Errorf("%s: problems = %v, want %v", name, got, want)
			}
		}
	}
}

// TRK-18: one rule for VIPs of every kind.
func TestNoVIPIsAnAddressOfTheNodeAlone(t *testing.T) {
	for _, ip := range []string{"127.0.0.1", "127.1.2.3", "::ffff:127.0.0.1", "169.254.169.254", "255.255.255.255", "0.0.0.0", "224.0.0.1", "::1", "fe80::1", "ff02::1", "::"} {
		tracker := mustTracker(t)
		tracker.Services.Update(nil, webService(func(s *v1.Service) {
			s.Spec.ExternalIPs, s.Status.LoadBalancer.Ingress = []string{ip}, []v1.LoadBalancerIngress{{IP: ip}}
		}))
		tracker.Services.Update(nil, webService(func(s *v1.Service) {
			s.Name, s.Spec.IPFamilies, s.Spec.ClusterIP, s.Spec.ClusterIPs = "cluster", nil, ip, []string{ip}
		}))
		for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
			state, _ := peek(t, tracker, family)
			for name, p := range state.All() {
				if name != http || len(p.ExternalIPs)+len(p.LoadBalancerVIPs) > 0 {
					t.Errorf("%s: %v has it: %+v", ip, name, p)
				}
			}
		}
		if n := len(tracker.Problems()); n != 3 {
			t.Errorf("%s: problems %v, want one for each kind", ip, tracker.Problems())
		}
	}
}

// PKT-29: pods keep their addresses, whatever kind of VIP a Service wants.
func TestVIPsInDeniedRangesAreRefused(t *testing.T) {
	tracker := mustTracker(t, func(o *Options) {
		o.DeniedVIPs = []netip.Prefix{netip.MustParsePrefix("10.244.7.9/16"), netip.MustParsePrefix("fd00:244::/32")}
	})
	tracker.Services.Update(nil, webService(func(s *v1.Service) {
		s.Spec.ExternalIPs = []string{"10.244.0.1", "192.0.2.1", "fd00:244::1"}
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "10.244.0.2"}, {IP: "192.0.2.2"}, {IP: "fd00:244::2"}, {IP: "2001:db8::2"}}
	}))
	for family, want := range map[v1.IPFamily]string{v1.IPv4Protocol: "[192.0.2.1] [192.0.2.2]", v1.IPv6Protocol: "[] [2001:db8::2]"} {
		state, _ := peek(t, tracker, family)
		p := mustService(t, state, http)
		if got := fmt.Sprint(p.ExternalIPs, p.LoadBalancerVIPs); got != want {
			t.Errorf("%s: %s, want %s", family, got, want)
		}
	}
	if n := tracker.ProblemCounts()[ReasonRefused]; n != 4 {
		t.Errorf("problems %v, want one for each address of a pod", tracker.Problems())
	}
}

func TestExternalIPsCanBeRefused(t *testing.T) {
	given := []string{"192.0.2.1", "10.244.0.1", "127.0.0.1", "::ffff:127.0.0.1", "169.254.1.1", "2001:db8::1", "::1", "fe80::1"}
	for name, c := range map[string]struct {
		options   ObjectOptions
		four, six string
		refused   int
	}{
		"by default": {ObjectOptions{}, "[10.244.0.1 192.0.2.1]", "[2001:db8::1]", 5},
		"ranges": {
			ObjectOptions{DeniedExternalIPs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("2001:db8::/32")}},
			"[192.0.2.1]", "[]", 7,
		},
		"all": {ObjectOptions{RefuseExternalIPs: true}, "[]", "[]", 8},
	} {
		tracker := mustTracker(t, func(o *Options) { o.ObjectOptions = c.options })
		tracker.Services.Update(nil, webService(func(s *v1.Service) { s.Spec.ExternalIPs, s.Spec.Ports[0].NodePort = given, 30080 }))
		for family, want := range map[v1.IPFamily]string{v1.IPv4Protocol: c.four, v1.IPv6Protocol: c.six} {
			state, _ := peek(t, tracker, family)
			p := mustService(t, state, http)
			if got := fmt.Sprint(p.ExternalIPs); got != want || p.NodePort != 30080 {
				t.Errorf("%s: %s external IPs = %s, want %s beside the node port", name, family, got, want)
			}
		}
		if got := tracker.ProblemCounts()[ReasonRefused]; got != c.refused {
			t.Errorf("%s: %d refused, want %d", name, got, c.refused)
		}
	}
}

// Frontends are ports times addresses: a Service of 1 MB could have a billion.
func TestAServiceHasABoundedNumberOfFrontends(t *testing.T) {
	for ports, want := range map[int]int{1: 2000, 32: 2000, 500: 131, 5000: 13} {
		tracker := mustTracker(t)
		tracker.Services.Update(nil, webService(func(s *v1.Service) {
			first := s.Spec.Ports[0]
			for i := range ports - 1 {
				s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("more-", i), Protocol: v1.ProtocolTCP, Port: first.Port + int32(i) + 1})
			}
			for i := range 2000 {
				address := netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}).String()
				s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, address)
				s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: address})
			}
		}))
		tracker.Services.Update(nil, webService(func(s *v1.Service) { s.Name, s.Spec.ExternalIPs = "small", []string{"192.0.2.1"} }))
		state, _ := peek(t, tracker, v1.IPv4Protocol)
		p := mustService(t, state, http)
		if len(p.ExternalIPs) != want || len(p.LoadBalancerVIPs) != want {
			t.Errorf("%d ports: %d external and %d load balancer IPs, want %d", ports, len(p.ExternalIPs), len(p.LoadBalancerVIPs), want)
		}
		small := http
		small.Name = "small"
		if got := len(mustService(t, state, small).ExternalIPs); got != 1 {
			t.Errorf("%d ports: the other Service has %d external IPs, want 1", ports, got)
		}
		cut := 0
		if want < 2000 {
			cut = 2
		}
		if got := tracker.ProblemCounts()[ReasonTooMany]; got != cut {
			t.Errorf("%d ports: %d problems, want %d: %v", ports, got, cut, tracker.Problems())
		}
	}
}

// TRK-27 and TRK-28 are per family.
func TestExternalAccessIsPerFamily(t *testing.T) {
	four, six := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	for name, c := range map[string]struct {
		port                     ServicePort
		external, cluster, local bool
	}{
		"plain":                   {ServicePort{}, false, true, false},
		"node port":               {ServicePort{NodePort: 1}, true, true, false},
		"external IP":             {ServicePort{ExternalIPs: []netip.Addr{four}}, true, true, false},
		"VIP":                     {ServicePort{LoadBalancerVIPs: []netip.Addr{six}}, true, true, false},
		"eTP local, not external": {ServicePort{ExternalPolicyLocal: true}, false, true, false},
		"eTP local, external":     {ServicePort{ExternalPolicyLocal: true, NodePort: 1}, true, true, true},
		"iTP local":               {ServicePort{InternalPolicyLocal: true}, false, false, true},
		"iTP local, external":     {ServicePort{InternalPolicyLocal: true, NodePort: 1}, true, true, true},
	} {
		p := c.port
		if got := p.ExternallyAccessible(); got != c.external {
			t.Errorf("%s: ExternallyAccessible = %v, want %v", name, got, c.external)
		}
		if got := p.UsesClusterEndpoints(); got != c.cluster {
			t.Errorf("%s: UsesClusterEndpoints = %v, want %v", name, got, c.cluster)
		}
		if got := p.UsesLocalEndpoints(); got != c.local {
			t.Errorf("%s: UsesLocalEndpoints = %v, want %v", name, got, c.local)
		}
	}
}
