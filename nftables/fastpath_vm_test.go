//go:build vm

package nftables_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// slow is the annotation of Services that do not ask for the fast path.
const slow = "slow"

// hurried returns a configuration in which all other Services ask for it.
func hurried(config proxier.Config) nftables.Config {
	decorate := config.Tracker.DecorateService
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) {
		if decorate != nil {
			decorate(p, s)
		}
		p.FastPath = s.Annotations[slow] == ""
	}
	return nftables.Config{Config: config, FastPathAfter: 4}
}

// TestPacketsOnTheFastPath sends the packets of the table of scenarios past the rules, as soon as it
// is possible.
func TestPacketsOnTheFastPath(t *testing.T) {
	proxiertest.Conformance(t, proxiertest.Features{FirstPriorityLost: true, ClientLimits: true}, func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
		return nftables.New(hurried(config), deps)
	})
}

// fastWorld is a node with a fast path, and another table that counts what it forwards.
type fastWorld struct {
	*proxiertest.Topology
	*proxier.Proxier
	t      *testing.T
	family v1.IPFamily
}

func newFastWorld(t *testing.T, family v1.IPFamily) *fastWorld {
	t.Helper()
	w := &fastWorld{Topology: proxiertest.NewTopology(t), t: t, family: family}
	p, err := nftables.New(hurried(w.Config()), proxier.Deps{})
	netnstest.Check(t, err)
	w.Proxier = p
	netnstest.Run(t, w.Node, "nft", "add table inet others; add chain inet others forward { type filter hook forward priority 0; }; "+
		"add chain inet others nat { type nat hook prerouting priority -150; }; "+
		"add rule inet others forward counter")
	return w
}

// at writes an address of the family.
func (w *fastWorld) at(v4, v6 string) string {
	if w.family == v1.IPv6Protocol {
		return v6
	}
	return v4
}

// add adds a Service with TCP and UDP to the pods.
func (w *fastWorld) add(name, vip string, nodePort int32, change func(*v1.Service), pods ...*proxiertest.Host) {
	s := proxiertest.Service("default", name, proxiertest.ClusterIPs(vip),
		proxiertest.Port("tcp", v1.ProtocolTCP, 80), proxiertest.Port("udp", v1.ProtocolUDP, 80))
	if nodePort != 0 {
		s.Spec.Type = v1.ServiceTypeNodePort
		for i := range s.Spec.Ports {
			s.Spec.Ports[i].NodePort = nodePort
		}
	}
	if change != nil {
		change(s)
	}
	w.OnServiceAdd(s)
	w.OnEndpointSliceAdd(w.slice(name, pods...))
}

func (w *fastWorld) slice(name string, pods ...*proxiertest.Host) *discovery.EndpointSlice {
	list := []proxiertest.SliceOption{proxiertest.SlicePort("tcp", v1.ProtocolTCP, 8080), proxiertest.SlicePort("udp", v1.ProtocolUDP, 8080)}
	for _, pod := range pods {
		list = append(list, proxiertest.Endpoint(pod.Addr(w.family).String()))
	}
	return proxiertest.Slice("default", name, discovery.AddressType(w.family), list...)
}

func (w *fastWorld) start() {
	w.t.Helper()
	proxiertest.Run(w.t, w.Proxier)
	netnstest.Check(w.t, proxiertest.Sync(w.t.Context(), w))
}

// forwarded is how many packets the chain of others has seen.
func (w *fastWorld) forwarded() (packets int) {
	w.t.Helper()
	var listing struct {
		NFTables []struct {
			Rule struct {
				Expr []struct{ Counter *struct{ Packets int } }
			}
		}
	}
	netnstest.Check(w.t, json.Unmarshal([]byte(netnstest.Run(w.t, w.Node, "nft", "-j", "list", "chain", "inet", "others", "forward")), &listing))
	for _, object := range listing.NFTables {
		for _, e := range object.Rule.Expr {
			if e.Counter != nil {
				packets += e.Counter.Packets
			}
		}
	}
	return packets
}

const rounds = 10

// ask sends requests over an open flow, and returns how many packets others saw meanwhile.
func (w *fastWorld) ask(flow *proxiertest.Conn, server string) (seen int) {
	w.t.Helper()
	before := w.forwarded()
	for range rounds {
		if a, err := flow.Ask(w.t.Context()); err != nil || a.Server != server {
			w.t.Fatalf("answer %+v, error %v, want one of %s", a, err, server)
		}
	}
	return w.forwarded() - before
}

func (w *fastWorld) open(from *proxiertest.Host, network string, to netip.AddrPort) *proxiertest.Conn {
	w.t.Helper()
	flow, err := from.Open(w.t.Context(), network, to, proxiertest.AskOptions{})
	netnstest.Check(w.t, err)
	w.t.Cleanup(func() { _ = flow.Close() })
	return flow
}

func bothFamilies(t *testing.T, test func(w *fastWorld)) {
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		t.Run(string(family), func(t *testing.T) { test(newFastWorld(t, family)) })
	}
}

// Established flows of Services that ask for it skip the rules of others, and no other flows do.
func TestEstablishedFlowsSkipTheRules(t *testing.T) {
	bothFamilies(t, func(w *fastWorld) {
		vip, other := w.at("10.96.0.1", "fd00:10:96::1"), w.at("10.96.0.2", "fd00:10:96::2")
		pod, remote := w.LocalPods[0], w.RemotePods[0]
		w.add("fast", vip, 30080, nil, pod)
		w.add("slow", other, 30081, func(s *v1.Service) { s.Annotations = map[string]string{slow: "yes"} }, pod)
		w.start()
		// Another program translates an address that is not the node's, at a port that is ours: once to
		// another port of our endpoint's node, once to a pod of ours.
		foreign := w.at("203.0.113.9", "2001:db8:9::9")
		rule := "add rule inet others nat " + w.at("ip daddr ", "ip6 daddr ") + foreign + " meta l4proto { tcp, udp } th dport 30080 dnat " +
			w.at("ip to ", "ip6 to [") + remote.Addr(w.family).String() + w.at("", "]") + ":8080"
		netnstest.Run(w.t, w.Node, "nft", rule)
		node := w.Node.Addr(w.family)
		for what, c := range map[string]struct {
			to     netip.AddrPort
			server string
			fast   bool
		}{
			"cluster IP":             {netip.AddrPortFrom(netip.MustParseAddr(vip), 80), pod.Name, true},
			"node port":              {netip.AddrPortFrom(node, 30080), pod.Name, true},
			"cluster IP, not asked":  {netip.AddrPortFrom(netip.MustParseAddr(other), 80), pod.Name, false},
			"node port, not asked":   {netip.AddrPortFrom(node, 30081), pod.Name, false},
			"pod without a Service":  {netip.AddrPortFrom(pod.Addr(w.family), 8080), pod.Name, false},
			"translation of another": {netip.AddrPortFrom(netip.MustParseAddr(foreign), 30080), remote.Name, false},
		} {
			for _, network := range []string{"tcp", "udp"} {
				flow := w.open(w.Client, network, c.to)
				seen := w.ask(flow, c.server)
				if seen == 0 {
					w.t.Errorf("%s, %s: others see no packet before the flow is established", what, network)
				}
				if c.fast {
					poll.Until(w.t, what+", "+network+": others see no packets", func() bool { return w.ask(flow, c.server) == 0 })
				} else if seen := w.ask(flow, c.server); seen < 2*rounds {
					w.t.Errorf("%s, %s: others see %d packets of %d requests", what, network, seen, rounds)
				}
			}
		}
	})
}

// TestStaleFlowsOfTheFastPathEnd: when the endpoint goes, a flow of UDP gets another one. So does one
// of which the Service goes and comes back.
func TestStaleFlowsOfTheFastPathEnd(t *testing.T) {
	bothFamilies(t, func(w *fastWorld) {
		vip := w.at("10.96.0.1", "fd00:10:96::1")
		first, second := w.LocalPods[0], w.LocalPods[1]
		w.add("fast", vip, 30080, nil, first)
		w.start()
		for what, to := range map[string]netip.AddrPort{
			"cluster IP": netip.AddrPortFrom(netip.MustParseAddr(vip), 80), "node port": netip.AddrPortFrom(w.Node.Addr(w.family), 30080),
		} {
			flow := w.open(w.Client, "udp", to)
			poll.Until(w.t, what+": the flow is fast", func() bool { return w.ask(flow, first.Name) == 0 })
			w.OnEndpointSliceUpdate(nil, w.slice("fast", second))
			netnstest.Check(w.t, proxiertest.Sync(w.t.Context(), w))
			poll.Until(w.t, what+": the flow has the new endpoint", func() bool {
				a, err := flow.Ask(w.t.Context())
				return err == nil && a.Server == second.Name
			})
			poll.Until(w.t, what+": the flow is fast again", func() bool { return w.ask(flow, second.Name) == 0 })
			w.OnEndpointSliceUpdate(nil, w.slice("fast", first))
			netnstest.Check(w.t, proxiertest.Sync(w.t.Context(), w))
		}
	})
}

// TestFastFlowsOutliveARestart: a second Provider takes over, and the flow stays on the fast path.
// When the table is deleted, the flow goes on.
func TestFastFlowsOutliveARestart(t *testing.T) {
	bothFamilies(t, func(w *fastWorld) {
		vip := netip.MustParseAddr(w.at("10.96.0.1", "fd00:10:96::1"))
		pod := w.LocalPods[0]
		w.t.Run("first", func(t *testing.T) {
			first := *w
			first.t = t
			first.add("fast", vip.String(), 0, nil, pod)
			first.start()
		})
		flows := map[string]*proxiertest.Conn{}
		for _, network := range []string{"tcp", "udp"} {
			flow := w.open(w.Client, network, netip.AddrPortFrom(vip, 80))
			poll.Until(w.t, network+": the flow is fast", func() bool { return w.ask(flow, pod.Name) == 0 })
			flows[network] = flow
		}
		p, err := nftables.New(hurried(w.Config()), proxier.Deps{})
		netnstest.Check(w.t, err)
		w.Proxier = p
		w.add("fast", vip.String(), 0, nil, pod)
		w.start()
		for network, flow := range flows {
			if n := w.ask(flow, pod.Name); n != 0 {
				w.t.Errorf("%s: others see %d packets after a restart", network, n)
			}
		}
		netnstest.Run(w.t, w.Node, "nft", "delete table "+w.at("ip", "ip6")+" "+proxier.DefaultNames().Table)
		for network, flow := range flows {
			w.ask(flow, pod.Name)
			poll.Until(w.t, network+": the flow is fast again", func() bool { return w.ask(flow, pod.Name) == 0 })
		}
	})
}

// TestTrafficOfTheFastPathIsCounted: each packet of a flow counts, on both paths.
func TestTrafficOfTheFastPathIsCounted(t *testing.T) {
	bothFamilies(t, func(w *fastWorld) {
		account(w.t, w.Node, true)
		config := hurried(w.Config())
		config.CountTraffic = true
		p, err := nftables.New(config, proxier.Deps{})
		netnstest.Check(w.t, err)
		w.Proxier = p
		vip, pod := netip.MustParseAddr(w.at("10.96.0.1", "fd00:10:96::1")), w.LocalPods[0]
		w.add("fast", vip.String(), 0, nil, pod)
		w.start()
		flow := w.open(w.Client, "udp", netip.AddrPortFrom(vip, 80))
		requests := 0
		poll.Until(w.t, "the flow is fast", func() bool { requests += rounds; return w.ask(flow, pod.Name) == 0 })
		poll.Until(w.t, fmt.Sprintf("%d requests are counted", requests), func() bool {
			counts, err := w.Counts(w.t.Context(), w.family)
			netnstest.Check(w.t, err)
			for _, port := range counts.ServicePorts {
				if strings.Contains(port.Name.String(), "udp") && port.Traffic.PacketsIn == uint64(requests) && port.Traffic.PacketsOut == uint64(requests) {
					return true
				}
			}
			return false
		})
	})
}
