package main

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestMain(m *testing.M) {
	if os.Getenv(conformanceFamily) != "" { // clients of the Gateway API's tests leave goroutines
		os.Exit(m.Run())
	}
	goleak.VerifyTestMain(m)
}

// edge is a Gateway with a TCP and a UDP listener at port 80.
const edge = gatewayGroup + `kind: Gateway
metadata: {namespace: apps, name: edge}
spec:
  gatewayClassName: test
  listeners:
  - {name: tcp, port: 80, protocol: TCP}
  - {name: udp, port: 80, protocol: UDP}
`

// both returns a TCPRoute and a UDPRoute of the Gateway edge, with one or more backendRefs.
func both(name string, backends ...string) string {
	var text string
	for _, kind := range []gw.Kind{kindTCPRoute, kindUDPRoute} {
		text += fmt.Sprintf("%skind: %s\nmetadata: {namespace: apps, name: %s}\nspec: {parentRefs: [{name: edge}], rules: [{backendRefs: [%s]}]}\n---\n",
			gatewayGroup, kind, name, strings.Join(backends, ", "))
	}
	return text
}

func ref(name string, weight int) string {
	return fmt.Sprintf("{name: %s, port: 80, weight: %d}", name, weight)
}

// awaitBoth waits for both routes "web"; see awaitRoute.
func (s *stage) awaitBoth(reason gw.RouteConditionReason) {
	s.tb.Helper()
	for _, kind := range []gw.Kind{kindTCPRoute, kindUDPRoute} {
		s.awaitRoute(string(kind), "web", gw.RouteConditionResolvedRefs, reason)
	}
}

// expect fails unless the answers are distributed as the shares are.
func expect(t *testing.T, answers map[string]int, shares map[string]float64) {
	t.Helper()
	var total, distance float64
	for _, n := range answers {
		total += float64(n)
	}
	for server, share := range shares {
		expected := share * total
		distance += (float64(answers[server]) - expected) * (float64(answers[server]) - expected) / expected
	}
	for server, n := range answers {
		if shares[server] == 0 {
			t.Errorf("%s got %d of %v connections, want none", server, n, total)
		}
	}
	// The quantiles of the chi-squared distribution for one false alarm in a million, with one,
	// two and three degrees of freedom.
	if limit := []float64{0, 23.93, 27.63, 30.66}[len(shares)-1]; distance > limit {
		t.Errorf("connections are distributed as %v, want %v: chi-squared is %.1f, at most %.1f", answers, shares, distance, limit)
	}
}

// draws is the number of connections of which a distribution is taken.
const draws = 400

// Weights split the connections between Services, whatever the number of their endpoints. A change of the weights
// cuts no connection.
func TestWeightsSplitConnectionsBetweenServices(t *testing.T) {
	s := newStage(t)
	pods := append(s.world.LocalPods, s.world.RemotePods...)
	s.backend("apps", "one", pods[0])
	s.backend("apps", "three", pods[1], pods[3], pods[4])
	s.apply(edge)
	s.apply(both("web", ref("one", 9), ref("three", 1)))
	s.awaitBoth(gw.RouteReasonResolvedRefs)
	g := s.awaitGateway(2)
	s.frontends(t, g, 80, func(t *testing.T, network string, to netip.AddrPort) {
		third := 1.0 / 30
		expect(t, s.ask(t, network, to, draws), map[string]float64{pods[0].Name: 0.9, pods[1].Name: third, pods[3].Name: third, pods[4].Name: third})
	})

	type open struct {
		*proxiertest.Conn
		name, server string
	}
	var flows []open
	s.frontends(t, g, 80, func(t *testing.T, network string, to netip.AddrPort) {
		for range 20 {
			f, err := s.world.Client.Open(t.Context(), network, to, proxiertest.AskOptions{})
			if err != nil {
				t.Fatal(err)
			}
			answer, err := f.Ask(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			flows = append(flows, open{f, network + " " + to.String(), answer.Server})
		}
	})
	s.apply(both("web", ref("one", 1), ref("three", 9)))
	s.awaitBoth(gw.RouteReasonResolvedRefs)
	for _, f := range flows {
		if answer, err := f.Ask(t.Context()); err != nil || answer.Server != f.server {
			t.Errorf("after a change of weights, an open connection of %s is answered by %q, %v, want %q", f.name, answer.Server, err, f.server)
		}
		_ = f.Close()
	}
	s.frontends(t, g, 80, func(t *testing.T, network string, to netip.AddrPort) {
		expect(t, s.ask(t, network, to, draws), map[string]float64{pods[0].Name: 0.1, pods[1].Name: 0.3, pods[3].Name: 0.3, pods[4].Name: 0.3})
	})

	s.apply(both("web", ref("one", 0), ref("three", 9)))
	s.awaitBoth(gw.RouteReasonResolvedRefs)
	s.frontends(t, g, 80, func(t *testing.T, network string, to netip.AddrPort) {
		third := 1.0 / 3
		expect(t, s.ask(t, network, to, draws/4), map[string]float64{pods[1].Name: third, pods[3].Name: third, pods[4].Name: third})
	})

	s.apply(both("web", ref("one", 0), ref("three", 0)))
	s.awaitBoth(gw.RouteReasonResolvedRefs)
	s.frontends(t, g, 80, func(t *testing.T, network string, to netip.AddrPort) {
		expect(t, s.ask(t, network, to, 10), map[string]float64{"refused": 1})
	})
}

// Missing backends refuse their share of the connections, as do Services without endpoints.
func TestMissingBackendsRefuseTheirShare(t *testing.T) {
	s := newStage(t)
	pod := s.world.RemotePods[0]
	s.backend("apps", "web", pod)
	s.backend("apps", "empty")
	s.apply(edge)
	s.apply(both("web", ref("web", 7), ref("missing", 3)))
	s.awaitBoth(gw.RouteReasonBackendNotFound)
	g := s.awaitGateway(2)
	check := func(shares map[string]float64) {
		t.Helper()
		s.frontends(t, g, 80, func(t *testing.T, network string, to netip.AddrPort) {
			expect(t, s.ask(t, network, to, draws/2), shares)
		})
	}
	check(map[string]float64{pod.Name: 0.7, "refused": 0.3})

	s.apply(both("web", ref("web", 1), ref("empty", 1)))
	s.awaitBoth(gw.RouteReasonResolvedRefs)
	check(map[string]float64{pod.Name: 0.5, "refused": 0.5})

	s.apply(both("web", ref("missing", 1)))
	s.awaitBoth(gw.RouteReasonBackendNotFound)
	check(map[string]float64{"refused": 1})

	s.backend("apps", "missing", pod)
	s.awaitBoth(gw.RouteReasonResolvedRefs)
	s.frontends(t, g, 80, func(t *testing.T, network string, to netip.AddrPort) {
		// A Service may be seen before its EndpointSlices.
		poll.Until(t, "the Service that was missing answers", func() bool { return s.ask(t, network, to, 1)[pod.Name] == 1 })
	})
}

// TestReferencesToOtherNamespacesNeedAGrant: without one, connections are refused.
func TestReferencesToOtherNamespacesNeedAGrant(t *testing.T) {
	s := newStage(t)
	pod := s.world.RemotePods[0]
	s.backend("shop", "web", pod)
	s.apply(edge)
	s.apply(both("web", "{namespace: shop, name: web, port: 80}"))
	const grant = gatewayGroup + `kind: ReferenceGrant
metadata: {namespace: shop, name: edge}
spec:
  from: [{group: gateway.networking.k8s.io, kind: TCPRoute, namespace: apps}, {group: gateway.networking.k8s.io, kind: UDPRoute, namespace: apps}]
  to: [{group: "", kind: Service, name: web}]
`
	for _, step := range []struct {
		change func()
		reason gw.RouteConditionReason
		want   string
	}{
		{func() {}, gw.RouteReasonRefNotPermitted, "refused"},
		{func() { s.apply(grant) }, gw.RouteReasonResolvedRefs, pod.Name},
		{func() { s.remove("ReferenceGrant", "shop", "edge") }, gw.RouteReasonRefNotPermitted, "refused"},
	} {
		step.change()
		s.awaitBoth(step.reason)
		s.frontends(t, s.awaitGateway(2), 80, func(t *testing.T, network string, to netip.AddrPort) {
			expect(t, s.ask(t, network, to, 5), map[string]float64{step.want: 1})
		})
	}
}

// TestRoutesAttachAndDetach: the oldest route of a listener gets the connections. Without any,
// they are refused. A listener that is gone leaves nothing behind.
func TestRoutesAttachAndDetach(t *testing.T) {
	s := newStage(t)
	old, young := s.world.LocalPods[0], s.world.RemotePods[0]
	s.backend("apps", "old", old)
	s.backend("apps", "young", young)
	s.apply(edge)
	check := func(routes int32, want string) *gw.Gateway {
		t.Helper()
		g := s.awaitGateway(routes)
		s.frontends(t, g, 80, func(t *testing.T, network string, to netip.AddrPort) {
			expect(t, s.ask(t, network, to, 5), map[string]float64{want: 1})
		})
		return g
	}
	check(0, "refused")
	s.apply(both("a", ref("old", 1)))
	s.apply(both("b", ref("young", 1))) // of the same second: the name decides
	check(4, old.Name)
	for _, kind := range []gw.Kind{kindTCPRoute, kindUDPRoute} {
		s.remove(string(kind), "apps", "a")
	}
	check(2, young.Name)
	for _, kind := range []gw.Kind{kindTCPRoute, kindUDPRoute} {
		s.remove(string(kind), "apps", "b")
	}
	g := check(0, "refused")

	s.apply(both("b", ref("young", 1)))
	s.apply(strings.ReplaceAll(edge, "port: 80", "port: 81"))
	s.frontends(t, s.awaitGateway(2), 81, func(t *testing.T, network string, to netip.AddrPort) {
		expect(t, s.ask(t, network, to, 5), map[string]float64{young.Name: 1})
	})
	s.remove("Gateway", "apps", "edge")
	s.awaitBothDetached(t)
	s.frontends(t, g, 81, func(t *testing.T, network string, to netip.AddrPort) {
		if _, err := s.world.Client.Ask(t.Context(), network, to, proxiertest.AskOptions{Timeout: quiet}); err == nil {
			t.Error("a deleted Gateway still answers")
		}
	})
}

// Invalid endpoints fail one listener, as its status says. The other listeners go on.
func TestInvalidEndpointsFailOneListener(t *testing.T) {
	s := newStage(t)
	pod := s.world.RemotePods[0]
	s.backend("apps", "web", pod)
	s.apply(edge)
	s.apply(both("web", ref("web", 1)))
	g := s.awaitGateway(2)
	slice := proxiertest.Slice("apps", "web", discovery.AddressTypeIPv4, proxiertest.SliceName("bad"), proxiertest.SlicePort("tcp", v1.ProtocolTCP, 8080), proxiertest.Endpoint("127.0.0.1"))
	s.Put(t, slice) // a real API server refuses it
	programmed := func() (all string) {
		s.read("apps", "edge", g, "Gateway")
		for _, l := range g.Status.Listeners {
			all += string(meta.FindStatusCondition(l.Conditions, string(gw.ListenerConditionProgrammed)).Status) + " "
		}
		return all
	}
	poll.Until(t, "the TCP listener is not programmed", func() bool { return programmed() == "False True " })
	s.apply(both("web", ref("web", 1), ref("missing", 0)))
	s.awaitBoth(gw.RouteReasonBackendNotFound)
	s.frontends(t, g, 80, func(t *testing.T, network string, to netip.AddrPort) {
		expect(t, s.ask(t, network, to, 5), map[string]float64{pod.Name: 1})
	})
	s.Delete(t, slice)
	poll.Until(t, "both listeners are programmed", func() bool { return programmed() == "True True " })
}
