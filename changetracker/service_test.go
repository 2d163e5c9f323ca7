package changetracker

import (
	"fmt"
	"math"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// families are the cluster IPs under which a Service is proxied, "" for not.
func clusterIPs(t *testing.T, tracker *Tracker) (texts [2]string) {
	t.Helper()
	for i, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		state, _ := peek(t, tracker, family)
		for _, p := range state.All() {
			texts[i] = p.ClusterIP.String()
		}
	}
	return texts
}

func TestClusterIPDecidesWhetherAServiceIsProxied(t *testing.T) {
	both := []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}
	for name, c := range map[string]struct {
		clusterIP  string
		clusterIPs []string
		families   []v1.IPFamily
		kind       v1.ServiceType
		want       [2]string
		reason     Reason
	}{
		"TRK-01 empty": {clusterIPs: []string{"10.0.0.1"}, families: both},
		"TRK-01 None, though clusterIPs is filled": {
			clusterIP: "None", clusterIPs: []string{"10.0.0.1"}, families: both,
		},
		"TRK-02 ExternalName with a cluster IP": {clusterIP: "10.0.0.1", kind: v1.ServiceTypeExternalName},
		"TRK-10 no families, IPv4":              {clusterIP: "10.0.0.1", want: [2]string{"10.0.0.1", ""}},
		"TRK-10 no families, IPv6":              {clusterIP: "fd00::1", want: [2]string{"", "fd00::1"}},
		"TRK-10 no families, clusterIPs do not matter": {
			clusterIP: "10.0.0.1", clusterIPs: []string{"10.0.0.9", "fd00::9"}, want: [2]string{"10.0.0.1", ""},
		},
		"TRK-10 dual stack": {
			clusterIP: "10.0.0.1", clusterIPs: []string{"10.0.0.1", "fd00::1"}, families: both,
			want: [2]string{"10.0.0.1", "fd00::1"},
		},
		"TRK-10 dual stack, IPv6 first": {
			clusterIP: "fd00::1", clusterIPs: []string{"fd00::1", "10.0.0.1"},
			families: []v1.IPFamily{v1.IPv6Protocol, v1.IPv4Protocol}, want: [2]string{"10.0.0.1", "fd00::1"},
		},
		"TRK-10 first matching family counts": {
			clusterIP: "10.0.0.1", clusterIPs: []string{"10.0.0.1", "10.0.0.2"},
			families: []v1.IPFamily{v1.IPv4Protocol, v1.IPv4Protocol}, want: [2]string{"10.0.0.1", ""},
		},
		"TRK-03 second family without an address is ignored for that family": {
			clusterIP: "10.0.0.1", clusterIPs: []string{"10.0.0.1"}, families: both,
			want: [2]string{"10.0.0.1", ""}, reason: ReasonMissing,
		},
		"W-01 garbage is not proxied": {clusterIP: "ten", reason: ReasonInvalidAddress},
		"W-01 garbage in one family leaves the other": {
			clusterIP: "10.0.0.1", clusterIPs: []string{"10.0.0.1", "fd00::xyz"}, families: both,
			want: [2]string{"10.0.0.1", ""}, reason: ReasonInvalidAddress,
		},
		"W-01 wrong family": {
			clusterIP: "10.0.0.1", clusterIPs: []string{"10.0.0.1", "10.0.0.2"}, families: both,
			want: [2]string{"10.0.0.1", ""}, reason: ReasonWrongFamily,
		},
		"TRK-15 leading zeros":               {clusterIP: "010.000.000.001", want: [2]string{"10.0.0.1", ""}},
		"mapped IPv6 is IPv4":                {clusterIP: "::ffff:10.0.0.1", want: [2]string{"10.0.0.1", ""}},
		"a zone is no part of a cluster IP":  {clusterIP: "fe80::1%eth0", reason: ReasonInvalidAddress},
		"the unspecified address is no VIP":  {clusterIP: "0.0.0.0", reason: ReasonInvalidAddress},
		"a multicast address is no VIP":      {clusterIP: "ff02::1", reason: ReasonInvalidAddress},
		"an unknown family among the others": {clusterIP: "10.0.0.1", clusterIPs: []string{"x"}, families: []v1.IPFamily{"IPv9"}},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t)
			tracker.Services.Update(nil, webService(func(s *v1.Service) {
				s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.IPFamilies = c.clusterIP, c.clusterIPs, c.families
				if c.kind != "" {
					s.Spec.Type = c.kind
				}
			}))
			if got := clusterIPs(t, tracker); got != c.want {
				t.Errorf("cluster IPs = %q, want %q", got, c.want)
			}
			wantReasons(t, tracker, c.reason)
		})
	}
}

// wantReasons checks the reasons of all problems, in order; "" counts for none.
func wantReasons(tb testing.TB, tracker *Tracker, want ...Reason) {
	tb.Helper()
	var got []Reason
	for _, p := range tracker.Problems() {
		got = append(got, p.Reason)
	}
	want = slices.DeleteFunc(want, func(r Reason) bool { return r == "" })
	if !slices.Equal(got, want) {
		tb.Errorf("problems = %v, want %v", tracker.Problems(), want)
	}
	total := 0
	for reason, n := range tracker.ProblemCounts() {
		if total += n; !slices.Contains(got, reason) {
			tb.Errorf("ProblemCounts has %q, which is the reason of no problem", reason)
		}
	}
	if total != len(got) {
		tb.Errorf("ProblemCounts = %v, want %d in all", tracker.ProblemCounts(), len(got))
	}
}

func TestUntrackedFamilyIsNobodysProblem(t *testing.T) {
	tracker := mustTracker(t, func(o *Options) { o.Families = []v1.IPFamily{v1.IPv4Protocol} })
	changed := tracker.Services.Update(nil, webService(func(s *v1.Service) { s.Spec.ClusterIPs[1] = "garbage" }))
	if !changed {
		t.Error("changed = false, want true")
	}
	wantReasons(t, tracker)
	if tracker.Services.Update(nil, webService(func(s *v1.Service) {
		s.Name, s.Spec.ClusterIP, s.Spec.IPFamilies, s.Spec.Ports = "six", "fd00::1", nil, nil
	})) {
		t.Error("changed = true for a Service of a family that is not tracked, want false")
	}
	wantReasons(t, tracker)
}

func TestServiceValuesAreCanonicalPerFamily(t *testing.T) {
	proxy, vip := v1.LoadBalancerIPModeProxy, v1.LoadBalancerIPModeVIP
	tracker := mustTracker(t)
	tracker.Services.Update(nil, webService(func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeClusterIP // TRK-17: the type gates nothing
		s.Spec.ExternalIPs = []string{
			"192.0.2.9", "2001:db8::9", " ", "", "192.0.2.1", "192.0.2.9", "192.000.002.010", " 192.0.2.11",
			"bad", "0.0.0.0", "224.0.0.1", "127.0.0.7", "::ffff:192.0.2.1",
		}
		s.Spec.LoadBalancerSourceRanges = []string{
			" 10.1.2.3/16 ", "10.0.0.0/8", "2001:db8::/32", "192.168.0.0/16", "", "192.168.001.000/24", "nonsense",
			"::ffff:198.51.100.0/120",
		}
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{
			{IP: "203.0.113.2"},
			{IP: "203.0.113.1", IPMode: &vip},
			{IP: "203.0.113.3", IPMode: &proxy},
			{Hostname: "lb.example"},
			{IP: "2001:db8::1"},
			{IP: "garbage"},
		}
		s.Spec.Ports[0].NodePort = 30080
	}))
	four, _ := peek(t, tracker, v1.IPv4Protocol)
	six, _ := peek(t, tracker, v1.IPv6Protocol)
	name := portName("http", v1.ProtocolTCP)
	for what, c := range map[string]struct{ got, want any }{
		"TRK-11 external IPs":      {mustService(t, four, name).ExternalIPs, "[192.0.2.1 192.0.2.9 192.0.2.10 192.0.2.11]"},
		"TRK-11 external IPs of 6": {mustService(t, six, name).ExternalIPs, "[2001:db8::9]"},
		"TRK-12 source ranges":     {mustService(t, four, name).LoadBalancerSourceRanges, "[10.0.0.0/8 192.168.0.0/16 198.51.100.0/24]"},
		"TRK-12 source ranges 6":   {mustService(t, six, name).LoadBalancerSourceRanges, "[2001:db8::/32]"},
		"TRK-14 VIPs":              {mustService(t, four, name).LoadBalancerVIPs, "[203.0.113.1 203.0.113.2]"},
		"TRK-14 VIPs of 6":         {mustService(t, six, name).LoadBalancerVIPs, "[2001:db8::1]"},
		"TRK-17 node port":         {mustService(t, four, name).NodePort, "30080"},
		"TRK-22 string":            {mustService(t, four, name), "10.96.0.10:80/TCP"},
		"W-37 string of 6":         {mustService(t, six, name), "[fd00::10]:80/TCP"},
		"SPN string":               {name, "default/web:http"},
	} {
		if got := fmt.Sprint(c.got); got != c.want {
			t.Errorf("%s = %s, want %s", what, got, c.want)
		}
	}
	wantReasons(t, tracker, ReasonInvalidAddress, ReasonRefused, ReasonInvalidAddress, ReasonInvalidAddress, ReasonInvalidCIDR,
		ReasonInvalidAddress)
	if got, want := tracker.Problems()[0].Field, "spec.externalIPs[10]"; got != want {
		t.Errorf("field = %q, want %q", got, want)
	}
}

// W-09 and TRK-46: what behaves alike is not a change.
func TestRepresentationIsNoChange(t *testing.T) {
	plain := func(s *v1.Service) {
		s.Spec.ExternalIPs = []string{"192.0.2.1", "192.0.2.2"}
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "dns", Protocol: v1.ProtocolUDP, Port: 53})
	}
	for name, edit := range map[string]func(*v1.Service){
		"order of external IPs":     func(s *v1.Service) { slices.Reverse(s.Spec.ExternalIPs) },
		"duplicate external IP":     func(s *v1.Service) { s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, "192.0.2.1") },
		"no ranges, or everybody":   func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"0.0.0.0/0", "::/0"} },
		"everybody and somebody":    func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8", "0.0.0.0/0", "::/0"} },
		"order of ports":            func(s *v1.Service) { slices.Reverse(s.Spec.Ports) },
		"TRK-06 labels":             func(s *v1.Service) { s.Labels = map[string]string{"a": "b"} },
		"TRK-06 annotations":        func(s *v1.Service) { s.Annotations = map[string]string{"a": "b"} },
		"TRK-06 selector":           func(s *v1.Service) { s.Spec.Selector = map[string]string{"a": "b"} },
		"TRK-06 targetPort":         func(s *v1.Service) { s.Spec.Ports[0].TargetPort = intstr.FromInt32(99) },
		"TRK-06 appProtocol":        func(s *v1.Service) { s.Spec.Ports[0].AppProtocol = new("h2c") },
		"TRK-06 loadBalancerClass":  func(s *v1.Service) { s.Spec.LoadBalancerClass = new("x") },
		"TRK-06 loadBalancerIP":     func(s *v1.Service) { s.Spec.LoadBalancerIP = "192.0.2.77" },
		"TRK-06 allocate":           func(s *v1.Service) { s.Spec.AllocateLoadBalancerNodePorts = new(true) },
		"TRK-06 publishNotReady":    func(s *v1.Service) { s.Spec.PublishNotReadyAddresses = true },
		"TRK-06 distribution":       func(s *v1.Service) { s.Spec.TrafficDistribution = new("PreferClose") },
		"TRK-06 ipFamilyPolicy":     func(s *v1.Service) { s.Spec.IPFamilyPolicy = new(v1.IPFamilyPolicyPreferDualStack) },
		"resource version":          func(s *v1.Service) { s.ResourceVersion = "77" },
		"protocol default":          func(s *v1.Service) { s.Spec.Ports[0].Protocol = "" },
		"wrong-family extra values": func(s *v1.Service) { s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, "") },
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t)
			if !tracker.Services.Update(nil, webService(plain)) {
				t.Fatal("changed = false for a new Service")
			}
			applyAll(t, tracker, v1.IPv4Protocol)
			if tracker.Services.Update(nil, webService(plain, edit)) {
				t.Error("changed = true, want false")
			}
			_, delta := applyAll(t, tracker, v1.IPv4Protocol)
			wantOutline(t, delta)
		})
	}
}

func TestEveryOtherFieldIsAChange(t *testing.T) {
	local := v1.ServiceInternalTrafficPolicyLocal
	for name, edit := range map[string]func(*v1.Service){
		"cluster IP":   func(s *v1.Service) { s.Spec.ClusterIPs[0] = "10.96.0.11" },
		"port":         func(s *v1.Service) { s.Spec.Ports[0].Port = 81 },
		"node port":    func(s *v1.Service) { s.Spec.Ports[0].NodePort = 30000 },
		"port name":    func(s *v1.Service) { s.Spec.Ports[0].Name = "web" },
		"protocol":     func(s *v1.Service) { s.Spec.Ports[0].Protocol = v1.ProtocolSCTP },
		"external IP":  func(s *v1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.1"} },
		"source range": func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8"} },
		"VIP": func(s *v1.Service) {
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "192.0.2.1"}}
		},
		"affinity": func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP },
		"internal": func(s *v1.Service) { s.Spec.InternalTrafficPolicy = &local },
		"external": func(s *v1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy = v1.ServiceTypeNodePort, v1.ServiceExternalTrafficPolicyLocal
		},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t)
			tracker.Services.Update(nil, webService())
			applyAll(t, tracker, v1.IPv4Protocol)
			if !tracker.Services.Update(nil, webService(edit)) {
				t.Error("changed = false, want true")
			}
			if _, delta := applyAll(t, tracker, v1.IPv4Protocol); len(delta.Changes) == 0 {
				t.Error("the Delta is empty")
			}
		})
	}
}

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

func TestExternalIPsCanBeRefused(t *testing.T) {
	given := []string{"192.0.2.1", "10.244.0.1", "127.0.0.1", "::ffff:127.0.0.1", "169.254.1.1", "2001:db8::1", "::1", "fe80::1"}
	for name, c := range map[string]struct {
		policy    ExternalIPPolicy
		four, six string
		refused   int
	}{
		"by default": {ExternalIPPolicy{}, "[10.244.0.1 192.0.2.1]", "[2001:db8::1]", 5},
		"ranges": {
			ExternalIPPolicy{Denied: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("2001:db8::/32")}},
			"[192.0.2.1]", "[]", 7,
		},
		"all": {ExternalIPPolicy{Refuse: true}, "[]", "[]", 8},
	} {
		tracker := mustTracker(t, func(o *Options) { o.ExternalIPs = c.policy })
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

func TestAffinityTimeout(t *testing.T) {
	config := func(seconds *int32) *v1.SessionAffinityConfig {
		return &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: seconds}}
	}
	for name, c := range map[string]struct {
		affinity v1.ServiceAffinity
		config   *v1.SessionAffinityConfig
		want     time.Duration
	}{
		"TRK-23 given":               {v1.ServiceAffinityClientIP, config(new(int32(100))), 100 * time.Second},
		"TRK-23 None ignores config": {v1.ServiceAffinityNone, config(new(int32(100))), 0},
		"W-01 nil config":            {v1.ServiceAffinityClientIP, nil, 3 * time.Hour},
		"W-01 nil client IP":         {v1.ServiceAffinityClientIP, &v1.SessionAffinityConfig{}, 3 * time.Hour},
		"W-01 nil timeout":           {v1.ServiceAffinityClientIP, config(nil), 3 * time.Hour},
		"zero":                       {v1.ServiceAffinityClientIP, config(new(int32(0))), 3 * time.Hour},
		"negative":                   {v1.ServiceAffinityClientIP, config(new(int32(-5))), 3 * time.Hour},
		"longer than the API allows": {v1.ServiceAffinityClientIP, config(new(int32(90000))), 25 * time.Hour},
		"garbage":                    {"Cookie", config(new(int32(100))), 0},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t)
			tracker.Services.Update(nil, webService(func(s *v1.Service) {
				s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = c.affinity, c.config
			}))
			state, _ := peek(t, tracker, v1.IPv4Protocol)
			if got := mustService(t, state, portName("http", v1.ProtocolTCP)).SessionAffinity; got != c.want {
				t.Errorf("affinity = %v, want %v", got, c.want)
			}
		})
	}
}

func TestTrafficPoliciesAndHealthCheckNodePort(t *testing.T) {
	lb, np, cip := v1.ServiceTypeLoadBalancer, v1.ServiceTypeNodePort, v1.ServiceTypeClusterIP
	for name, c := range map[string]struct {
		kind       v1.ServiceType
		external   v1.ServiceExternalTrafficPolicy
		externalIP string
		health     int32
		wantLocal  bool
		wantHealth uint16
		reason     Reason
	}{
		"TRK-24 load balancer":                         {kind: lb, external: "Local", health: 31000, wantLocal: true, wantHealth: 31000},
		"TRK-24 node port, TRK-26 no health port":      {kind: np, external: "Local", health: 31000, wantLocal: true},
		"TRK-24 cluster IP without external IP":        {kind: cip, external: "Local"},
		"TRK-24 cluster IP with external IP":           {kind: cip, external: "Local", externalIP: "192.0.2.1", wantLocal: true},
		"TRK-24 external IP of the other family":       {kind: cip, external: "Local", externalIP: "2001:db8::1", wantLocal: true},
		"TRK-24 no type is ClusterIP":                  {external: "Local", externalIP: "192.0.2.1", wantLocal: true},
		"TRK-24 policy Cluster":                        {kind: lb, external: "Cluster", health: 31000},
		"TRK-26 load balancer without health port":     {kind: lb, external: "Local", wantLocal: true, reason: ReasonMissing},
		"TRK-26 load balancer with a wrong one":        {kind: lb, external: "Local", health: 70000, wantLocal: true, reason: ReasonInvalidPort},
		"an unknown type accepts nothing from outside": {kind: "Fancy", external: "Local", externalIP: "192.0.2.1"},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t)
			tracker.Services.Update(nil, webService(func(s *v1.Service) {
				s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = c.kind, c.external, c.health
				if c.externalIP != "" {
					s.Spec.ExternalIPs = []string{c.externalIP}
				}
			}))
			state, _ := peek(t, tracker, v1.IPv4Protocol)
			p := mustService(t, state, portName("http", v1.ProtocolTCP))
			if p.ExternalPolicyLocal != c.wantLocal || p.HealthCheckNodePort != c.wantHealth {
				t.Errorf("local, health port = %v, %d, want %v, %d", p.ExternalPolicyLocal, p.HealthCheckNodePort,
					c.wantLocal, c.wantHealth)
			}
			want := map[types.NamespacedName]uint16{}
			if c.wantHealth != 0 {
				want[web] = c.wantHealth
			}
			if got := state.HealthCheckNodePorts(); !reflect.DeepEqual(got, want) {
				t.Errorf("TRK-53 health check node ports = %v, want %v", got, want)
			}
			wantReasons(t, tracker, c.reason)
		})
	}
}

func TestInternalPolicyLocal(t *testing.T) { // TRK-25
	local, cluster := v1.ServiceInternalTrafficPolicyLocal, v1.ServiceInternalTrafficPolicyCluster
	for policy, want := range map[*v1.ServiceInternalTrafficPolicy]bool{nil: false, &cluster: false, &local: true} {
		tracker := mustTracker(t)
		tracker.Services.Update(nil, webService(func(s *v1.Service) { s.Spec.InternalTrafficPolicy = policy }))
		state, _ := peek(t, tracker, v1.IPv4Protocol)
		if got := mustService(t, state, portName("http", v1.ProtocolTCP)).InternalPolicyLocal; got != want {
			t.Errorf("internal policy local = %v, want %v", got, want)
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

func TestBadPortsAreSetAsideOneByOne(t *testing.T) {
	for name, c := range map[string]struct {
		ports  []v1.ServicePort
		want   []string
		reason []Reason
	}{
		"TRK-20 same name, two protocols": {
			ports: []v1.ServicePort{{Name: "dns", Protocol: "TCP", Port: 53}, {Name: "dns", Protocol: "UDP", Port: 53}},
			want:  []string{"default/web:dns TCP 53", "default/web:dns UDP 53"},
		},
		"same number, two names": {
			ports: []v1.ServicePort{{Name: "a", Protocol: "TCP", Port: 53}, {Name: "b", Protocol: "TCP", Port: 53}},
			want:  []string{"default/web:a TCP 53", "default/web:b TCP 53"},
		},
		"TRK-45 no ports": {reason: []Reason{ReasonNoPorts}},
		"port out of range": {
			ports: []v1.ServicePort{
				{Name: "a", Port: 0},
				{Name: "b", Port: 65536},
				{Name: "c", Port: -1},
				{Name: "d", Port: math.MaxInt32},
				{Name: "e", Port: 65535},
			},
			want:   []string{"default/web:e TCP 65535"},
			reason: []Reason{ReasonInvalidPort, ReasonInvalidPort, ReasonInvalidPort, ReasonInvalidPort},
		},
		"node port out of range": {
			ports:  []v1.ServicePort{{Port: 80, NodePort: 65536 + 80}},
			want:   []string{"default/web TCP 80"},
			reason: []Reason{ReasonInvalidPort},
		},
		"W-01 unknown protocol": {
			ports:  []v1.ServicePort{{Name: "a", Protocol: "QUIC", Port: 1}, {Name: "b", Protocol: "SCTP", Port: 2}},
			want:   []string{"default/web:b SCTP 2"},
			reason: []Reason{ReasonInvalidProtocol},
		},
		"duplicate name: the first counts": {
			ports:  []v1.ServicePort{{Name: "a", Port: 1}, {Name: "a", Protocol: "TCP", Port: 2}},
			want:   []string{"default/web:a TCP 1"},
			reason: []Reason{ReasonDuplicate},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t)
			tracker.Services.Update(nil, webService(func(s *v1.Service) { s.Spec.Ports = c.ports }))
			state, _ := peek(t, tracker, v1.IPv4Protocol)
			var got []string
			for _, name := range state.ServicePorts(web) {
				p := mustService(t, state, name)
				got = append(got, fmt.Sprintf("%v %s %d", name, name.Protocol, p.Port))
				if p.NodePort != 0 {
					t.Errorf("node port = %d, want 0", p.NodePort)
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("service ports = %q, want %q", got, c.want)
			}
			if state.Len() != len(c.want) {
				t.Errorf("Len = %d, want %d", state.Len(), len(c.want))
			}
			wantReasons(t, tracker, c.reason...)
		})
	}
}

func TestLabelAndSelectDecideWhoseServiceItIs(t *testing.T) {
	label := func(value string) func(*v1.Service) {
		return func(s *v1.Service) { s.Labels = map[string]string{LabelServiceProxyName: value} }
	}
	for name, c := range map[string]struct {
		proxyName string
		edit      func(*v1.Service)
		want      bool
	}{
		"no label, none wanted":           {"", func(*v1.Service) {}, true},
		"TRK-04 label, none wanted":       {"", label("other"), false},
		"TRK-04 empty label, none wanted": {"", label(""), false},
		"no label, one wanted":            {"mine", func(*v1.Service) {}, false},
		"the label that is wanted":        {"mine", label("mine"), true},
		"another label than wanted":       {"mine", label("other"), false},
		"turned away by Select":           {"", func(s *v1.Service) { s.Namespace = "skip" }, false},
		"TRK-05 the headless label does not count": {
			"", func(s *v1.Service) { s.Labels = map[string]string{v1.IsHeadlessService: ""} }, true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t, func(o *Options) {
				o.ServiceProxyName = c.proxyName
				o.Select = func(s *v1.Service) bool { return s.Namespace != "skip" }
			})
			if got := tracker.Services.Update(nil, webService(c.edit)); got != c.want {
				t.Errorf("changed = %v, want %v", got, c.want)
			}
		})
	}
}

// TRK-08: whatever makes a Service not ours is a delete, and the reverse an add.
func TestIgnoredServiceCountsAsDeleted(t *testing.T) {
	for name, edit := range map[string]func(*v1.Service){
		"headless":     func(s *v1.Service) { s.Spec.ClusterIP = v1.ClusterIPNone },
		"ExternalName": func(s *v1.Service) { s.Spec.Type = v1.ServiceTypeExternalName },
		"label":        func(s *v1.Service) { s.Labels = map[string]string{LabelServiceProxyName: "x"} },
		"no ports":     func(s *v1.Service) { s.Spec.Ports = nil },
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t)
			tracker.Services.Update(nil, webService())
			applyAll(t, tracker, v1.IPv4Protocol)
			if !tracker.Services.Update(webService(), webService(edit)) {
				t.Error("changed = false, want true")
			}
			state, delta := applyAll(t, tracker, v1.IPv4Protocol)
			wantOutline(t, delta, "default/web:http 10.96.0.10:80/TCP>-")
			if state.Len() != 0 {
				t.Errorf("Len = %d, want 0", state.Len())
			}
			tracker.Services.Update(webService(edit), webService())
			_, delta = applyAll(t, tracker, v1.IPv4Protocol)
			wantOutline(t, delta, "default/web:http ->10.96.0.10:80/TCP")
		})
	}
}

func TestUpdateNeedsAName(t *testing.T) { // TRK-40
	tracker := mustTracker(t)
	if tracker.Services.Update(nil, nil) {
		t.Error("Update(nil, nil) = true, want false")
	}
	tracker.Services.Update(nil, webService())
	other := webService(func(s *v1.Service) { s.Name = "other" })
	if tracker.Services.Update(other, nil) {
		t.Error("deleting an unknown Service = true, want false")
	}
	if !tracker.Services.Update(webService(), nil) {
		t.Error("deleting a Service = false, want true")
	}
}

// TRK-44 is mended (W-03): a relist that brings no old version leaves no port
// behind, and identical content is no change.
func TestReplayWithoutOldVersionLeaksNoPort(t *testing.T) {
	tracker := mustTracker(t)
	two := func(s *v1.Service) {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "old", Protocol: "TCP", Port: 81})
	}
	tracker.Services.Update(nil, webService(two))
	applyAll(t, tracker, v1.IPv4Protocol)
	if tracker.Services.Update(nil, webService(two)) {
		t.Error("changed = true for an identical relist, want false")
	}
	tracker.Services.Update(nil, webService())
	state, delta := applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/web:old 10.96.0.10:81/TCP>-")
	if state.Len() != 1 {
		t.Errorf("Len = %d, want 1", state.Len())
	}
}

func TestOnlyChangedPortsAreInTheDelta(t *testing.T) { // TRK-51, TRK-52
	tracker := mustTracker(t)
	ports := func(numbers ...int32) func(*v1.Service) {
		return func(s *v1.Service) {
			s.Spec.Ports = nil
			for i, n := range numbers {
				if n != 0 {
					s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprintf("p%d", i), Port: n})
				}
			}
		}
	}
	tracker.Services.Update(nil, webService(ports(80, 81, 82)))
	applyAll(t, tracker, v1.IPv4Protocol)
	tracker.Services.Update(nil, webService(ports(80, 91, 0, 83)))
	_, delta := applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta,
		"default/web:p1 10.96.0.10:81/TCP>10.96.0.10:91/TCP",
		"default/web:p2 10.96.0.10:82/TCP>-",
		"default/web:p3 ->10.96.0.10:83/TCP")
}

func TestServicesAreNeitherChangedNorKept(t *testing.T) { // EPS-22
	tracker := mustTracker(t)
	s := webService(func(s *v1.Service) {
		s.Spec.ExternalIPs = []string{"192.0.2.2", "192.0.2.1"}
		s.Spec.LoadBalancerSourceRanges = []string{" 10.0.0.0/8", "10.0.0.0/9"}
	})
	before := s.DeepCopy()
	tracker.Services.Update(nil, s)
	if !reflect.DeepEqual(s, before) {
		t.Errorf("the Service was changed to %v", s)
	}
	state, _ := applyAll(t, tracker, v1.IPv4Protocol)
	was := dump(state)
	s.Spec.ExternalIPs[0], s.Spec.Ports[0].Port = "192.0.2.77", 99
	if got := dump(state); got != was {
		t.Errorf("the State follows the object:\n%s\nwant\n%s", got, was)
	}
}

func TestProblemsFollowTheirObject(t *testing.T) {
	tracker := mustTracker(t)
	long := strings.Repeat("é", 40) // 80 bytes
	bad := webService(func(s *v1.Service) { s.Spec.ExternalIPs = []string{"ok\xffno", long} })
	tracker.Services.Update(nil, bad)
	want := []Problem{
		{Object: "Service default/web", Field: "spec.externalIPs[0]", Value: "ok?no", Reason: ReasonInvalidAddress},
		{Object: "Service default/web", Field: "spec.externalIPs[1]", Value: strings.Repeat("é", 32), Reason: ReasonInvalidAddress},
	}
	if got := tracker.Problems(); !slices.Equal(got, want) {
		t.Errorf("problems = %q, want %q", got, want)
	}
	tracker.Services.Update(bad, webService(func(s *v1.Service) { s.Spec.ExternalIPs = []string{"x"} }))
	wantReasons(t, tracker, ReasonInvalidAddress)
	tracker.Services.Update(bad, nil)
	wantReasons(t, tracker)
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("x"), at("10.0.0.1")), false)
	tracker.Services.Update(nil, &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "z", Name: "a"}, Spec: v1.ServiceSpec{ClusterIP: "x"},
	})
	if got, want := len(tracker.Problems()), 2; got != want {
		t.Errorf("problems = %v, want %d", tracker.Problems(), want)
	}
	if got := tracker.Problems()[0].Object; got != "EndpointSlice default/a" {
		t.Errorf("first object = %q, want the slice", got)
	}
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a"), true)
	wantReasons(t, tracker, ReasonInvalidAddress)
}
