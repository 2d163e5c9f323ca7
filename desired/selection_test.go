package desired

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// localRedirect keeps traffic on the node as long as it has endpoints.
func localRedirect(_ changetracker.View, _ *changetracker.ServicePort, s changetracker.Selection) changetracker.Selection {
	if len(s.Local) > 0 {
		s.Cluster = s.Local
	}
	return s
}

// Local redirect: a node uses its own endpoints as long as it has some, whatever the policy.
func ExampleResolver_editSelection() {
	resolver := Resolver{
		Node: changetracker.Node{Name: "node-1"},
		EditSelection: func(_ changetracker.View, p *changetracker.ServicePort, s changetracker.Selection) changetracker.Selection {
			if redirects, _ := changetracker.Ext[bool](p.Ext); redirects && len(s.Local) > 0 {
				s.Cluster = s.Local
			}
			return s
		},
	}
	dns := changetracker.ServicePort{Name: webName, ClusterIP: clusterIP, Port: 53, Ext: true} // DecorateService may set it from an annotation
	tracker, err := changetracker.New(changetracker.Options{})
	if err == nil {
		_, err = tracker.Services.Set(webName.NamespacedName, dns)
	}
	if err == nil {
		_, err = tracker.Endpoints.Set(webName, changetracker.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.5:53"), Node: "node-1", Ready: true},
			changetracker.Endpoint{Addr: netip.MustParseAddrPort("10.2.0.5:53"), Node: "node-2", Ready: true})
	}
	if err != nil {
		fmt.Println(err)
		return
	}
	err = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		s, _ := resolver.Resolve(delta.After, webName)
		fmt.Println(s.Cluster)
		return nil, nil
	})
	fmt.Println(err)
	// Output:
	// [10.1.0.5:53]
	// <nil>
}

// own is a hook that returns these endpoints.
func own(cluster, local []changetracker.Endpoint, isAny bool) func(changetracker.View, *changetracker.ServicePort, changetracker.Selection) changetracker.Selection {
	return func(changetracker.View, *changetracker.ServicePort, changetracker.Selection) changetracker.Selection {
		return changetracker.Selection{Cluster: cluster, Local: local, Any: isAny}
	}
}

func TestEditSelection(t *testing.T) {
	list := func(endpoints ...changetracker.Endpoint) []changetracker.Endpoint { return endpoints }
	bare := changetracker.Endpoint{Addr: remote(9).Addr} // neither ready nor serving
	six, portless, mapped := remote(8), remote(8), remote(3)
	six.Addr = netip.MustParseAddrPort("[fd00::1]:80")
	portless.Addr = netip.AddrPortFrom(portless.Addr.Addr(), 0)
	mapped.Addr = netip.MustParseAddrPort("[::ffff:10.244.0.3]:8080")
	type hook = func(changetracker.View, *changetracker.ServicePort, changetracker.Selection) changetracker.Selection
	for name, c := range map[string]struct {
		edit      hook
		endpoints []changetracker.Endpoint
		want      string // cluster, local, serving and on-node endpoints; the actions of the ClusterIP and of the VIP with policy Local
	}{
		"none":                      {nil, list(remote(1), local(2)), "1,2 2 1,2 2 forward forward"},
		"local redirect":            {localRedirect, list(remote(1), local(2), local(3)), "2,3 2,3 1,2,3 2,3 forward forward"},
		"local redirect, none here": {localRedirect, list(remote(1)), "1  1  forward drop"},
		"none at all, reject":       {own(nil, nil, false), list(remote(1), local(2)), "  1,2  reject reject"},
		"none at all, drop":         {own(nil, nil, true), list(remote(1)), "  1  drop drop"},
		"some, whatever Any says":   {own(list(remote(1)), nil, false), list(remote(1)), "1  1  forward drop"},
		"sorted":                    {own(list(remote(3), remote(1), remote(3)), list(local(2)), true), list(remote(1)), "1,3 2 1,2,3 2 forward forward"},
		"one of its own":            {own(list(bare), nil, true), list(remote(1), notReady(local(2))), "9  1,9 9 forward drop"},
		"no endpoints":              {own(list(six, portless, mapped, changetracker.Endpoint{}), list(six), true), list(local(2)), "3  2,3  forward drop"},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := resolve(t, Resolver{EditSelection: c.edit}, with(everywhere(), externalLocal), c.endpoints...)
			var onNode []string
			for _, a := range s.OnNode {
				onNode = append(onNode, fmt.Sprint(a.As4()[3]))
			}
			actions := map[Kind]Action{}
			for _, f := range s.Frontends {
				actions[f.Kind] = f.Action
			}
			got := fmt.Sprintf("%s %s %s %s %v %v", numbers(s.Cluster.Slice()), numbers(s.Local.Slice()), numbers(s.Serving.Slice()), strings.Join(onNode, ","),
				actions[ClusterIP], actions[LoadBalancer])
			if got != c.want {
				t.Errorf("cluster, local, serving, on the node and actions are %q, want %q", got, c.want)
			}
		})
	}
}

// The hook receives the view of the node, and the selection after policies and topology.
func TestEditSelectionSeesTheView(t *testing.T) {
	x := explainerOfWeb(t, nil, inZone(local(1), "a"), inZone(remote(2), "b"))
	for zone, want := range map[string]string{"a": "there a 1", "b": "there b 2", "": "there  1,2"} {
		x.Resolver.Node = changetracker.Node{Name: "there", Zone: zone}
		var got string
		x.Resolver.EditSelection = func(view changetracker.View, p *changetracker.ServicePort, s changetracker.Selection) changetracker.Selection {
			all := view.State().Endpoints(p.Name)
			if view.Local(&all[0]) || !view.Local(&all[1]) {
				t.Errorf("zone %q: it is the view of another node", zone)
			}
			cluster, _ := scopeOf(s.Cluster)
			got = fmt.Sprint(view.Node().Name, " ", view.Node().Zone, " ", numbers(cluster.Slice()))
			return s
		}
		if _, ok := x.Resolver.Resolve(x.State, webName); !ok || got != want {
			t.Errorf("zone %q: the hook saw %q, want %q", zone, got, want)
		}
	}
}

// Explain and Resolve have the same endpoints, whatever the hook does.
func TestExplainAgreesWithEditSelection(t *testing.T) {
	seen := map[changetracker.Exclusion]int{}
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 3))
		pool := []changetracker.Endpoint{local(1), remote(2), terminating(remote(3)), notReady(local(4)), local(5), remote(6)}
		x := explainerOfWeb(t, func(p *changetracker.ServicePort) { p.InternalPolicyLocal = r.IntN(2) == 0 }, someOf(r, pool...)...)
		cluster, isAny := someOf(r, pool...), r.IntN(2) == 0
		x.Resolver.EditSelection = oneOf(r, nil, localRedirect, own(cluster, someOf(r, pool...), isAny))
		s, _ := x.Resolver.Resolve(x.State, webName)
		e, err := x.explain(packetTo(clusterIP.String() + ":30080"))
		if err != nil {
			t.Fatal(err)
		}
		var chosen []netip.AddrPort
		for _, p := range e.Endpoints {
			if seen[p.Excluded]++; p.Excluded == "" {
				chosen = append(chosen, p.Addr)
			}
		}
		if want := s.Endpoints(e.Scope).Slice(); !slices.Equal(chosen, want) || (e.Verdict == VerdictForward) != (len(want) > 0) {
			t.Fatalf("seed %d: explained as %v to %v, want %v", seed, e.Verdict, chosen, want)
		}
	}
	if seen[changetracker.ExcludedByHook] < 20 || seen[""] < 100 {
		t.Errorf("endpoints were excluded so often: %v", seen)
	}
}

// Connections to an endpoint that a hook selects stay, also if its group stands by and Failover.End is set.
func TestEditSelectionOfAGroupThatStandsBy(t *testing.T) {
	ends := func(p *changetracker.ServicePort) { p.EndConnections, p.Failover.End = true, true }
	second := standby(remote(2))
	s, _ := resolve(t, Resolver{EditSelection: own([]changetracker.Endpoint{remote(1), second}, nil, true)}, with(everywhere(), ends), remote(1), second, standby(remote(3)))
	if got, want := numbers(s.Cluster.Slice())+" "+numbers(s.Serving.Slice())+" "+numbers(s.Listed.Slice()), "1,2 1,2 1,2"; got != want {
		t.Errorf("cluster, serving and listed are %q, want %q", got, want)
	}
}
