package cluster

import (
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var yes, no = true, false

// Endpoints of pods, by their conditions.
func readyPod(name string) discovery.Endpoint {
	return discovery.Endpoint{TargetRef: &v1.ObjectReference{Kind: "Pod", Name: name}, Addresses: []string{"10.244.0.1"}, Conditions: discovery.EndpointConditions{Ready: &yes, Serving: &yes}}
}

func endingPod(name string) discovery.Endpoint {
	e := readyPod(name)
	e.Conditions = discovery.EndpointConditions{Ready: &no, Serving: &yes, Terminating: &yes}
	return e
}

func sliceOf(service, name, version string, endpoints ...discovery.Endpoint) *discovery.EndpointSlice {
	return &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: name, ResourceVersion: version, Labels: map[string]string{discovery.LabelServiceName: service}},
		AddressType: discovery.AddressTypeIPv4, Endpoints: endpoints, Ports: []discovery.EndpointPort{{Port: new(int32(8080))}},
	}
}

// When a pod has left its EndpointSlices, and which versions count then.
func TestDeparture(t *testing.T) {
	type steps = func(*departure)
	set := func(slices ...*discovery.EndpointSlice) steps {
		return func(d *departure) {
			for _, s := range slices {
				d.Set(s)
			}
		}
	}
	headless := sliceOf("web", "h", "99", readyPod("a"))
	headless.Labels[v1.IsHeadlessService] = ""
	published, stopped, unnamed, otherKind := endingPod("a"), endingPod("a"), readyPod("a"), readyPod("x")
	published.Conditions.Ready, stopped.Conditions.Serving = &yes, &no
	unnamed.TargetRef, unnamed.Addresses = nil, []string{"10.244.0.9"}
	otherKind.TargetRef.Kind, otherKind.Addresses = "VirtualMachine", unnamed.Addresses
	neighbour := readyPod("b")
	neighbour.Addresses = unnamed.Addresses
	many := sliceOf("web", "s", "7", endingPod("a"))
	for i := range int32(40) {
		many.Ports = append(many.Ports, discovery.EndpointPort{Port: new(i + 1)})
	}
	for name, test := range map[string]struct {
		steps []steps
		want  string // service@version of each Change and what has left, or a part of the error
	}{
		"no slices":                    {want: "@ 10.244.0.9:0"},
		"its kind is another one":      {[]steps{set(sliceOf("web", "s", "5", otherKind))}, "still has the pod as ready"},
		"it is there twice":            {[]steps{set(sliceOf("web", "s", "5", endingPod("a"), readyPod("a")))}, "still has the pod as ready"},
		"it has many ports":            {[]steps{set(many)}, "web@7 10.244.0.1:0"},
		"another pod has its address":  {[]steps{set(sliceOf("web", "s", "7", neighbour))}, "@7"},
		"it is ready":                  {[]steps{set(sliceOf("web", "s", "5", readyPod("a"), readyPod("b")))}, "EndpointSlice s of Service web still has the pod as ready"},
		"its address is ready":         {[]steps{set(sliceOf("web", "s", "5", unnamed))}, "still has the pod as ready"},
		"its conditions are not known": {[]steps{set(sliceOf("web", "s", "5", discovery.Endpoint{Addresses: unnamed.Addresses}))}, "still has the pod as ready"},
		"it ends":                      {[]steps{set(sliceOf("web", "s", "5", readyPod("a"))), set(sliceOf("web", "s", "7", endingPod("a"), readyPod("b")))}, "web@7 10.244.0.1:8080"},
		"it ended before":              {[]steps{set(sliceOf("web", "s", "7", endingPod("a"), readyPod("b")))}, "web@7 10.244.0.1:8080"},
		"it ends, all others too":      {[]steps{set(sliceOf("web", "s", "7", endingPod("a"), endingPod("b")))}, "web@7 10.244.0.1:8080"},
		"it serves no more":            {[]steps{set(sliceOf("web", "s", "7", stopped))}, "web@7 10.244.0.1:8080"},
		"it is published":              {[]steps{set(sliceOf("web", "s", "7", published, readyPod("b")))}, "publishNotReadyAddresses"},
		"it is removed":                {[]steps{set(sliceOf("web", "s", "5", readyPod("a"))), set(sliceOf("web", "s", "9"))}, "web@9 10.244.0.1:8080"},
		"its slice is deleted":         {[]steps{set(sliceOf("web", "s", "5", readyPod("a"))), func(d *departure) { d.Delete("s", "10") }}, "web@10 10.244.0.1:8080"},
		"its slice is not listed": {[]steps{set(sliceOf("web", "s", "5", readyPod("a"))), func(d *departure) {
			d.Replace([]*discovery.EndpointSlice{sliceOf("api", "t", "8", readyPod("b"))}, "11")
		}}, "web@11 10.244.0.1:8080"},
		"two Services": {[]steps{set(sliceOf("web", "s", "5", endingPod("a"), readyPod("b")), sliceOf("api", "t", "6", readyPod("a")))}, "EndpointSlice t of Service api still has the pod as ready"},
		"two Services, both without it": {[]steps{set(
			sliceOf("web", "s", "5", endingPod("a"), readyPod("b")), sliceOf("web", "s2", "10", endingPod("a")), sliceOf("api", "t", "6", stopped),
		)}, "api@6 10.244.0.1:8080 web@10 10.244.0.1:8080"},
		"headless, and no Service's": {[]steps{set(headless, sliceOf("", "x", "98", readyPod("a")))}, "@ 10.244.0.9:0"},
		"its slice was deleted before the list": {[]steps{func(d *departure) {
			d.Replace([]*discovery.EndpointSlice{sliceOf("api", "t", "8", readyPod("b"))}, "11")
		}}, "@8 10.244.0.9:0 listed 11"},
		"no slice has it": {[]steps{set(sliceOf("web", "s", "7", readyPod("b")), sliceOf("web", "t", "12", readyPod("b")))}, "@12 10.244.0.9:0"},
	} {
		d := newDeparture(Pod{Namespace: "shop", Name: "a", IPs: []string{"10.244.0.9"}})
		for _, step := range test.steps {
			step(d)
		}
		changes, err := d.Changes()
		var got []string
		for _, c := range changes {
			text := c.Service.Name + "@" + c.Versions.EndpointSlices
			for _, left := range c.Left {
				text += " " + left.String()
			}
			if c.Listed != "" {
				text += " listed " + c.Listed
			}
			got = append(got, text)
		}
		text := strings.Join(got, " ")
		if err != nil {
			text = fmt.Sprintf("error: %v", err)
		}
		if text != test.want && (err == nil || !strings.Contains(text, test.want)) {
			t.Errorf("%s: %s, want %s", name, text, test.want)
		}
	}
}
