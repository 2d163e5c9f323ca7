package changetracker

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// families returns the cluster IPs under which a Service is proxied; "" if it is not.
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

// TRK-08: a Service that is no longer for this proxy is deleted, and the reverse is an add.
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

// TRK-44 is fixed (W-03): a relist without the old version leaves no port behind, and
// identical content is no change.
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
