package changetracker

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// An Apply follows each step; want are its endpoints.
func TestOverride(t *testing.T) {
	one, two := addrPort("10.0.0.1:8080"), addrPort("10.0.0.2:8080")
	const change = "default/web:http 10.96.0.10:80/TCP>10.96.0.10:80/TCP"
	type step struct {
		do   func(*Tracker) (changed bool)
		want string // of the Delta, without its beginning; empty for no change
	}
	override := func(addr netip.AddrPort, o Override) func(*Tracker) bool {
		return func(tracker *Tracker) bool { return tracker.Override(http, addr, o) }
	}
	slice := func(s *discovery.EndpointSlice) func(*Tracker) bool {
		return func(tracker *Tracker) bool { return tracker.Endpoints.EndpointSliceUpdate(s, false) }
	}
	eject := Override{Eject: true}
	ejectOne := step{override(one, eject), " -10.0.0.1:8080 +10.0.0.1:8080 ejected"}
	ending := at("10.0.0.2", conditions(false, true, true))
	const twoEnds = " -10.0.0.2:8080 +10.0.0.2:8080 notready terminating serving=true"
	for name, steps := range map[string][]step{
		"eject, and restore exactly": {
			ejectOne,
			{override(one, eject), ""},
			{override(one, Override{}), " -10.0.0.1:8080 ejected +10.0.0.1:8080"},
			{override(one, Override{}), ""},
		},
		"weight": {
			{override(one, Override{Scale: 5}), " -10.0.0.1:8080 +10.0.0.1:8080 weight=5"},
			{override(one, Override{Scale: 1}), " -10.0.0.1:8080 weight=5 +10.0.0.1:8080"},
		},
		"several owners": {
			{override(one, Override{By: "a", Scale: 5}), " -10.0.0.1:8080 +10.0.0.1:8080 weight=5"},
			{override(one, Override{By: "b", Scale: 2}), " -10.0.0.1:8080 weight=5 +10.0.0.1:8080 weight=10"},
			{override(one, Override{By: "c", Eject: true}), " -10.0.0.1:8080 weight=10 +10.0.0.1:8080 ejected weight=10"},
			{override(one, Override{By: "b"}), " -10.0.0.1:8080 ejected weight=10 +10.0.0.1:8080 ejected weight=5"},
			{override(one, Override{By: "b"}), ""},
			{override(one, Override{By: "a"}), " -10.0.0.1:8080 ejected weight=5 +10.0.0.1:8080 ejected"},
			{override(one, Override{By: "c"}), " -10.0.0.1:8080 ejected +10.0.0.1:8080"},
		},
		"weights that do not fit": {
			{override(one, Override{By: "a", Scale: 50000}), " -10.0.0.1:8080 +10.0.0.1:8080 weight=50000"},
			{override(two, Override{By: "b", Scale: 20}), " -10.0.0.2:8080 +10.0.0.2:8080 weight=20"},
			{override(one, Override{By: "b", Scale: 50}), " -10.0.0.1:8080 weight=50000 -10.0.0.2:8080 weight=20 +10.0.0.1:8080 weight=65535 +10.0.0.2:8080"},
			{override(one, Override{By: "a"}), " -10.0.0.1:8080 weight=65535 -10.0.0.2:8080 +10.0.0.1:8080 weight=50 +10.0.0.2:8080 weight=20"},
			{override(one, Override{By: "b"}), " -10.0.0.1:8080 weight=50 +10.0.0.1:8080"},
			{override(two, Override{By: "b"}), " -10.0.0.2:8080 weight=20 +10.0.0.2:8080"},
		},
		"when all are ejected, none is": {
			ejectOne,
			{override(two, eject), " -10.0.0.1:8080 ejected +10.0.0.1:8080"},
			{slice(webSlice("b", at("10.0.0.3"))), " -10.0.0.1:8080 -10.0.0.2:8080 +10.0.0.1:8080 ejected +10.0.0.2:8080 ejected +10.0.0.3:8080"},
			{slice(webSlice("b")), " -10.0.0.1:8080 ejected -10.0.0.2:8080 ejected -10.0.0.3:8080 +10.0.0.1:8080 +10.0.0.2:8080"},
		},
		"no ejection brings connections back to one that terminates": {
			{slice(webSlice("a", at("10.0.0.1"), ending)), twoEnds},
			{override(one, eject), ""},
			{slice(webSlice("a", at("10.0.0.1"), at("10.0.0.2"))), " -10.0.0.1:8080 -10.0.0.2:8080 notready terminating serving=true +10.0.0.1:8080 ejected +10.0.0.2:8080"},
			{slice(webSlice("a", at("10.0.0.1"), ending)), " -10.0.0.1:8080 ejected -10.0.0.2:8080 +10.0.0.1:8080 +10.0.0.2:8080 notready terminating serving=true"},
		},
		"of two that serve while they terminate, one may be ejected": {
			{slice(webSlice("a", at("10.0.0.1", conditions(false, true, true)), ending)), " -10.0.0.1:8080 -10.0.0.2:8080 +10.0.0.1:8080 notready terminating serving=true +10.0.0.2:8080 notready terminating serving=true"},
			{override(one, eject), " -10.0.0.1:8080 notready terminating serving=true +10.0.0.1:8080 ejected terminating serving=false"},
			{override(two, eject), " -10.0.0.1:8080 ejected terminating serving=false +10.0.0.1:8080 notready terminating serving=true"},
		},
		"it survives a move to another slice": {
			ejectOne,
			{func(tracker *Tracker) bool {
				slice(webSlice("a", at("10.0.0.2")))(tracker)
				return slice(webSlice("b", at("10.0.0.1")))(tracker)
			}, ""},
			{slice(webSlice("b", at("10.0.0.1", onNode("here")))), " -10.0.0.1:8080 ejected +10.0.0.1:8080 ejected"},
		},
		"it ends with the endpoint": {
			ejectOne,
			{slice(webSlice("a", at("10.0.0.2"))), " -10.0.0.1:8080 ejected"},
			{slice(webSlice("a", at("10.0.0.1"), at("10.0.0.2"))), " +10.0.0.1:8080"},
		},
		"it ends with the service port": {
			ejectOne,
			{func(tracker *Tracker) bool { return tracker.Services.Delete(web) }, "gone"},
			{func(tracker *Tracker) bool { return tracker.Services.Update(nil, webService()) }, "back"},
			ejectOne,
		},
		"of an endpoint that is not there": {
			{override(addrPort("10.0.0.3:8080"), eject), ""},
			{override(addrPort("10.0.0.1:8081"), eject), ""},
			{override(addrPort("[fd00::1]:8080"), eject), ""},
			{override(netip.AddrPort{}, eject), ""},
			{func(tracker *Tracker) bool { return tracker.Override(portName("none", "TCP"), one, eject) }, ""},
			{slice(webSlice("b", at("10.0.0.3"))), " +10.0.0.3:8080"},
		},
		"before the endpoint": {
			{func(tracker *Tracker) bool {
				override(addrPort("10.0.0.3:8080"), eject)(tracker)
				return slice(webSlice("b", at("10.0.0.3")))(tracker)
			}, " +10.0.0.3:8080 ejected"},
		},
		"an address of IPv4 in IPv6": {{override(addrPort("[::ffff:10.0.0.1]:8080"), eject), ejectOne.want}},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t)
			tracker.Services.Update(nil, webService())
			tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1"), at("10.0.0.2")), false)
			state, _ := applyAll(t, tracker, v1.IPv4Protocol)
			plain := dump(state)
			for i, s := range steps {
				changed := s.do(tracker)
				_, delta := applyAll(t, tracker, v1.IPv4Protocol)
				if s.want == "gone" || s.want == "back" {
					continue
				}
				want := []string(nil)
				if s.want != "" {
					want = []string{change + s.want}
				}
				wantOutline(t, delta, want...)
				if len(want) > 0 && !changed {
					t.Errorf("step %d: changed = false, but there are changes", i)
				}
				if waits := tracker.PendingSince(v1.IPv4Protocol); !waits.IsZero() {
					t.Errorf("step %d: something is pending since %v", i, waits)
				}
			}
			tracker.Override(http, one, Override{})
			tracker.Override(http, two, Override{})
			tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1"), at("10.0.0.2")), false)
			tracker.Endpoints.EndpointSliceUpdate(webSlice("b"), true)
			if state, _ = applyAll(t, tracker, v1.IPv4Protocol); dump(state) != plain {
				t.Errorf("without overrides, state =\n%swant\n%s", dump(state), plain)
			}
			tracker.Services.Delete(web)
			tracker.Endpoints.EndpointSliceUpdate(webSlice("a"), true)
			checkEmpty(t, tracker)
		})
	}
}

// With a traffic policy Local, an ejection brings no connections back to an endpoint of the node that terminates,
// while endpoints of other nodes may be ejected.
func TestOverrideOfTheLastEndpointOfANode(t *testing.T) {
	for local, want := range map[bool]bool{true: false, false: true} {
		tracker := mustTracker(t)
		tracker.Services.Update(nil, webService(func(s *v1.Service) {
			if local {
				s.Spec.InternalTrafficPolicy = new(v1.ServiceInternalTrafficPolicyLocal)
			}
		}))
		tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1", onNode("here")), at("10.0.0.2", onNode("here"), conditions(false, true, true)),
			at("10.0.0.3", onNode("there")), at("10.0.0.4", onNode("there"))), false)
		for _, ip := range []string{"10.0.0.1:8080", "10.0.0.3:8080"} {
			tracker.Override(http, addrPort(ip), Override{Eject: true})
		}
		state, _ := applyAll(t, tracker, v1.IPv4Protocol)
		if list := state.Endpoints(http); list[0].Ejected != want || !list[2].Ejected {
			t.Errorf("local %v: the last endpoint beside one that ends is ejected: %v, one of two on another node: %v, want %v and true", local, list[0].Ejected, list[2].Ejected, want)
		}
	}
}

// An ejected endpoint does not count for load balancers either.
func TestOverrideCountsForHealthChecks(t *testing.T) {
	tracker := mustTracker(t)
	tracker.Services.Update(nil, webService())
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1", onNode("here")), at("10.0.0.2")), false)
	tracker.Override(http, addrPort("10.0.0.1:8080"), Override{Eject: true})
	if state, _ := applyAll(t, tracker, v1.IPv4Protocol); state.For(Node{Name: "here"}).LocalReady(web) != 0 {
		t.Errorf("LocalReady = %d, want 0", state.For(Node{Name: "here"}).LocalReady(web))
	}
}

// The hook runs for a service port only if the service port or its endpoints have
// changed, or after Refresh.
func TestEditEndpointsRunsWhenItMust(t *testing.T) {
	var ran []string
	var last ServicePortName
	tracker := mustTracker(t, func(o *Options) {
		o.EditEndpoints = func(p *ServicePort, list []Endpoint) []Endpoint {
			ran = append(ran, fmt.Sprint(p, " ", len(list)))
			last = p.Name
			return list
		}
	})
	for _, c := range []struct {
		what string
		do   func() bool
		want string
	}{
		{"a Service", func() bool { return tracker.Services.Update(nil, webService()) }, "10.96.0.10:80/TCP 0"},
		{"nothing", func() bool { return false }, ""},
		{"the same Service", func() bool { return tracker.Services.Update(nil, webService()) }, ""},
		{"endpoints", func() bool { return tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), false) }, "10.96.0.10:80/TCP 1"},
		{"the same endpoints", func() bool { return tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), false) }, ""},
		{"another Service", func() bool {
			return tracker.Services.Update(nil, webService(func(s *v1.Service) {
				s.Name, s.Spec.ClusterIP, s.Spec.ClusterIPs = "other", "10.96.0.11", []string{"10.96.0.11"}
			}))
		}, "10.96.0.11:80/TCP 0"},
		{"an override", func() bool { return tracker.Override(http, addrPort("10.0.0.1:8080"), Override{Scale: 2}) }, "10.96.0.10:80/TCP 1"},
		{"Refresh", func() bool { return tracker.Refresh(http) }, "10.96.0.10:80/TCP 1"},
		{"Refresh of what is not there", func() bool { return tracker.Refresh(portName("x", "TCP")) }, ""},
		{"the Service's port", func() bool {
			return tracker.Services.Update(nil, webService(func(s *v1.Service) { s.Spec.Ports[0].Port = 81 }))
		}, "10.96.0.10:81/TCP 1"},
		{"the Service's end", func() bool { return tracker.Services.Delete(web) }, ""},
	} {
		ran = nil
		changed := c.do()
		state, _ := applyAll(t, tracker, v1.IPv4Protocol)
		var want []string
		if c.want != "" {
			want = []string{c.want}
		}
		if !slices.Equal(ran, want) {
			t.Errorf("%s: the hook ran for %q, want %q", c.what, ran, want)
		}
		if c.want != "" && !changed {
			t.Errorf("%s: changed = false", c.what)
		}
		if p := state.find(last); p != nil && c.what == "endpoints" && !p.merged.Same(&p.endpoints) {
			t.Errorf("%s: a hook that changes nothing costs a list", c.what)
		}
	}
}

// Events do not wait for a hook, and are not lost.
func TestEventsArriveWhileEditEndpointsRuns(t *testing.T) {
	var tracker *Tracker
	runs := 0
	tracker = mustTracker(t, func(o *Options) {
		o.EditEndpoints = func(_ *ServicePort, list []Endpoint) []Endpoint {
			if runs++; runs == 1 {
				tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1"), at("10.0.0.2")), false)
				tracker.Override(http, addrPort("10.0.0.1:8080"), Override{Scale: 2})
				tracker.SetNode(Node{Name: "renamed"})
				if tracker.PendingSince(v1.IPv4Protocol).IsZero() {
					t.Error("nothing is pending while the hook runs")
				}
			}
			return list
		}
	})
	tracker.Services.Update(nil, webService())
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1", onNode("here"))), false)
	state, delta := applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/web:http ->10.96.0.10:80/TCP +10.0.0.1:8080")
	if state.Node().Name != "here" || !delta.Full {
		t.Errorf("node = %q, Full = %v, want the State of before the hook", state.Node().Name, delta.Full)
	}
	if tracker.PendingSince(v1.IPv4Protocol).IsZero() {
		t.Error("nothing is pending, but there were events")
	}
	state, delta = applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/web:http 10.96.0.10:80/TCP>10.96.0.10:80/TCP -10.0.0.1:8080 +10.0.0.1:8080 weight=2 +10.0.0.2:8080")
	if state.Node().Name != "renamed" || !delta.Full {
		t.Errorf("node = %q, Full = %v, want the new node", state.Node().Name, delta.Full)
	}
}

func TestDecorateEndpointSeesTheSlice(t *testing.T) {
	tracker := mustEndpointTracker(t, func(o *Options) {
		o.DecorateEndpoint = func(e *Endpoint, _ *discovery.Endpoint, slice *discovery.EndpointSlice) {
			e.Ext = slice.Labels["cluster"]
		}
	})
	s := webSlice("a", at("10.0.0.1"))
	for _, cluster := range []string{"east", "west"} {
		s.Labels["cluster"] = cluster
		if !tracker.Endpoints.EndpointSliceUpdate(s, false) {
			t.Error("another label is no change, though the hook uses it")
		}
		if got := endpointsOf(t, tracker, v1.IPv4Protocol, http); len(got) != 1 || got[0].Ext != cluster {
			t.Errorf("endpoints = %+v, want one of cluster %s", got, cluster)
		}
	}
}

// A ready endpoint of a group that stands by is no reason to bring connections back to one that terminates.
func TestOverrideOfTheLastEndpointOfAGroupOnANode(t *testing.T) {
	for name, c := range map[string]struct {
		others []Endpoint
		want   bool // whether the only ready endpoint of group 0 on the node is ejected
	}{
		"its group serves on":    {[]Endpoint{{Addr: addrPort("10.0.0.3:80"), Node: "here", Priority: 1, Ready: true}, {Addr: addrPort("10.0.0.4:80"), Node: "there", Ready: true}}, false},
		"another group will":     {[]Endpoint{{Addr: addrPort("10.0.0.3:80"), Node: "there", Priority: 1, Ready: true}}, true},
		"another group on it":    {[]Endpoint{{Addr: addrPort("10.0.0.3:80"), Node: "here", Priority: 1, Ready: true}}, true},
		"none terminates beside": {[]Endpoint{{Addr: addrPort("10.0.0.2:80"), Node: "there", Ready: true}}, true},
	} {
		tracker := mustTracker(t)
		tracker.Services.Update(nil, webService(func(s *v1.Service) { s.Spec.InternalTrafficPolicy = new(v1.ServiceInternalTrafficPolicyLocal) }))
		list := append([]Endpoint{{Addr: addrPort("10.0.0.1:80"), Node: "here", Ready: true}}, c.others...)
		if name != "none terminates beside" {
			list = append(list, Endpoint{Addr: addrPort("10.0.0.2:80"), Node: "here", Serving: true, Terminating: true})
		}
		if _, err := tracker.Endpoints.Set(http, list...); err != nil {
			t.Fatal(err)
		}
		tracker.Override(http, addrPort("10.0.0.1:80"), Override{Eject: true})
		state, _ := applyAll(t, tracker, v1.IPv4Protocol)
		if got := state.Endpoints(http)[0].Ejected; got != c.want {
			t.Errorf("%s: ejected %v, want %v", name, got, c.want)
		}
	}
}

// Maintenance by an Override is as maintenance by slices: the endpoint is no ready one that an ejection must leave.
func TestOverridesOfMaintenanceAndEjection(t *testing.T) {
	for _, byOverride := range []bool{false, true} {
		tracker := mustTracker(t)
		tracker.Services.Update(nil, webService())
		ends := Endpoint{Serving: true, Terminating: true}
		two, three := ends, ends
		two.Addr, three.Addr = addrPort("10.0.0.2:80"), addrPort("10.0.0.3:80")
		if _, err := tracker.Endpoints.Set(http, Endpoint{Addr: addrPort("10.0.0.1:80"), Ready: true, Maintenance: !byOverride}, two, three); err != nil {
			t.Fatal(err)
		}
		if byOverride {
			tracker.Override(http, addrPort("10.0.0.1:80"), Override{Maintenance: true})
		}
		tracker.Override(http, two.Addr, Override{Eject: true})
		state, _ := applyAll(t, tracker, v1.IPv4Protocol)
		if !state.Endpoints(http)[1].Ejected {
			t.Errorf("maintenance by override %v: one of two that terminate is not ejected", byOverride)
		}
	}
}
