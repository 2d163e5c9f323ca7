package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/fleet"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// ending is one Service with a pod that ends.
type ending struct {
	policy, others, pod, objects string

	number int
}

func (e *ending) String() string {
	return fmt.Sprintf("%s, other endpoints: %s, the pod is %s, objects are %s", e.policy, e.others, e.pod, e.objects)
}

func endings() (all []*ending) {
	for _, policy := range []string{"Cluster", "internal Local", "external Local", "both Local"} {
		for _, others := range []string{
			"none", "on another node", "on the same node", "not ready", "ending", "ending, not serving", "without its port", "at an invalid address", "of IPv6", "in another zone", "ejected",
		} {
			for _, pod := range []string{"listed once", "listed twice", "not named", "of another kind"} {
				for _, objects := range []string{"known", "late", "deleted before"} {
					all = append(all, &ending{policy: policy, others: others, pod: pod, objects: objects, number: len(all)})
				}
			}
		}
	}
	return all
}

func (e *ending) name() string { return fmt.Sprintf("web-%d", e.number) }
func (e *ending) ip(last int) string {
	return fmt.Sprintf("10.244.%d.%d", e.number/60, 1+e.number%60*4+last)
}

func (e *ending) service() *v1.Service {
	n := e.number
	options := []proxiertest.ServiceOption{
		proxiertest.ClusterIPs(fmt.Sprintf("10.96.%d.%d", n/200, 1+n%200), fmt.Sprintf("fd00:96::%x", 1+n)), proxiertest.Port("http", v1.ProtocolTCP, 80),
		proxiertest.LoadBalancer(fmt.Sprintf("203.0.%d.%d", n/200, 1+n%200)),
	}
	if e.policy == "internal Local" || e.policy == "both Local" {
		options = append(options, proxiertest.InternalPolicyLocal())
	}
	if e.policy == "external Local" || e.policy == "both Local" {
		options = append(options, proxiertest.ExternalPolicyLocal())
	}
	return proxiertest.Service("shop", e.name(), options...)
}

// slices returns the EndpointSlices while the pod is ready, ends, and serves no more.
func (e *ending) slices(condition proxiertest.EndpointOption) []*discovery.EndpointSlice {
	slice := func(name string, family discovery.AddressType, port string, options ...proxiertest.SliceOption) *discovery.EndpointSlice {
		options = append([]proxiertest.SliceOption{proxiertest.SliceName(e.name() + "-" + name), proxiertest.SlicePort(port, v1.ProtocolTCP, 8080)}, options...)
		return proxiertest.Slice("shop", e.name(), family, options...)
	}
	pod := proxiertest.Endpoint(e.ip(0), proxiertest.OnNode("node-1"), func(at *discovery.Endpoint) {
		switch e.pod {
		case "listed once", "listed twice":
			at.TargetRef = &v1.ObjectReference{Kind: "Pod", Name: e.name()}
		case "of another kind":
			at.TargetRef = &v1.ObjectReference{Kind: "VirtualMachine", Name: "x"}
		}
		if condition != nil {
			condition(at)
		}
	})
	all := []*discovery.EndpointSlice{slice("pod", discovery.AddressTypeIPv4, "http", pod)}
	if e.pod == "listed twice" {
		all = append(all, slice("again", discovery.AddressTypeIPv4, "http", pod))
	}
	on := func(node string, options ...proxiertest.EndpointOption) proxiertest.SliceOption {
		return proxiertest.Endpoint(e.ip(1), append(options, proxiertest.OnNode(node))...)
	}
	family, port, other := discovery.AddressTypeIPv4, "http", proxiertest.SliceOption(nil)
	switch e.others {
	case "on another node", "ejected":
		other = on("node-2")
	case "on the same node":
		other = on("node-1")
	case "not ready":
		other = on("node-2", func(at *discovery.Endpoint) { at.Conditions.Ready = new(bool) })
	case "ending":
		other = on("node-2", proxiertest.Terminating())
	case "ending, not serving":
		other = on("node-2", proxiertest.NotServing())
	case "without its port":
		other, port = on("node-2"), "another"
	case "at an invalid address":
		other = proxiertest.Endpoint("169.254.0.1", proxiertest.OnNode("node-2"))
	case "of IPv6":
		other, family = proxiertest.Endpoint("fd00:244::1", proxiertest.OnNode("node-2")), discovery.AddressTypeIPv6
	case "in another zone":
		other = on("node-2", proxiertest.InZone("elsewhere"), func(at *discovery.Endpoint) {
			at.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: "elsewhere"}}}
		})
	}
	if other != nil {
		all = append(all, slice("others", family, port, other))
	}
	return all
}

func (e *ending) put(c *testCluster, condition proxiertest.EndpointOption) {
	for _, s := range e.slices(condition) {
		c.Put(c.t, s)
	}
}

// eject has all nodes eject the other endpoint.
func (e *ending) eject(c *testCluster) {
	for _, n := range c.Nodes {
		n.Eject(portNamed(e.name()), e.at(1))
		poll.Until(c.t, "the endpoint is ejected", func() bool { return !e.has(n, e.at(1)) })
	}
}

func (e *ending) at(last int) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(e.ip(last)), 8080)
}

// drawn reports whether a node's engine has the pod as an endpoint of a frontend.
func (e *ending) drawn(n *fleet.Node) bool { return e.has(n, e.at(0)) }

func (e *ending) has(n *fleet.Node, endpoint netip.AddrPort) bool {
	for name, s := range n.Engine.Services() {
		for _, f := range s.Frontends {
			if name.Name == e.name() && (f.Action == desired.Forward && s.Endpoints(f.Scope).Has(endpoint) || f.ShortCircuit && s.Cluster.Has(endpoint)) {
				return true
			}
		}
	}
	return false
}

// test runs the hook of the pod. It must end when no node has the pod any more, and not before.
func (e *ending) test(t *testing.T, c *testCluster) {
	t.Helper()
	if e.others == "ejected" {
		e.eject(c)
	}
	var h *hook
	start := func() { h = c.hookOf(t.Context(), e.name(), e.ip(0), "--deadline=10s") }
	switch e.objects {
	case "known":
		e.put(c, proxiertest.Terminating())
		start()
	case "late":
		start()
		e.put(c, proxiertest.Terminating())
	case "deleted before": // the others too: nobody but the nodes knows that they had the pod
		c.Nodes[1].Engine.Refuse(portNamed(e.name()), errors.New("busy"))
		for _, s := range e.slices(nil) {
			c.Delete(t, s)
		}
		start()
	}
	drawn := func() bool { return slices.ContainsFunc(c.Nodes, e.drawn) }
	c.Follow(t, c.Nodes...)
	if drawn() {
		for _, n := range slices.DeleteFunc(slices.Clone(c.Nodes), func(n *fleet.Node) bool { return !e.drawn(n) }) {
			asked := n.Rounds(e.ip(0))
			poll.Until(t, "more questions", func() bool { return asked() || !h.running() })
		}
		if !h.running() {
			t.Errorf("%v: the hook has ended with %v, and a node still sends to the pod", e, h.err)
		}
		c.Nodes[1].Engine.Refuse(portNamed(e.name()), nil)
		if e.objects != "deleted before" {
			e.put(c, proxiertest.NotServing())
		}
		poll.Until(t, "no node sends to the pod", func() bool { return !drawn() })
	}
	<-h.ended
	if h.err != nil || drawn() {
		t.Errorf("%v: the hook has ended with %v, a node sends to the pod: %v; want neither", e, h.err, drawn())
	}
}

// TestNoNodeSendsAfterTheHook: for every policy, whatever the other endpoints are, however the EndpointSlices list
// the pod, and whenever the hook sees them: it ends when no node has the pod as an endpoint of any frontend.
func TestNoNodeSendsAfterTheHook(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	all := chance.Some(t, 60, endings()...)
	for _, e := range all {
		c.Put(t, e.service())
		e.put(c, nil)
	}
	c.Follow(t, c.Nodes...)
	const atOnce = 12
	slots := make(chan struct{}, atOnce)
	var running sync.WaitGroup
	for _, e := range all {
		slots <- struct{}{}
		running.Go(func() {
			defer func() { <-slots }()
			e.test(t, c)
		})
	}
	running.Wait()
}
