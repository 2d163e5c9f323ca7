package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/endings"
	"github.com/serviceplane/serviceplane/internal/fleet"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// ending is an Ending on a cluster.
type ending struct {
	*endings.Ending
	*testCluster

	number int
}

// onCluster returns the Endings that nodes with recording engines can have.
func (c *testCluster) onCluster(all []*endings.Ending) (some []*ending) {
	for _, e := range all {
		if e.Clients == "clients stay" || e.Others == "with weight 0" || e.Objects == "listed again" || e.Objects == "late at one node" {
			continue
		}
		n := len(some)
		ip := func(last int) string { return fmt.Sprintf("10.%d.%d.%d", 128+n/1e4, n%1e4/60, 1+n%60*4+last) }
		e.Name, e.IP, e.Near, e.Far = fmt.Sprintf("web-%d", n), ip(0), ip(1), ip(1)
		some = append(some, &ending{e, c, n})
	}
	return some
}

func (e *ending) service() *v1.Service {
	n := e.number
	return e.Service(
		proxiertest.ClusterIPs(fmt.Sprintf("10.96.%d.%d", n/200, 1+n%200), fmt.Sprintf("fd00:96::%x", 1+n)),
		proxiertest.Port("web-tcp", v1.ProtocolTCP, 80), proxiertest.LoadBalancer(fmt.Sprintf("203.0.%d.%d", n/200, 1+n%200)),
	)
}

func (e *ending) port() changetracker.ServicePortName {
	name := portNamed(e.Name)
	name.Port = "web-tcp"
	return name
}

func (e *ending) put(condition proxiertest.EndpointOption) {
	for _, s := range e.Slices(condition) {
		e.Put(e.t, s)
	}
}

// eject has all nodes eject the other endpoint.
func (e *ending) eject() {
	for _, n := range e.Nodes {
		n.Eject(e.port(), netip.AddrPortFrom(netip.MustParseAddr(e.Far), 8080))
		poll.Until(e.t, "the endpoint is ejected", func() bool { return !e.has(n, e.Far) })
	}
}

// drawn reports whether a node's engine has the pod as an endpoint of a frontend.
func (e *ending) drawn(n *fleet.Node) bool { return e.has(n, e.IP) }

func (e *ending) has(n *fleet.Node, address string) bool {
	endpoint := netip.AddrPortFrom(netip.MustParseAddr(address), 8080)
	for name, s := range n.Engine.Services() {
		for _, f := range s.Frontends {
			if name.Name == e.Name && (f.Action == desired.Forward && s.Endpoints(f.Scope).Has(endpoint) || f.ShortCircuit && s.Cluster.Has(endpoint)) {
				return true
			}
		}
	}
	return false
}

// test runs the hook of the pod. It must end when no node has the pod any more, and not before.
func (e *ending) test() {
	t := e.t
	t.Helper()
	if e.Others == "ejected" {
		e.eject()
	}
	var h *hook
	start := func() { h = e.hookOf(t.Context(), e.Name, e.IP) }
	switch e.Objects {
	case "known":
		e.put(proxiertest.Terminating())
		start()
	case "late":
		start()
		e.put(proxiertest.Terminating())
	case "deleted before": // the others too: nobody but the nodes knows that they had the pod
		e.Nodes[1].Engine.Refuse(e.port(), errors.New("busy"))
		for _, s := range e.Slices(nil) {
			e.Delete(t, s)
		}
		start()
	}
	drawn := func() bool { return slices.ContainsFunc(e.Nodes, e.drawn) }
	e.Follow(t, e.Nodes...)
	if drawn() {
		for _, n := range slices.DeleteFunc(slices.Clone(e.Nodes), func(n *fleet.Node) bool { return !e.drawn(n) }) {
			asked := n.Rounds(e.IP)
			poll.Until(t, "more questions", func() bool { return asked() || !h.running() })
		}
		if !h.running() {
			t.Errorf("%v: the hook has ended with %v, and a node still sends to the pod", e, h.err)
		}
		e.Nodes[1].Engine.Refuse(e.port(), nil)
		if e.Objects != "deleted before" {
			e.put(proxiertest.NotServing())
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
	all := chance.Some(t, 60, c.onCluster(endings.All())...)
	for _, e := range all {
		c.Put(t, e.service())
		e.put(nil)
	}
	c.Follow(t, c.Nodes...)
	const atOnce = 12
	slots := make(chan struct{}, atOnce)
	var running sync.WaitGroup
	for _, e := range all {
		slots <- struct{}{}
		running.Go(func() {
			defer func() { <-slots }()
			e.test()
		})
	}
	running.Wait()
}
