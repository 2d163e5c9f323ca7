package changetracker

import (
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

func TestDecorateServiceMayChangeAllButTheIdentity(t *testing.T) {
	for name, c := range map[string]struct {
		hook func(*ServicePort)
		// want edits the undecorated port.
		want func(*ServicePort)
	}{
		"payload": {
			func(p *ServicePort) { p.Ext = 7 }, func(p *ServicePort) { p.Ext = 7 },
		},
		"values become canonical": {
			func(p *ServicePort) {
				p.ExternalIPs = append(p.ExternalIPs, netip.MustParseAddr("::ffff:192.0.2.9"), netip.MustParseAddr("192.0.2.1"))
			},
			func(p *ServicePort) {
				p.ExternalIPs = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.9")}
			},
		},
		"another cluster IP of the family": {
			func(p *ServicePort) { p.ClusterIP = netip.MustParseAddr("10.96.0.77") },
			func(p *ServicePort) { p.ClusterIP = netip.MustParseAddr("10.96.0.77") },
		},
		"no cluster IP, but others": {
			func(p *ServicePort) { p.ClusterIP, p.InternalPolicyLocal = netip.Addr{}, true },
			func(p *ServicePort) { p.ClusterIP = netip.Addr{} },
		},
		"a node port alone": {
			func(p *ServicePort) { p.ClusterIP, p.ExternalIPs, p.NodePort, p.Family = netip.Addr{}, nil, 30080, "" },
			func(p *ServicePort) { p.ClusterIP, p.ExternalIPs, p.NodePort = netip.Addr{}, nil, 30080 },
		},
		"nothing to dial is refused": {func(p *ServicePort) { p.ClusterIP, p.ExternalIPs = netip.Addr{}, nil }, func(*ServicePort) {}},
		"the name comes back": {
			func(p *ServicePort) { p.Name, p.Ext = ServicePortName{}, 7 }, func(p *ServicePort) { p.Ext = 7 },
		},
		"another family is refused": {
			func(p *ServicePort) { p.ClusterIP, p.ExternalIPs, p.Ext = netip.MustParseAddr("fd00::1"), nil, 7 },
			func(*ServicePort) {},
		},
		"an invalid value is refused":              {func(p *ServicePort) { p.Port, p.Ext = 0, 7 }, func(*ServicePort) {}},
		"a panic leaves it undecorated":            {func(p *ServicePort) { p.Port = 9; panic("bug") }, func(*ServicePort) {}},
		"a panic after a change in a list as well": {func(p *ServicePort) { p.ExternalIPs[0] = netip.Addr{}; panic(errTest) }, func(*ServicePort) {}},
	} {
		t.Run(name, func(t *testing.T) {
			s := webService(func(s *v1.Service) {
				s.Spec.IPFamilies = s.Spec.IPFamilies[:1]
				s.Spec.ExternalIPs = []string{"192.0.2.1"}
				s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "other", Port: 1})
			})
			state := func(hook func(*ServicePort, *v1.Service)) *State {
				tracker := mustTracker(t, func(o *Options) { o.DecorateService = hook })
				tracker.Services.Update(nil, s)
				state, _ := peek(t, tracker, v1.IPv4Protocol)
				return state
			}
			want := *mustService(t, state(nil), http)
			c.want(&want)
			got := mustService(t, state(func(p *ServicePort, api *v1.Service) {
				if api != s {
					t.Error("the hook got another Service")
				}
				if p.Name.Port == "http" {
					c.hook(p)
				}
			}), http)
			if !reflect.DeepEqual(*got, want) {
				t.Errorf("service port = %+v, want %+v", *got, want)
			}
		})
	}
}

func TestDecorateEndpointMayChangeAllButTheAddress(t *testing.T) {
	for name, c := range map[string]struct {
		hook func(*Endpoint)
		want func(*Endpoint)
	}{
		"payload": {func(e *Endpoint) { e.Ext = "x" }, func(e *Endpoint) { e.Ext = "x" }},
		"hints become canonical": {
			func(e *Endpoint) { e.ZoneHints = append(e.ZoneHints, "a", "z") },
			func(e *Endpoint) { e.ZoneHints = []string{"a", "z"} },
		},
		"the address comes back": {
			func(e *Endpoint) { e.Addr, e.Zone = netip.AddrPort{}, "x" }, func(e *Endpoint) { e.Zone = "x" },
		},
		"a panic leaves it undecorated": {func(e *Endpoint) { e.Zone = "x"; e.ZoneHints[0] = "x"; panic("bug") }, func(*Endpoint) {}},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustEndpointTracker(t, func(o *Options) {
				o.DecorateEndpoint = func(e *Endpoint, api *discovery.Endpoint, _ *discovery.EndpointSlice) {
					if api.Addresses[0] == "10.0.0.1" {
						c.hook(e)
					}
				}
			})
			hint := func(e *discovery.Endpoint) {
				e.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: "z"}}}
			}
			tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.2", hint), at("10.0.0.1", hint)), false)
			got := endpointsOf(t, tracker, v1.IPv4Protocol, http)
			plain := Endpoint{Addr: addrPort("10.0.0.2:8080"), Ready: true, Serving: true, ZoneHints: []string{"z"}}
			want := []Endpoint{plain, plain}
			want[0].Addr, want[0].ZoneHints = addrPort("10.0.0.1:8080"), []string{"z"}
			c.want(&want[0])
			if !reflect.DeepEqual(got, want) {
				t.Errorf("endpoints = %+v, want %+v", got, want)
			}
		})
	}
}

func TestEqualExtDecidesWhetherAPayloadIsAChange(t *testing.T) {
	type payload struct{ id, generation int }
	for name, c := range map[string]struct {
		first, second any
		equal         func(a, b any) bool
		want          bool
	}{
		"equal with ==":       {1, 1, nil, false},
		"different with ==":   {1, 2, nil, true},
		"another type":        {1, "1", nil, true},
		"nil and something":   {nil, 1, nil, true},
		"cannot be compared":  {[]int{1}, []int{1}, nil, true},
		"hides a slice":       {[1]any{[]int{1}}, [1]any{[]int{1}}, nil, true},
		"EqualExt says equal": {payload{1, 1}, payload{1, 2}, func(a, b any) bool { return a.(payload).id == b.(payload).id }, false},
		"EqualExt says no":    {payload{1, 1}, payload{2, 1}, func(a, b any) bool { return a.(payload).id == b.(payload).id }, true},
		"EqualExt panics":     {1, 1, func(a, _ any) bool { return a.(payload).id == 0 }, true},
	} {
		t.Run(name, func(t *testing.T) {
			ext := c.first
			tracker := mustTracker(t, func(o *Options) {
				o.EqualExt = c.equal
				o.DecorateService = func(p *ServicePort, _ *v1.Service) { p.Ext = ext }
				o.DecorateEndpoint = func(e *Endpoint, _ *discovery.Endpoint, _ *discovery.EndpointSlice) { e.Ext = ext }
			})
			tracker.Services.Update(nil, webService())
			tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), false)
			applyAll(t, tracker, v1.IPv4Protocol)
			ext = c.second
			if got := tracker.Services.Update(nil, webService()); got != c.want {
				t.Errorf("Service changed = %v, want %v", got, c.want)
			}
			if got := tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), false); got != c.want {
				t.Errorf("slice changed = %v, want %v", got, c.want)
			}
			_, delta := applyAll(t, tracker, v1.IPv4Protocol)
			if got := len(delta.Changes) == 1; got != c.want {
				t.Errorf("changes = %v, want one: %v", outline(delta), c.want)
			}
			if c.want && !reflect.DeepEqual(delta.Changes[0].Added[0].Ext, c.second) {
				t.Errorf("payload = %v, want %v", delta.Changes[0].Added[0].Ext, c.second)
			}
		})
	}
}

func TestSelectThatPanicsHasNoSay(t *testing.T) {
	tracker := mustTracker(t, func(o *Options) { o.Select = func(*v1.Service) bool { panic("bug") } })
	if !tracker.Services.Update(nil, webService()) {
		t.Error("changed = false, want true")
	}
}

func TestExtReadsPayloadsOfItsTypeOnly(t *testing.T) {
	if got, ok := Ext[int](7); got != 7 || !ok {
		t.Errorf("Ext[int](7) = %v, %v", got, ok)
	}
	if got, ok := Ext[string](7); got != "" || ok {
		t.Errorf("Ext[string](7) = %v, %v", got, ok)
	}
	if _, ok := Ext[any](nil); ok {
		t.Error("Ext of no payload is ok, want not")
	}
}

func TestEachProblemIsLoggedOnce(t *testing.T) {
	core, logs := observer.New(zapcore.DebugLevel)
	tracker := mustTracker(t, func(o *Options) { o.Logger = zap.New(core) })
	lines := func() (values []string) {
		for _, l := range logs.TakeAll() {
			if l.Level != zapcore.WarnLevel || l.Message != "value set aside" {
				t.Errorf("line = %v %q, want a warning", l.Level, l.Message)
			}
			values = append(values, l.ContextMap()["value"].(string))
		}
		return values
	}
	put := func(addresses ...string) []string {
		s := webSlice("a")
		for _, a := range addresses {
			s.Endpoints = append(s.Endpoints, at(a))
		}
		tracker.Endpoints.EndpointSliceUpdate(s, false)
		return lines()
	}
	for i, step := range []struct{ got, want []string }{
		{put("x", "y"), []string{"x", "y"}},
		{put("x", "y"), nil},
		{put("x", "y", "z"), []string{"z"}},
		{put("10.0.0.1"), nil},
		{put("x"), []string{"x"}},
	} {
		if !slices.Equal(step.got, step.want) {
			t.Errorf("step %d: logged %q, want %q", i, step.got, step.want)
		}
	}
}

// A logger that is slow, or calls the tracker, must not block it.
func TestLogIsWrittenWithoutTheLock(t *testing.T) {
	core, _ := observer.New(zapcore.DebugLevel)
	var tracker *Tracker
	asked := 0
	logger := zap.New(core, zap.Hooks(func(zapcore.Entry) error {
		asked += len(tracker.Problems())
		return nil
	}))
	tracker = mustTracker(t, func(o *Options) { o.Logger = logger })
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("x")), false)
	if asked != 1 {
		t.Errorf("problems seen by the log = %d, want 1", asked)
	}
}

func TestHandBuiltServicePorts(t *testing.T) {
	tracker := mustTracker(t)
	four := ServicePort{
		Name: http, ClusterIP: netip.MustParseAddr("::ffff:10.96.0.10"), Port: 80, NodePort: 30080,
		ExternalIPs:              []netip.Addr{netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.1")},
		LoadBalancerVIPs:         []netip.Addr{netip.MustParseAddr("192.0.2.3"), netip.MustParseAddr("192.0.2.3")},
		LoadBalancerSourceRanges: []netip.Prefix{netip.MustParsePrefix("10.1.2.3/16"), netip.MustParsePrefix("10.1.3.0/24")},
		SessionAffinity:          time.Minute, Ext: "mine",
	}
	six := ServicePort{Name: http, ClusterIP: netip.MustParseAddr("fd00::10"), Port: 80}
	input := []ServicePort{four, six}
	changed, err := tracker.Services.Set(web, input...)
	if err != nil || !changed {
		t.Fatalf("Set = %v, %v, want true", changed, err)
	}
	if input[0].ExternalIPs[0] != netip.MustParseAddr("192.0.2.2") {
		t.Error("Set changed its argument")
	}
	state, _ := applyAll(t, tracker, v1.IPv4Protocol)
	want := "10.96.0.10:80/TCP np=30080 hc=0 ext=[192.0.2.1 192.0.2.2] vip=[192.0.2.3] src=[10.1.0.0/16] deny=false " +
		"aff=1m0s int=false extl=false mine"
	if got := dumpPort(mustService(t, state, http)); got != want {
		t.Errorf("service port = %s, want %s", got, want)
	}
	if changed, err = tracker.Services.Set(web, six, four); changed || err != nil {
		t.Errorf("the same again: Set = %v, %v, want false", changed, err)
	}
	state, _ = applyAll(t, tracker, v1.IPv6Protocol)
	mustService(t, state, http)
	// An API object of the same name takes over, and the other way round.
	if !tracker.Services.Update(nil, webService()) {
		t.Error("Update over Set: changed = false, want true")
	}
	if changed, _ = tracker.Services.Set(web); !changed {
		t.Error("Set without ports: changed = false, want true")
	}
	if tracker.Services.Delete(web) {
		t.Error("Delete of a Service without ports: changed = true, want false")
	}
}

func TestInvalidHandBuiltServicePortsChangeNothing(t *testing.T) {
	valid := ServicePort{Name: http, ClusterIP: netip.MustParseAddr("10.96.0.10"), Port: 80}
	six, prefix := netip.MustParseAddr("fd00::1"), netip.MustParsePrefix("fd00::/64")
	for name, edit := range map[string]func(*ServicePort){
		"another name":          func(p *ServicePort) { p.Name.Name = "api" },
		"no protocol":           func(p *ServicePort) { p.Name.Protocol = "" },
		"no cluster IP":         func(p *ServicePort) { p.ClusterIP = netip.Addr{} },
		"multicast":             func(p *ServicePort) { p.ClusterIP = netip.MustParseAddr("224.0.0.1") },
		"no port":               func(p *ServicePort) { p.Port = 0 },
		"negative affinity":     func(p *ServicePort) { p.SessionAffinity = -1 },
		"foreign external IP":   func(p *ServicePort) { p.ExternalIPs = []netip.Addr{six} },
		"foreign VIP":           func(p *ServicePort) { p.LoadBalancerVIPs = []netip.Addr{six} },
		"foreign range":         func(p *ServicePort) { p.LoadBalancerSourceRanges = []netip.Prefix{prefix} },
		"invalid range":         func(p *ServicePort) { p.LoadBalancerSourceRanges = []netip.Prefix{{}} },
		"invalid external IP":   func(p *ServicePort) { p.ExternalIPs = []netip.Addr{{}} },
		"the same name, though": func(*ServicePort) {},
	} {
		tracker := mustTracker(t)
		p := valid
		edit(&p)
		if changed, err := tracker.Services.Set(web, valid, p); changed || err == nil {
			t.Errorf("%s: Set = %v, %v, want an error", name, changed, err)
		}
		if got, want := sizes(tracker), sizes(mustTracker(t)); got != want {
			t.Errorf("%s: sizes = %s, want %s", name, got, want)
		}
	}
}

func TestHandBuiltEndpointsLiveBesideSlices(t *testing.T) {
	tracker := mustEndpointTracker(t)
	set := func(want bool, endpoints ...Endpoint) {
		t.Helper()
		if changed, err := tracker.Endpoints.Set(http, endpoints...); err != nil || changed != want {
			t.Errorf("Set = %v, %v, want %v", changed, err, want)
		}
	}
	shows := func(want ...string) {
		t.Helper()
		if got := addrs(endpointsOf(t, tracker, v1.IPv4Protocol, http)); !slices.Equal(got, want) {
			t.Errorf("endpoints = %v, want %v", got, want)
		}
	}
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.2")), false)
	own := []Endpoint{
		{Addr: addrPort("[::ffff:10.0.0.1]:8080"), Ready: true},
		{Addr: addrPort("[fd00::1]:8080"), Ready: true, ZoneHints: []string{"b", "a"}},
		{Addr: addrPort("10.0.0.2:8080"), Serving: true}, // not ready: the slice's record counts
	}
	set(true, own...)
	shows("10.0.0.1:8080", "10.0.0.2:8080")
	set(false, own[2], own[1], own[0], own[0])
	if got := endpointsOf(t, tracker, v1.IPv6Protocol, http); len(got) != 1 || !slices.Equal(got[0].ZoneHints, []string{"a", "b"}) {
		t.Errorf("IPv6 endpoints = %v, want one with sorted hints", got)
	}
	if own[1].ZoneHints[0] != "b" {
		t.Error("Set changed its argument")
	}
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a"), true)
	shows("10.0.0.1:8080", "10.0.0.2:8080 notready")
	dns := portName("dns", v1.ProtocolUDP)
	if _, err := tracker.Endpoints.Set(dns, own[0]); err != nil {
		t.Fatal(err)
	}
	set(true)
	set(false)
	shows()
	if got := len(endpointsOf(t, tracker, v1.IPv4Protocol, dns)); got != 1 {
		t.Errorf("endpoints of another port = %d, want 1", got)
	}
	for name, bad := range map[string]Endpoint{
		"no port": {Addr: addrPort("10.0.0.1:0")}, "no address": {}, "a zone": {Addr: addrPort("[fe80::1%eth0]:1")},
		"loopback":        {Addr: addrPort("127.0.0.1:80"), Ready: true},
		"mapped loopback": {Addr: addrPort("[::ffff:127.0.0.1]:80"), Ready: true},
		"link-local":      {Addr: addrPort("[fe80::1]:80"), Ready: true},
		"no condition":    {Addr: addrPort("10.0.0.1:80")},
	} {
		if changed, err := tracker.Endpoints.Set(http, own[0], bad); changed || err == nil {
			t.Errorf("%s: Set = %v, %v, want an error", name, changed, err)
		}
	}
	if _, err := tracker.Endpoints.Set(portName("x", "QUIC"), own[0]); err == nil {
		t.Error("an unknown protocol: want an error")
	}
}

func TestSetBlamesTheValueThatIsWrong(t *testing.T) {
	four, six := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("2001:db8::1")
	for name, c := range map[string]struct {
		port ServicePort
		want string
	}{
		"nothing to dial": {
			ServicePort{Port: 80},
			"no address and no node port: set ClusterIP, ExternalIPs, LoadBalancerVIPs or NodePort",
		},
		"no family":    {ServicePort{Port: 80, NodePort: 30080}, "Family: it is empty and there is no address to derive it from: set IPv4 or IPv6"},
		"no IP family": {ServicePort{Port: 80, NodePort: 30080, Family: "IPX"}, `Family: invalid value "IPX"`},
		"two families and no ClusterIP": {
			ServicePort{Port: 80, ExternalIPs: []netip.Addr{four}, LoadBalancerVIPs: []netip.Addr{six}},
			"ExternalIPs: 203.0.113.1 is not of the family IPv6",
		},
		"another family": {
			ServicePort{Port: 80, ClusterIP: four, ExternalIPs: []netip.Addr{six}},
			"ExternalIPs: 2001:db8::1 is not of the family IPv4",
		},
		"another family than it says": {
			ServicePort{Port: 80, ClusterIP: four, Family: v1.IPv6Protocol},
			"ClusterIP: 203.0.113.1 is not of the family IPv6",
		},
	} {
		c.port.Name = http
		_, err := mustTracker(t).Services.Set(web, c.port)
		if want := "set Service default/web: service port default/web:http: " + c.want; err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
	}
}

func TestDrainingIsKnownAndChangesNothing(t *testing.T) {
	tracker := mustTracker(t)
	node := Node{Name: "here", Zone: "zone-a"}
	applyAll(t, tracker, v1.IPv4Protocol)
	node.Draining = "tainted"
	if tracker.SetNode(node) {
		t.Error("changed = true for Draining alone, want false")
	}
	state, delta := applyAll(t, tracker, v1.IPv4Protocol)
	if state.Node().Draining != "tainted" || delta.Full {
		t.Errorf("Draining = %q, Full = %v, want tainted and false", state.Node().Draining, delta.Full)
	}
}
