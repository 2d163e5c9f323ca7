package changetracker

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var http = portName("http", v1.ProtocolTCP)

func endpointsOf(tb testing.TB, tracker *Tracker, family v1.IPFamily, name ServicePortName) []Endpoint {
	tb.Helper()
	state, _ := peek(tb, tracker, family)
	return state.Endpoints(name)
}

func TestSlicesThatAreNotOursLeaveNoTrace(t *testing.T) {
	for name, edit := range map[string]func(*discovery.EndpointSlice){
		"EPS-01 FQDN":             func(s *discovery.EndpointSlice) { s.AddressType = discovery.AddressTypeFQDN },
		"EPS-01 unknown type":     func(s *discovery.EndpointSlice) { s.AddressType = "IPX" },
		"EPS-01 untracked family": func(s *discovery.EndpointSlice) { s.AddressType = discovery.AddressTypeIPv6 },
		"EPS-02 no label":         func(s *discovery.EndpointSlice) { s.Labels = nil },
		"EPS-02 empty label":      func(s *discovery.EndpointSlice) { s.Labels = map[string]string{discovery.LabelServiceName: ""} },
		"EPS-02 no name":          func(s *discovery.EndpointSlice) { s.Name = "" },
		"EPS-02 no namespace":     func(s *discovery.EndpointSlice) { s.Namespace = "" },
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t, func(o *Options) { o.Families = []v1.IPFamily{v1.IPv4Protocol} })
			empty := sizes(tracker)
			s := webSlice("a", at("10.0.0.1"))
			edit(s)
			if tracker.Endpoints.EndpointSliceUpdate(s, false) {
				t.Error("changed = true, want false")
			}
			if got := sizes(tracker); got != empty {
				t.Errorf("left behind: %s", got)
			}
		})
	}
	if mustTracker(t).Endpoints.EndpointSliceUpdate(nil, false) {
		t.Error("changed = true for nil, want false")
	}
}

func TestSliceWithoutEndpointsIsNoChange(t *testing.T) { // EPS-20
	for name, edit := range map[string]func(*discovery.EndpointSlice){
		"no endpoints": func(s *discovery.EndpointSlice) { s.Endpoints = nil },
		"no ports":     func(s *discovery.EndpointSlice) { s.Ports = nil },
		"none usable":  func(s *discovery.EndpointSlice) { s.Endpoints[0].Addresses = nil },
	} {
		tracker := mustTracker(t)
		s := webSlice("a", at("10.0.0.1"))
		edit(s)
		if tracker.Endpoints.EndpointSliceUpdate(s, false) {
			t.Errorf("%s: changed = true, want false", name)
		}
		state, delta := applyAll(t, tracker, v1.IPv4Protocol)
		wantOutline(t, delta)
		if got := dump(state); got != "\n" {
			t.Errorf("%s: state = %s, want nothing", name, got)
		}
		tracker.Endpoints.EndpointSliceUpdate(s, true)
		checkEmpty(t, tracker)
	}
}

func TestEndpointPorts(t *testing.T) {
	numbers := func(ports ...discovery.EndpointPort) []discovery.EndpointPort { return ports }
	for name, c := range map[string]struct {
		ports  []discovery.EndpointPort
		want   map[ServicePortName][]string
		reason []Reason
	}{
		"EPS-10 nil name": {
			ports:  numbers(discovery.EndpointPort{Port: new(int32(1))}, endpointPort("", "TCP", 8080)),
			want:   map[ServicePortName][]string{portName("", "TCP"): {"10.0.0.1:8080"}},
			reason: []Reason{ReasonMissing},
		},
		"EPS-10 nil, zero and large numbers": {
			ports: numbers(discovery.EndpointPort{Name: new("a")}, endpointPort("b", "TCP", 0),
				endpointPort("c", "TCP", 65536), endpointPort("d", "TCP", 65535)),
			want:   map[ServicePortName][]string{portName("d", "TCP"): {"10.0.0.1:65535"}},
			reason: []Reason{ReasonMissing, ReasonInvalidPort, ReasonInvalidPort},
		},
		"EPS-11 W-01 nil protocol is TCP": {
			ports: numbers(discovery.EndpointPort{Name: new("a"), Port: new(int32(80))}),
			want:  map[ServicePortName][]string{portName("a", "TCP"): {"10.0.0.1:80"}},
		},
		"unknown protocol": {
			ports:  numbers(endpointPort("a", "QUIC", 80), endpointPort("b", "UDP", 53)),
			want:   map[ServicePortName][]string{portName("b", "UDP"): {"10.0.0.1:53"}},
			reason: []Reason{ReasonInvalidProtocol},
		},
		"EPS-14 one name, two numbers": {
			ports: numbers(endpointPort("a", "TCP", 81), endpointPort("a", "TCP", 80), endpointPort("a", "TCP", 80)),
			want:  map[ServicePortName][]string{portName("a", "TCP"): {"10.0.0.1:80", "10.0.0.1:81"}},
		},
		"one name, two protocols": {
			ports: numbers(endpointPort("a", "UDP", 53), endpointPort("a", "TCP", 53)),
			want: map[ServicePortName][]string{
				portName("a", "TCP"): {"10.0.0.1:53"}, portName("a", "UDP"): {"10.0.0.1:53"},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustEndpointTracker(t)
			s := webSlice("a", at("10.0.0.1"))
			s.Ports = c.ports
			tracker.Endpoints.EndpointSliceUpdate(s, false)
			state, _ := peek(t, tracker, v1.IPv4Protocol)
			got := map[ServicePortName][]string{}
			service, _ := state.services.Get(web)
			for _, p := range service.ports {
				got[p.name] = addrs(p.endpoints.Slice())
			}
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("endpoints = %v, want %v", got, c.want)
			}
			wantReasons(t, tracker, c.reason...)
		})
	}
}

func TestEndpointAddresses(t *testing.T) {
	for name, c := range map[string]struct {
		addresses []string
		want      []string
		reason    Reason
	}{
		"EPS-12 none":               {nil, nil, ReasonMissing},
		"EPS-12 the first counts":   {[]string{"10.0.0.2", "10.0.0.3"}, []string{"10.0.0.2:8080"}, ""},
		"EPS-13 W-01 unparsable":    {[]string{"ten"}, nil, ReasonInvalidAddress},
		"EPS-13 W-01 other family":  {[]string{"fd00::1"}, nil, ReasonWrongFamily},
		"EPS-13 W-01 empty":         {[]string{""}, nil, ReasonInvalidAddress},
		"TRK-15 leading zeros":      {[]string{"010.001.000.002"}, []string{"10.1.0.2:8080"}, ""},
		"padding":                   {[]string{" 10.1.0.2"}, []string{"10.1.0.2:8080"}, ""},
		"mapped IPv6 is IPv4":       {[]string{"::ffff:10.0.0.7"}, []string{"10.0.0.7:8080"}, ""},
		"unspecified":               {[]string{"0.0.0.0"}, nil, ReasonInvalidAddress},
		"multicast":                 {[]string{"224.0.0.5"}, nil, ReasonInvalidAddress},
		"loopback":                  {[]string{"127.0.0.1"}, nil, ReasonInvalidAddress},
		"mapped loopback":           {[]string{"::ffff:127.0.0.1"}, nil, ReasonInvalidAddress},
		"link-local":                {[]string{"169.254.169.254"}, nil, ReasonInvalidAddress},
		"a zone is not an address":  {[]string{"fe80::1%eth0"}, nil, ReasonInvalidAddress},
		"sloppy IPv6 in IPv4 slice": {[]string{" fd00::1"}, nil, ReasonWrongFamily},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustEndpointTracker(t)
			tracker.Endpoints.EndpointSliceUpdate(webSlice("a", discovery.Endpoint{Addresses: c.addresses}), false)
			if got := addrs(endpointsOf(t, tracker, v1.IPv4Protocol, http)); !slices.Equal(got, c.want) {
				t.Errorf("endpoints = %v, want %v", got, c.want)
			}
			wantReasons(t, tracker, c.reason)
		})
	}
}

func TestEndpointFields(t *testing.T) {
	hints := func(zones, nodes []string) func(*discovery.Endpoint) {
		return func(e *discovery.Endpoint) {
			e.Hints = &discovery.EndpointHints{}
			for _, z := range zones {
				e.Hints.ForZones = append(e.Hints.ForZones, discovery.ForZone{Name: z})
			}
			for _, n := range nodes {
				e.Hints.ForNodes = append(e.Hints.ForNodes, discovery.ForNode{Name: n})
			}
		}
	}
	for name, c := range map[string]struct {
		edit func(*discovery.Endpoint)
		want Endpoint
	}{
		"EPS-15 defaults": {func(*discovery.Endpoint) {}, Endpoint{Ready: true, Serving: true}},
		"EPS-15 ready is not derived": {
			conditions(true, false, true), Endpoint{Ready: true, Terminating: true},
		},
		"EPS-15 serving is not derived": {conditions(false, true, false), Endpoint{Serving: true}},
		"EPS-16 local":                  {onNode("here"), Endpoint{Ready: true, Serving: true, Node: "here"}},
		"EPS-16 remote":                 {onNode("there"), Endpoint{Ready: true, Serving: true, Node: "there"}},
		"EPS-16 empty node name":        {onNode(""), Endpoint{Ready: true, Serving: true}},
		"zone": {
			func(e *discovery.Endpoint) { e.Zone = new("z") }, Endpoint{Ready: true, Serving: true, Zone: "z"},
		},
		"EPS-17 hints": {
			hints([]string{"b", "a", "b"}, []string{"n"}),
			Endpoint{Ready: true, Serving: true, ZoneHints: []string{"a", "b"}, NodeHints: []string{"n"}},
		},
		"EPS-17 empty hints": {hints(nil, nil), Endpoint{Ready: true, Serving: true}},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustEndpointTracker(t)
			tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1", c.edit)), false)
			c.want.Addr = addrPort("10.0.0.1:8080")
			got := endpointsOf(t, tracker, v1.IPv4Protocol, http)
			if len(got) != 1 || !reflect.DeepEqual(got[0], c.want) {
				t.Errorf("endpoints = %+v, want %+v", got, c.want)
			}
			if here, isLocal := (View{node: Node{Name: "here"}}), c.want.Node == "here"; here.Local(&c.want) != isLocal {
				t.Errorf("Local = %v, want %v", !isLocal, isLocal)
			}
		})
	}
	t.Run("EPS-16 nothing is local to a node without name", func(t *testing.T) {
		tracker := mustEndpointTracker(t)
		tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1", onNode("")), at("10.0.0.2", onNode("x"))), false)
		for _, e := range endpointsOf(t, tracker, v1.IPv4Protocol, http) {
			if (View{}).Local(&e) {
				t.Errorf("%v is local, want none", e)
			}
		}
	})
}

// EPS-31 and W-05: only a difference is a change.
func TestOnlyDifferencesAreChanges(t *testing.T) {
	base := func() *discovery.EndpointSlice {
		s := webSlice("a", at("10.0.0.1", onNode("n")), at("10.0.0.2"))
		s.Ports = append(s.Ports, endpointPort("dns", v1.ProtocolUDP, 53))
		return s
	}
	for name, c := range map[string]struct {
		edit func(*discovery.EndpointSlice)
		want bool
	}{
		"identical":          {func(*discovery.EndpointSlice) {}, false},
		"metadata":           {func(s *discovery.EndpointSlice) { s.ResourceVersion, s.Annotations = "7", map[string]string{"a": "b"} }, false},
		"order of endpoints": {func(s *discovery.EndpointSlice) { slices.Reverse(s.Endpoints) }, false},
		"order of ports":     {func(s *discovery.EndpointSlice) { slices.Reverse(s.Ports) }, false},
		"target":             {func(s *discovery.EndpointSlice) { s.Endpoints[0].TargetRef = &v1.ObjectReference{Name: "pod"} }, false},
		"hostname":           {func(s *discovery.EndpointSlice) { s.Endpoints[0].Hostname = new("h") }, false},
		"creation time":      {func(s *discovery.EndpointSlice) { s.CreationTimestamp = metav1.Unix(5, 0) }, false},
		"garbage beside":     {func(s *discovery.EndpointSlice) { s.Endpoints = append(s.Endpoints, at("x")) }, false},
		"duplicate":          {func(s *discovery.EndpointSlice) { s.Endpoints = append(s.Endpoints, at("10.0.0.2")) }, false},
		"ready":              {func(s *discovery.EndpointSlice) { s.Endpoints[1].Conditions.Ready = new(false) }, true},
		"terminating":        {func(s *discovery.EndpointSlice) { s.Endpoints[1].Conditions.Terminating = new(true) }, true},
		"node":               {func(s *discovery.EndpointSlice) { s.Endpoints[0].NodeName = new("here") }, true},
		"zone":               {func(s *discovery.EndpointSlice) { s.Endpoints[0].Zone = new("z") }, true},
		"hint": {func(s *discovery.EndpointSlice) {
			s.Endpoints[0].Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: "z"}}}
		}, true},
		"one more":    {func(s *discovery.EndpointSlice) { s.Endpoints = append(s.Endpoints, at("10.0.0.3")) }, true},
		"one less":    {func(s *discovery.EndpointSlice) { s.Endpoints = s.Endpoints[:1] }, true},
		"port number": {func(s *discovery.EndpointSlice) { s.Ports[0].Port = new(int32(1)) }, true},
		"port less":   {func(s *discovery.EndpointSlice) { s.Ports = s.Ports[:1] }, true},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustEndpointTracker(t)
			tracker.Endpoints.EndpointSliceUpdate(base(), false)
			applyAll(t, tracker, v1.IPv4Protocol)
			s := base()
			c.edit(s)
			if got := tracker.Endpoints.EndpointSliceUpdate(s, false); got != c.want {
				t.Errorf("changed = %v, want %v", got, c.want)
			}
			_, delta := applyAll(t, tracker, v1.IPv4Protocol)
			if got := len(delta.Changes) > 0; got != c.want {
				t.Errorf("Delta = %v, want changes: %v", outline(delta), c.want)
			}
		})
	}
}

// EPS-32, fixed (W-05), and TRK-42: changes that cancel out are not in the Delta.
func TestChangesThatCancelOutAreNotInTheDelta(t *testing.T) {
	off := at("10.0.0.1", conditions(false, false, false))
	for name, c := range map[string]struct {
		known bool
		steps func(*Tracker)
	}{
		"slice added and removed": {false, func(tr *Tracker) {
			tr.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), false)
			tr.Endpoints.EndpointSliceUpdate(webSlice("a"), true)
		}},
		"slice removed and added": {true, func(tr *Tracker) {
			tr.Endpoints.EndpointSliceUpdate(webSlice("a"), true)
			tr.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), false)
		}},
		"endpoint flipped and back": {true, func(tr *Tracker) {
			tr.Endpoints.EndpointSliceUpdate(webSlice("a", off), false)
			tr.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), false)
		}},
		"slice replaced by another with the same content": {true, func(tr *Tracker) {
			tr.Endpoints.EndpointSliceUpdate(webSlice("a"), true)
			tr.Endpoints.EndpointSliceUpdate(webSlice("b", at("10.0.0.1")), false)
		}},
		"Service deleted and added": {true, func(tr *Tracker) {
			tr.Services.Delete(web)
			tr.Services.Update(nil, webService())
		}},
		"Service changed and back": {true, func(tr *Tracker) {
			tr.Services.Update(nil, webService(func(s *v1.Service) { s.Spec.Ports[0].Port = 99 }))
			tr.Services.Update(nil, webService())
		}},
		"Service added and deleted": {false, func(tr *Tracker) {
			tr.Services.Update(nil, webService())
			tr.Services.Update(webService(), nil)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t)
			if c.known {
				tracker.Services.Update(nil, webService())
				tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), false)
			}
			before, _ := applyAll(t, tracker, v1.IPv4Protocol)
			c.steps(tracker)
			after, delta := applyAll(t, tracker, v1.IPv4Protocol)
			wantOutline(t, delta)
			if dump(before) != dump(after) {
				t.Errorf("state = %s, want %s", dump(after), dump(before))
			}
		})
	}
}

func TestRelabelledSliceMoves(t *testing.T) { // EPS-05, W-02
	tracker := mustEndpointTracker(t)
	s := webSlice("a", at("10.0.0.1"))
	tracker.Endpoints.EndpointSliceUpdate(s, false)
	applyAll(t, tracker, v1.IPv4Protocol)
	s.Labels[discovery.LabelServiceName] = "api"
	if !tracker.Endpoints.EndpointSliceUpdate(s, false) {
		t.Error("changed = false, want true")
	}
	_, delta := applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/api:http ->- +10.0.0.1:8080", "default/web:http ->- -10.0.0.1:8080")

	s.AddressType, s.Endpoints[0].Addresses[0] = discovery.AddressTypeIPv6, "fd00::1" // the API forbids it
	tracker.Endpoints.EndpointSliceUpdate(s, false)
	_, delta = applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/api:http ->- -10.0.0.1:8080")
	_, delta = applyAll(t, tracker, v1.IPv6Protocol)
	wantOutline(t, delta, "default/api:http ->- +[fd00::1]:8080")

	delete(s.Labels, discovery.LabelServiceName)
	if !tracker.Endpoints.EndpointSliceUpdate(s, false) {
		t.Error("a slice that lost its label: changed = false, want true")
	}
	applyAll(t, tracker, v1.IPv6Protocol)
	if got := sizes(tracker); got != sizes(mustEndpointTracker(t)) {
		t.Errorf("left behind: %s", got)
	}
}

func TestRemovingAnUnknownSliceLeavesNoTrace(t *testing.T) { // EPS-34, W-06
	tracker := mustTracker(t)
	if tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), true) {
		t.Error("changed = true, want false")
	}
	if got, want := sizes(tracker), sizes(mustTracker(t)); got != want {
		t.Errorf("sizes = %s, want %s", got, want)
	}
}

func TestSliceIsRemovedWhateverItsLastVersionSays(t *testing.T) {
	tracker := mustEndpointTracker(t)
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), false)
	last := webSlice("a")
	last.Labels, last.AddressType = nil, discovery.AddressTypeFQDN
	if !tracker.Endpoints.EndpointSliceUpdate(last, true) {
		t.Error("changed = false, want true")
	}
	if got := endpointsOf(t, tracker, v1.IPv4Protocol, http); got != nil {
		t.Errorf("endpoints = %v, want none", got)
	}
}

func TestEndpointsWaitForTheirServicePort(t *testing.T) { // EPS-37
	tracker := mustTracker(t)
	if tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), false) {
		t.Error("a slice without Service: changed = true, want false")
	}
	state, delta := applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta)
	if _, ok := state.Service(http); ok || state.Len() != 0 || state.ServicePorts(web) != nil || state.Endpoints(http) != nil {
		t.Error("the service port is proxied, want nothing known of it")
	}
	tracker.Services.Update(nil, webService())
	state, delta = applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/web:http ->10.96.0.10:80/TCP +10.0.0.1:8080")
	if got := addrs(state.Endpoints(http)); !slices.Equal(got, []string{"10.0.0.1:8080"}) {
		t.Errorf("endpoints = %v, want the one", got)
	}
	tracker.Services.Delete(web)
	_, delta = applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/web:http 10.96.0.10:80/TCP>- -10.0.0.1:8080")
	// A change without a service port shows when the service port is back.
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.2")), false)
	tracker.Services.Update(nil, webService())
	_, delta = applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/web:http ->10.96.0.10:80/TCP +10.0.0.2:8080")
	// The same between two applies.
	tracker.Services.Delete(web)
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.3")), false)
	tracker.Services.Update(nil, webService())
	_, delta = applyAll(t, tracker, v1.IPv4Protocol)
	wantOutline(t, delta, "default/web:http 10.96.0.10:80/TCP>10.96.0.10:80/TCP -10.0.0.2:8080 +10.0.0.3:8080")
}

func TestLocalReadyCountsAddresses(t *testing.T) { // EPS-40
	tracker := mustEndpointTracker(t)
	one := mustEndpointTracker(t)
	s := webSlice("a", at("10.0.0.1", onNode("here")))
	s.Ports = append(s.Ports, endpointPort("http", v1.ProtocolTCP, 8081))
	one.Endpoints.EndpointSliceUpdate(s, false)
	if state, _ := applyAll(t, one, v1.IPv4Protocol); state.For(state.Node()).LocalReady(web) != 1 {
		t.Errorf("LocalReady of one address with two ports = %d, want 1", state.For(state.Node()).LocalReady(web))
	}
	s = webSlice("a",
		at("10.0.0.1", onNode("here")),
		at("10.0.0.2", onNode("here"), conditions(false, true, true)),
		at("10.0.0.3", onNode("here"), conditions(false, true, false)),
		at("10.0.0.4", onNode("there")))
	s.Ports = append(s.Ports, endpointPort("https", v1.ProtocolTCP, 8443), endpointPort("http", v1.ProtocolTCP, 8081))
	tracker.Endpoints.EndpointSliceUpdate(s, false)
	other := webSlice("b", at("10.0.0.5", onNode("here")))
	other.Ports = []discovery.EndpointPort{endpointPort("metrics", v1.ProtocolTCP, 9090)}
	tracker.Endpoints.EndpointSliceUpdate(other, false)
	state, _ := applyAll(t, tracker, v1.IPv4Protocol)
	if got := state.For(state.Node()).LocalReady(web); got != 2 {
		t.Errorf("LocalReady = %d, want 2", got)
	}
	six, _ := applyAll(t, tracker, v1.IPv6Protocol)
	if got := six.For(six.Node()).LocalReady(web); got != 0 {
		t.Errorf("LocalReady of IPv6 = %d, want 0", got)
	}
}

func TestBuffersHoldNothingOfTheLastSlice(t *testing.T) {
	tracker := mustTracker(t)
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1", onNode("here")), at("10.0.0.2")), false)
	p := &tracker.store.parser
	for _, e := range p.endpoints[:cap(p.endpoints)] {
		if !reflect.DeepEqual(e, Endpoint{}) {
			t.Errorf("endpoint in the buffer: %v", e)
		}
	}
	for _, port := range p.ports[:cap(p.ports)] {
		if port != (numberedKey{}) {
			t.Errorf("port in the buffer: %v", port)
		}
	}
	huge := webSlice("b")
	for i := range maxScratch + 1 {
		huge.Endpoints = append(huge.Endpoints, at(fmt.Sprintf("10.1.%d.%d", i/250, i%250+1)))
	}
	tracker.Endpoints.EndpointSliceUpdate(huge, false)
	if got := cap(p.endpoints); got > maxScratch {
		t.Errorf("buffer for %d endpoints is kept, want at most %d", got, maxScratch)
	}
}

func TestSlicesAreNeitherChangedNorKept(t *testing.T) { // EPS-22
	tracker := mustEndpointTracker(t)
	s := webSlice("a", at("10.0.0.2", func(e *discovery.Endpoint) {
		e.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: "b"}, {Name: "a"}}}
	}), at("10.0.0.1"))
	before := s.DeepCopy()
	tracker.Endpoints.EndpointSliceUpdate(s, false)
	if !reflect.DeepEqual(s, before) {
		t.Errorf("the slice was changed to %v", s)
	}
	state, _ := applyAll(t, tracker, v1.IPv4Protocol)
	was := dump(state)
	s.Endpoints[0].Addresses[0], s.Endpoints[0].Hints.ForZones[0].Name, *s.Ports[0].Port = "10.9.9.9", "x", 1
	if got := dump(state); got != was {
		t.Errorf("the State follows the object:\n%s\nwant\n%s", got, was)
	}
}
