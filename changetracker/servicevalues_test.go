package changetracker

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

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

// W-09 and TRK-46: a difference without effect is no change.
func TestRepresentationIsNoChange(t *testing.T) {
	plain := func(s *v1.Service) {
		s.Spec.ExternalIPs = []string{"192.0.2.1", "192.0.2.2"}
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "dns", Protocol: v1.ProtocolUDP, Port: 53})
	}
	for name, edit := range map[string]func(*v1.Service){
		"order of external IPs":     func(s *v1.Service) { slices.Reverse(s.Spec.ExternalIPs) },
		"duplicate external IP":     func(s *v1.Service) { s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, "192.0.2.1") },
		"no ranges, or everybody":   func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"0.0.0.0/0", "::/0"} },
		"a /0 and another range":    func(s *v1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8", "0.0.0.0/0", "::/0"} },
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
