package changetracker

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

func TestApplyOfAnUntrackedFamilyIsAnError(t *testing.T) {
	tracker := mustTracker(t, func(o *Options) { o.Families = []v1.IPFamily{v1.IPv6Protocol} })
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, "", "IPv9"} {
		err := tracker.Apply(family, func(Delta) ([]ServicePortName, error) { panic("called") })
		if !errors.Is(err, ErrUnknownFamily) {
			t.Errorf("Apply(%q) = %v, want %v", family, err, ErrUnknownFamily)
		}
		if got := tracker.PendingSince(family); !got.IsZero() {
			t.Errorf("PendingSince(%q) = %v, want zero", family, got)
		}
	}
}

func TestEmptyTrackerAppliesAnEmptyFullDelta(t *testing.T) { // EPS-35
	state, delta := applyAll(t, mustTracker(t), v1.IPv4Protocol)
	if !delta.Full || len(delta.Changes) != 0 || state.Len() != 0 || state.Family() != v1.IPv4Protocol {
		t.Errorf("state, delta = %v, %+v, want nothing, Full", dump(state), delta)
	}
	if got := state.Node(); got.Name != "here" || got.Zone != "zone-a" {
		t.Errorf("node = %+v, want the one given to New", got)
	}
}

func TestNothingIsConsumedByAFailure(t *testing.T) {
	tracker := mustTracker(t)
	tracker.Services.Update(nil, webService())
	for range 3 {
		_, delta := peek(t, tracker, v1.IPv4Protocol)
		wantOutline(t, delta, "default/web:http ->10.96.0.10:80/TCP")
		if !delta.Full {
			t.Error("Full = false before anything succeeded, want true")
		}
	}
	applyAll(t, tracker, v1.IPv4Protocol)
	tracker.Services.Update(nil, webService(func(s *v1.Service) { s.Spec.Ports[0].Port = 81 }))
	peek(t, tracker, v1.IPv4Protocol)
	tracker.Services.Update(nil, webService(func(s *v1.Service) { s.Spec.Ports[0].Port = 82 }))
	_, delta := applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/web:http 10.96.0.10:80/TCP>10.96.0.10:82/TCP") // TRK-41
	if delta.Full {
		t.Error("Full = true after a failure that followed a success, want false")
	}
	_, delta = applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta)
}

func TestFamiliesAreConsumedIndependently(t *testing.T) {
	tracker := mustTracker(t)
	tracker.Services.Update(nil, webService())
	applyAll(t, tracker, v1.IPv4Protocol)
	_, delta := peek(t, tracker, v1.IPv6Protocol)
	wantOutline(t, delta, "default/web:http ->[fd00::10]:80/TCP")
	if !tracker.PendingSince(v1.IPv4Protocol).IsZero() || tracker.PendingSince(v1.IPv6Protocol).IsZero() {
		t.Error("the success of one family consumed the other")
	}
}

func TestPanicInApplyConsumesNothingAndLocksNothing(t *testing.T) {
	tracker := mustTracker(t)
	tracker.Services.Update(nil, webService())
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed")
			}
		}()
		_ = tracker.Apply(v1.IPv4Protocol, func(Delta) ([]ServicePortName, error) { panic("bug") })
	}()
	_, delta := applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/web:http ->10.96.0.10:80/TCP")
}

// named makes a Service of each name with one port.
func named(t *testing.T, tracker *Tracker, port int32, names ...string) {
	t.Helper()
	for i, name := range names {
		tracker.Services.Update(nil, webService(func(s *v1.Service) {
			s.Name, s.Spec.Ports[0].Port = name, port
			s.Spec.ClusterIPs[0] = fmt.Sprintf("10.96.1.%d", i+1)
		}))
	}
}

func TestWhatFailedStaysPending(t *testing.T) {
	b := ServicePortName{http.NamespacedName, "http", v1.ProtocolTCP}
	b.Name = "b"
	unknown := b
	unknown.Name = "unknown"
	tracker := mustTracker(t)
	named(t, tracker, 80, "a", "b", "c")
	applyAll(t, tracker, v1.IPv4Protocol)
	named(t, tracker, 81, "a", "b", "c")
	err := tracker.Apply(v1.IPv4Protocol, func(delta Delta) ([]ServicePortName, error) {
		if len(delta.Changes) != 3 {
			t.Errorf("changes = %v, want 3", outline(delta))
		}
		if p, _ := delta.After.Service(b); p.Port != 81 {
			t.Errorf("port in After = %d, want the newest, 81", p.Port)
		}
		return []ServicePortName{b, unknown, b}, nil
	})
	if err != nil {
		t.Errorf("Apply = %v, want fn's error, which is none", err)
	}
	named(t, tracker, 82, "a", "b")
	_ = tracker.Apply(v1.IPv4Protocol, func(delta Delta) ([]ServicePortName, error) {
		for name, want := range map[string]int{"a": 81, "b": 80, "c": 81} {
			port := b
			port.Name = name
			if p, _ := delta.Before.Service(port); int(p.Port) != want {
				t.Errorf("port of %s in Before = %d, want what was applied, %d", name, p.Port, want)
			}
		}
		return nil, errTest
	})
	_, delta := applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta,
		"default/a:http 10.96.1.1:81/TCP>10.96.1.1:82/TCP",
		"default/b:http 10.96.1.2:80/TCP>10.96.1.2:82/TCP")
	_, delta = applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta)
}

func TestOnePortOfAServiceFails(t *testing.T) {
	tracker := mustTracker(t)
	both := func(s *v1.Service) {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "dns", Protocol: "UDP", Port: 53})
	}
	s := webSlice("a", at("10.0.0.1"))
	s.Ports = append(s.Ports, endpointPort("dns", v1.ProtocolUDP, 53))
	tracker.Services.Update(nil, webService(both))
	tracker.Endpoints.EndpointSliceUpdate(s, false)
	dns := portName("dns", v1.ProtocolUDP)
	fail := func(name ServicePortName) {
		_ = tracker.Apply(v1.IPv4Protocol, func(Delta) ([]ServicePortName, error) {
			return []ServicePortName{name}, nil
		})
	}
	fail(dns)
	state, delta := peek(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/web:dns ->10.96.0.10:53/UDP +10.0.0.1:53")
	if delta.Full {
		t.Error("Full = true after a partial success, want false")
	}
	if state.Len() != 2 {
		t.Errorf("Len = %d, want 2", state.Len())
	}
	tracker.Services.Delete(web)
	tracker.Endpoints.EndpointSliceUpdate(s, true)
	fail(http) // the deletion of the other service port
	_, delta = applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/web:http 10.96.0.10:80/TCP>- -10.0.0.1:8080")
	applyAll(t, tracker, v1.IPv6Protocol)
	if got, want := sizes(tracker), sizes(mustTracker(t)); got != want {
		t.Errorf("sizes = %s, want %s", got, want)
	}
}

func TestAnErrorConsumesNothing(t *testing.T) {
	tracker := mustTracker(t)
	named(t, tracker, 80, "a", "b")
	for _, failed := range [][]ServicePortName{nil, {http}} { // an error wins
		err := tracker.Apply(v1.IPv4Protocol, func(Delta) ([]ServicePortName, error) { return failed, errTest })
		if !errors.Is(err, errTest) {
			t.Errorf("Apply = %v, want fn's error", err)
		}
		_, delta := peek(t, tracker, v1.IPv4Protocol)
		if len(delta.Changes) != 2 || !delta.Full {
			t.Errorf("changes = %v, Full %v, want all of them", outline(delta), delta.Full)
		}
	}
}

func TestEventsDuringApplyWaitForTheNextOne(t *testing.T) {
	tracker := mustTracker(t)
	named(t, tracker, 80, "a")
	err := tracker.Apply(v1.IPv4Protocol, func(d Delta) ([]ServicePortName, error) {
		s := d.After
		was := dump(s)
		named(t, tracker, 81, "a", "b")
		tracker.SetNode(Node{Name: "elsewhere"})
		if dump(s) != was {
			t.Error("the State changed while it was applied")
		}
		wantOutline(t, d, "default/a:http ->10.96.1.1:80/TCP")
		return nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if tracker.PendingSince(v1.IPv4Protocol).IsZero() {
		t.Error("PendingSince is zero, want the time of the events during Apply")
	}
	state, delta := applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/a:http 10.96.1.1:80/TCP>10.96.1.1:81/TCP", "default/b:http ->10.96.1.2:81/TCP")
	if !delta.Full || state.Node().Name != "elsewhere" {
		t.Errorf("Full, node = %v, %q, want those of the new node", delta.Full, state.Node().Name)
	}
}

func TestPendingSinceIsTheOldestUnappliedChange(t *testing.T) {
	c := newClock()
	tracker := mustTracker(t, c.option)
	since := func(what string, want time.Time) {
		t.Helper()
		if got := tracker.PendingSince(v1.IPv4Protocol); !got.Equal(want) {
			t.Errorf("%s: PendingSince = %v, want %v", what, got, want)
		}
	}
	since("at the start", time.Time{})
	first := c.tick()
	named(t, tracker, 80, "a")
	since("one change", first)
	second := c.tick()
	named(t, tracker, 80, "a", "b")
	since("another one", first)
	peek(t, tracker, v1.IPv4Protocol)
	since("after a failure", first)
	err := tracker.Apply(v1.IPv4Protocol, func(d Delta) ([]ServicePortName, error) {
		c.tick()
		named(t, tracker, 80, "a", "b", "c")
		return []ServicePortName{d.Changes[1].Name}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	since("b failed", second)
	applyAll(t, tracker, v1.IPv4Protocol)
	since("all applied", time.Time{})
	c.tick()
	named(t, tracker, 80, "a", "b", "c")
	since("nothing new", time.Time{})
	node := c.tick()
	tracker.SetNode(Node{Name: "elsewhere"})
	since("the node", node)
	c.tick()
	named(t, tracker, 81, "a")
	peek(t, tracker, v1.IPv4Protocol)
	since("the node, and a failure", node)
	applyAll(t, tracker, v1.IPv4Protocol)
	since("all applied again", time.Time{})
	c.tick()
	named(t, tracker, 82, "a")
	named(t, tracker, 81, "a")
	peek(t, tracker, v1.IPv4Protocol)
	since("a change that another one undid", time.Time{})
	during := c.tick()
	_ = tracker.Apply(v1.IPv4Protocol, func(Delta) ([]ServicePortName, error) {
		tracker.SetNode(Node{Name: "again elsewhere"})
		return nil, nil
	})
	since("the node during Apply", during)
	peek(t, tracker, v1.IPv4Protocol)
	since("the node during Apply, and a failure", during)
}

func TestSetNodeMakesTheNextDeltaFull(t *testing.T) {
	base := func() Node {
		return Node{
			Name: "here", Zone: "zone-a",
			Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")},
			PodCIDRs:  []netip.Prefix{netip.MustParsePrefix("10.1.0.0/24")},
		}
	}
	for name, c := range map[string]struct {
		edit func(*Node)
		want bool
	}{
		"same":           {func(*Node) {}, false},
		"unmasked CIDR":  {func(n *Node) { n.PodCIDRs[0] = netip.MustParsePrefix("10.1.0.7/24") }, false},
		"mapped address": {func(n *Node) { n.Addresses[0] = netip.MustParseAddr("::ffff:192.0.2.1") }, false},
		"invalid extras": {func(n *Node) {
			n.Addresses, n.PodCIDRs = append(n.Addresses, netip.Addr{}), append(n.PodCIDRs, netip.Prefix{})
		}, false},
		"name":      {func(n *Node) { n.Name = "there" }, true},
		"zone":      {func(n *Node) { n.Zone = "zone-b" }, true},
		"addresses": {func(n *Node) { n.Addresses = n.Addresses[:1] }, true},
		"primary":   {func(n *Node) { slices.Reverse(n.Addresses) }, true},
		"CIDRs":     {func(n *Node) { n.PodCIDRs = nil }, true},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t, func(o *Options) { o.Node = base() })
			for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
				applyAll(t, tracker, family)
			}
			n := base()
			c.edit(&n)
			if got := tracker.SetNode(n); got != c.want {
				t.Errorf("changed = %v, want %v", got, c.want)
			}
			for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
				peek(t, tracker, family)
				_, delta := applyAll(t, tracker, family)
				if delta.Full != c.want {
					t.Errorf("%s: Full = %v, want %v", family, delta.Full, c.want)
				}
				if _, delta = applyAll(t, tracker, family); delta.Full {
					t.Errorf("%s: Full again after a success", family)
				}
			}
		})
	}
}

// A new name of the node makes the next Delta Full, but changes no endpoint.
func TestNewNodeNameMovesWhatIsLocal(t *testing.T) { // EPS-16
	tracker := mustEndpointTracker(t)
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1", onNode("here")), at("10.0.0.2", onNode("there")),
		at("10.0.0.3")), false)
	tracker.Endpoints.EndpointSliceUpdate(webSlice("b", at("10.0.0.4")), false)
	if _, err := tracker.Endpoints.Set(http, Endpoint{Addr: addrPort("10.0.0.9:1"), Ready: true, Node: "there"},
		Endpoint{Addr: addrPort("10.0.0.8:1"), Ready: true}); err != nil {
		t.Fatal(err)
	}
	applyAll(t, tracker, v1.IPv4Protocol)
	for _, c := range []struct {
		node Node
		want []string
	}{
		{Node{Name: "here"}, []string{"10.0.0.1:8080"}},
		{Node{Name: "there"}, []string{"10.0.0.2:8080", "10.0.0.9:1"}},
		{Node{}, nil},
		{Node{Name: "elsewhere", Zone: "z"}, nil},
	} {
		changed := tracker.SetNode(c.node)
		state, delta := applyAll(t, tracker, v1.IPv4Protocol)
		if delta.Full != changed || len(delta.Changes) > 0 {
			t.Errorf("node %q: delta = %+v, want it full and without changes", c.node.Name, delta)
		}
		view := state.For(state.Node())
		local := slices.DeleteFunc(slices.Clone(state.Endpoints(http)), func(e Endpoint) bool { return !view.Local(&e) })
		if got := addrs(local); !slices.Equal(got, c.want) || view.LocalReady(web) != len(c.want) {
			t.Errorf("node %q: local endpoints = %v, LocalReady = %d, want %v", c.node.Name, got, view.LocalReady(web), c.want)
		}
		if view.Node().Zone != c.node.Zone || view.State() != state {
			t.Errorf("zone = %q, want %q", view.Node().Zone, c.node.Zone)
		}
	}
}

// annotated gives a slice a trigger time.
func annotated(s *discovery.EndpointSlice, when time.Time) *discovery.EndpointSlice {
	s.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: when.Format(time.RFC3339Nano)}
	return s
}

func triggersOf(d Delta) map[string][]string {
	all := map[string][]string{}
	for _, c := range d.Changes {
		for _, at := range c.Triggers {
			all[c.Name.String()] = append(all[c.Name.String()], at.UTC().Format("05.000"))
		}
	}
	return all
}

func wantTriggers(t *testing.T, d Delta, want string) {
	t.Helper()
	if got := fmt.Sprint(triggersOf(d)); got != "map["+want+"]" {
		t.Errorf("triggers = %s, want map[%s]", got, want)
	}
}

func TestTriggerTimes(t *testing.T) {
	c := newClock()
	start := c.now()
	second := func(n int) time.Time { return start.Add(time.Duration(n) * time.Second) }
	setup := func(t *testing.T) *Tracker {
		t.Helper()
		tracker := mustTracker(t, func(o *Options) { o.Now = func() time.Time { return start } })
		tracker.Services.Update(nil, webService(func(s *v1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "alt", Protocol: v1.ProtocolTCP, Port: 81})
		}))
		tracker.Services.Update(nil, webService(func(s *v1.Service) { s.Name = "api" }))
		applyAll(t, tracker, v1.IPv4Protocol)
		return tracker
	}
	put := func(tr *Tracker, name string, when time.Time, addresses ...string) {
		s := annotated(webSlice(name), when)
		s.Ports = append(s.Ports, endpointPort("alt", v1.ProtocolTCP, 8081))
		for _, a := range addresses {
			s.Endpoints = append(s.Endpoints, at(a))
		}
		tr.Endpoints.EndpointSliceUpdate(s, false)
	}
	for name, c := range map[string]struct {
		steps func(*testing.T, *Tracker)
		want  string
	}{
		"EPS-50 EPS-52 in order of arrival, on the first changed port": {func(_ *testing.T, tr *Tracker) {
			put(tr, "a", second(5), "10.0.0.1")
			put(tr, "a", second(3), "10.0.0.1", "10.0.0.2")
		}, "default/web:alt:[05.000 03.000]"},
		"EPS-50 not of an update that is no change": {func(_ *testing.T, tr *Tracker) {
			put(tr, "a", second(1), "10.0.0.1")
			put(tr, "a", second(2), "10.0.0.1")
		}, "default/web:alt:[01.000]"},
		"EPS-50 not of an update that makes no difference": {func(_ *testing.T, tr *Tracker) {
			put(tr, "a", second(1), "10.0.0.1")
			tr.Endpoints.EndpointSliceUpdate(
				annotated(webSlice("b", at("10.0.0.1", conditions(false, false, false))), second(2)), false)
		}, "default/web:alt:[01.000]"},
		"EPS-50 unparsable": {func(_ *testing.T, tr *Tracker) {
			s := webSlice("a", at("10.0.0.1"))
			s.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: "noon"}
			tr.Endpoints.EndpointSliceUpdate(s, false)
		}, ""},
		"EPS-51 not after the start": {func(_ *testing.T, tr *Tracker) {
			put(tr, "a", start, "10.0.0.1")
			put(tr, "a", second(-9), "10.0.0.2")
		}, ""},
		"one time, two slices": {func(_ *testing.T, tr *Tracker) {
			put(tr, "a", second(1), "10.0.0.1")
			put(tr, "b", second(1), "10.0.0.2")
		}, "default/web:alt:[01.000]"},
		"W-10 removing a slice discards its own times only": {func(_ *testing.T, tr *Tracker) {
			put(tr, "a", second(1), "10.0.0.1")
			put(tr, "b", second(2), "10.0.0.2")
			tr.Endpoints.EndpointSliceUpdate(webSlice("a"), true)
		}, "default/web:alt:[02.000]"},
		"W-02 moving a slice discards what it brought to its former Service": {func(_ *testing.T, tr *Tracker) {
			put(tr, "a", second(1), "10.0.0.1")
			put(tr, "b", second(2), "10.0.0.2")
			moved := annotated(webSlice("a", at("10.0.0.1")), second(3))
			moved.Labels[discovery.LabelServiceName] = "api"
			tr.Endpoints.EndpointSliceUpdate(moved, false)
		}, "default/api:http:[03.000] default/web:alt:[02.000]"},
		"a slice that went empty counts": {func(t *testing.T, tr *Tracker) {
			t.Helper()
			put(tr, "a", second(1), "10.0.0.1")
			applyAll(t, tr, v1.IPv4Protocol)
			put(tr, "a", second(2))
		}, "default/web:alt:[02.000]"},
		"a slice that went empty and away does not": {func(t *testing.T, tr *Tracker) {
			t.Helper()
			put(tr, "a", second(1), "10.0.0.1")
			applyAll(t, tr, v1.IPv4Protocol)
			put(tr, "a", second(2))
			tr.Endpoints.EndpointSliceUpdate(webSlice("a"), true)
		}, ""},
		"EPS-53 W-11 a failure keeps them": {func(t *testing.T, tr *Tracker) {
			t.Helper()
			put(tr, "a", second(1), "10.0.0.1")
			peek(t, tr, v1.IPv4Protocol)
			put(tr, "a", second(2), "10.0.0.2")
		}, "default/web:alt:[01.000 02.000]"},
		"a change that cancelled out drops them": {func(t *testing.T, tr *Tracker) {
			t.Helper()
			put(tr, "a", second(1), "10.0.0.1")
			put(tr, "a", second(2))
			peek(t, tr, v1.IPv4Protocol)
			put(tr, "a", second(3), "10.0.0.1")
		}, "default/web:alt:[03.000]"},
		"a partial failure of another port consumes them": {func(_ *testing.T, tr *Tracker) {
			put(tr, "a", second(1), "10.0.0.1")
			_ = tr.Apply(v1.IPv4Protocol, func(Delta) ([]ServicePortName, error) {
				return []ServicePortName{http}, nil
			})
		}, ""},
		"a partial failure of the port that carries them does not": {func(_ *testing.T, tr *Tracker) {
			put(tr, "a", second(1), "10.0.0.1")
			_ = tr.Apply(v1.IPv4Protocol, func(d Delta) ([]ServicePortName, error) {
				put(tr, "a", second(2), "10.0.0.1", "10.0.0.2")
				return []ServicePortName{d.Changes[0].Name}, nil
			})
		}, "default/web:alt:[01.000 02.000]"},
		"those that come during Apply wait": {func(_ *testing.T, tr *Tracker) {
			put(tr, "a", second(1), "10.0.0.1")
			_ = tr.Apply(v1.IPv4Protocol, func(Delta) ([]ServicePortName, error) {
				put(tr, "a", second(2), "10.0.0.1", "10.0.0.2")
				return nil, nil
			})
		}, "default/web:alt:[02.000]"},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := setup(t)
			c.steps(t, tracker)
			_, delta := applyAll(t, tracker, v1.IPv4Protocol)
			wantTriggers(t, delta, c.want)
			if _, delta = applyAll(t, tracker, v1.IPv4Protocol); len(triggersOf(delta)) != 0 {
				t.Errorf("triggers = %v after a success, want none", triggersOf(delta))
			}
			if n := len(tracker.store.families[ipv4].triggers); n != 0 {
				t.Errorf("triggers held = %d, want 0", n)
			}
		})
	}
	t.Run("they are bounded while nothing succeeds", func(t *testing.T) {
		tracker := setup(t)
		for i := range 3 * maxTriggers {
			put(tracker, "a", second(i+1), fmt.Sprintf("10.0.0.%d", i%200+1))
		}
		if n := len(tracker.store.families[ipv4].triggers[web]); n != maxTriggers {
			t.Errorf("triggers held = %d, want %d", n, maxTriggers)
		}
	})
}

func TestOptionsErrorNamesEveryFault(t *testing.T) {
	_, err := New(Options{Families: []v1.IPFamily{"IPv4", "IPX", "IPv4", ""}, Node: Node{
		Addresses: []netip.Addr{{}, netip.IPv4Unspecified(), netip.MustParseAddr("fe80::1%eth0")},
		PodCIDRs:  []netip.Prefix{{}},
	}, ObjectOptions: ObjectOptions{ServiceProxyName: "not a label!", AwaitSources: []string{"west", "", "west"}}})
	if !errors.Is(err, ErrInvalidOptions) {
		t.Fatalf("New = %v, want %v", err, ErrInvalidOptions)
	}
	for _, field := range []string{
		`Families[1]: "IPX"`, `Families[2]: "IPv4" is listed twice`, `Families[3]: ""`, `ServiceProxyName: "not a label!"`,
		"Node.Addresses[0]", "Node.Addresses[1]", "Node.Addresses[2]", "Node.PodCIDRs[0]",
		`AwaitSources[1]: ""`, `AwaitSources[2]: "west"`,
	} {
		if !strings.Contains(err.Error(), field) {
			t.Errorf("the error does not name %s:\n%v", field, err)
		}
	}
	if _, err := NewServiceChangeTracker(Options{Families: []v1.IPFamily{"x"}}); !errors.Is(err, ErrInvalidOptions) {
		t.Errorf("NewServiceChangeTracker = %v, want %v", err, ErrInvalidOptions)
	}
	if _, err := NewEndpointChangeTracker(Options{Families: []v1.IPFamily{"x"}}); !errors.Is(err, ErrInvalidOptions) {
		t.Errorf("NewEndpointChangeTracker = %v, want %v", err, ErrInvalidOptions)
	}
}

func TestTrackersWorkAlone(t *testing.T) {
	services, err := NewServiceChangeTracker(Options{})
	if err != nil {
		t.Fatal(err)
	}
	services.Update(nil, webService())
	endpoints, err := NewEndpointChangeTracker(Options{})
	if err != nil {
		t.Fatal(err)
	}
	endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), false)
	for want, apply := range map[string]func(v1.IPFamily, func(Delta) ([]ServicePortName, error)) error{
		"default/web:http ->10.96.0.10:80/TCP": services.Apply,
		"default/web:http ->- +10.0.0.1:8080":  endpoints.Apply,
	} {
		err := apply(v1.IPv4Protocol, func(d Delta) ([]ServicePortName, error) {
			wantOutline(t, d, want)
			return nil, nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}
