package ebpf_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

const (
	slow     = "slow" // the annotation of Services that do not ask for the fast path
	bulkPort = 9000
	nodePort = 30080
)

// fastNode is a node with a fast path, for one family.
type fastNode struct {
	*proxier.Proxier
	t      *testing.T
	world  *proxiertest.Topology
	family v1.IPFamily
	config ebpf.Config
	clsact bool
	// loses lets datagrams get lost: the kernel takes a device out of use for a moment, and drops what is sent
	// there, while a clsact qdisc comes or goes.
	loses  bool
	engine *ebpf.Engine
	stop   func()
	writes atomic.Int64
}

func (n *fastNode) ObserveSync(r proxier.SyncReport) { n.writes.Add(int64(r.Apply.Writes)) }

func newFastNode(t *testing.T, family v1.IPFamily) *fastNode {
	t.Helper()
	n := &fastNode{t: t, world: proxiertest.NewTopology(t), family: family}
	n.liberal("1")
	common := n.world.Config()
	common.Families = []v1.IPFamily{family}
	common.Runner = runner.Options{MinInterval: runner.Unlimited}
	common.Tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) { p.FastPath = s.Annotations[slow] == "" }
	n.config = ebpf.Config{Config: nftables.Config{Config: common}, Sockets: sockets(t)}
	isPod := func(name string) bool { return strings.HasPrefix(name, "pod") }
	n.config.FastPathByBPF, n.config.FastPathPeer = true, isPod
	n.config.FastPathDevice = func(name string) bool { return isPod(name) || name == "client" || name == "uplink" }
	return n
}

// liberalFile lets TCP connections return from the fast path to the rules.
const liberalFile = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal"

func (n *fastNode) liberal(value string) {
	n.t.Helper()
	netnstest.Check(n.t, n.world.Node.Do(func() error {
		return os.WriteFile(liberalFile, []byte(value), 0)
	}))
}

// start runs a new Provider.
func (n *fastNode) start() {
	n.t.Helper()
	n.writes.Store(0)
	deps := nodedeps.Complete(n.config.Config.Config, proxier.Deps{Observer: n, Logger: zaptest.NewLogger(n.t, zaptest.Level(zap.WarnLevel))})
	engine, err := ebpf.NewEngine(n.config, n.family, deps)
	netnstest.Check(n.t, err)
	if n.clsact {
		engine.UseClsact()
	}
	p, err := proxier.New(n.config.Config.Config, deps, map[v1.IPFamily]proxier.Engine{n.family: engine})
	netnstest.Check(n.t, err)
	n.Proxier, n.engine = p, engine
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	n.stop = poll.Background(n.t, p.Run)
}

func (n *fastNode) at(v4, v6 string) netip.Addr {
	if n.family == v1.IPv6Protocol {
		return netip.MustParseAddr(v6)
	}
	return netip.MustParseAddr(v4)
}

func (n *fastNode) vip() netip.Addr   { return n.at("10.96.0.1", "fd00:10:96::1") }
func (n *fastNode) other() netip.Addr { return n.at("10.96.0.2", "fd00:10:96::2") }

// serve gives the Services fast and slow this endpoint.
func (n *fastNode) serve(pod *proxiertest.Host) {
	n.t.Helper()
	for i, name := range []string{"fast", "slow"} {
		s := proxiertest.Service("default", name, proxiertest.ClusterIPs([]netip.Addr{n.vip(), n.other()}[i].String()),
			proxiertest.Port("tcp", v1.ProtocolTCP, 80), proxiertest.Port("udp", v1.ProtocolUDP, 80), proxiertest.Port("bulk", v1.ProtocolTCP, 90))
		s.Spec.Type = v1.ServiceTypeNodePort
		for j := range s.Spec.Ports {
			s.Spec.Ports[j].NodePort = int32(nodePort + 10*i + j/2)
		}
		if i == 1 {
			s.Annotations = map[string]string{slow: "yes"}
		}
		n.OnServiceUpdate(nil, s)
		n.OnEndpointSliceUpdate(nil, proxiertest.Slice("default", name, discovery.AddressType(n.family),
			proxiertest.SlicePort("tcp", v1.ProtocolTCP, 8080), proxiertest.SlicePort("udp", v1.ProtocolUDP, 8080),
			proxiertest.SlicePort("bulk", v1.ProtocolTCP, bulkPort), proxiertest.Endpoint(pod.Addr(n.family).String())))
	}
	netnstest.Check(n.t, proxiertest.Sync(n.t.Context(), n))
}

// forwardCounts are those of an engine.
type forwardCounts struct{ Packets, ToPeer uint64 }

func (n *fastNode) counts() (c forwardCounts) {
	n.t.Helper()
	var err error
	c.Packets, c.ToPeer, err = n.engine.ForwardCounts()
	netnstest.Check(n.t, err)
	return c
}

func (n *fastNode) open(from *proxiertest.Host, network string, to netip.AddrPort) *proxiertest.Conn {
	n.t.Helper()
	flow, err := from.Open(n.t.Context(), network, to, proxiertest.AskOptions{})
	netnstest.Check(n.t, err)
	n.t.Cleanup(func() { _ = flow.Close() })
	return flow
}

const requests = 10

// ask sends requests over an open flow, and returns how many packets were forwarded meanwhile.
func (n *fastNode) ask(flow *proxiertest.Conn, server string) uint64 {
	n.t.Helper()
	before := n.counts()
	for range requests {
		a, err := flow.Ask(n.t.Context())
		if n.loses && errors.Is(err, proxiertest.ErrTimeout) {
			continue
		}
		if err != nil || a.Server != server {
			n.t.Fatalf("answer %+v, error %v, want one of %s", a, err, server)
		}
	}
	return n.counts().Packets - before.Packets
}

// establish asks until connection tracking has decided all about the flow: UDP takes two seconds.
func (n *fastNode) establish(flow *proxiertest.Conn, server string) {
	n.t.Helper()
	poll.Until(n.t, "the flow is forwarded", func() bool { return n.ask(flow, server) >= 2*requests })
}

// eachFamily runs a test with one local endpoint.
func eachFamily(t *testing.T, test func(t *testing.T, n *fastNode)) {
	for _, family := range chance.Some(t, 1, families...) {
		t.Run(string(family), func(t *testing.T) {
			t.Parallel()
			test(t, newFastNode(t, family))
		})
	}
}

// askLong asks for as long as a flow needs until it is forwarded.
func (n *fastNode) askLong(flow *proxiertest.Conn, network, server string) (packets uint64) {
	n.t.Helper()
	for start := time.Now(); packets == 0 && time.Since(start) < 2500*time.Millisecond; {
		packets += n.ask(flow, server)
		if network == "tcp" {
			break
		}
		time.Sleep(50 * time.Millisecond) // it watches for a while, and needs no more packets
	}
	return packets
}

// mustForward wants that all packets of a flow are forwarded.
func (n *fastNode) mustForward(flow *proxiertest.Conn, network string, pod *proxiertest.Host, peer bool) {
	n.t.Helper()
	n.establish(flow, pod.Name)
	before := n.counts()
	n.ask(flow, pod.Name)
	after := n.counts()
	packets, toPeer := after.Packets-before.Packets, after.ToPeer-before.ToPeer
	if packets < 2*requests || network == "udp" && packets != 2*requests || peer && toPeer < requests {
		n.t.Errorf("%d packets are forwarded, %d to a peer, of %d requests", packets, toPeer, requests)
	}
}

// Only established flows of Services that ask for it are forwarded, with all packets of both directions, and to a
// local pod by its end of the veth.
func TestEstablishedFlowsAreForwarded(t *testing.T) {
	t.Parallel()
	eachFamily(t, func(t *testing.T, n *fastNode) {
		n.start()
		local, remote := n.world.LocalPods[0], n.world.RemotePods[0]
		for _, pod := range []*proxiertest.Host{local, remote} {
			n.serve(pod)
			node := n.world.Node.Addr(n.family)
			for what, c := range map[string]struct {
				from *proxiertest.Host
				to   netip.AddrPort
				fast bool
			}{
				"cluster IP":            {n.world.Client, netip.AddrPortFrom(n.vip(), 80), true},
				"node port":             {n.world.Client, netip.AddrPortFrom(node, nodePort), true},
				"from a pod":            {n.world.LocalPods[1], netip.AddrPortFrom(n.vip(), 80), true},
				"cluster IP, not asked": {n.world.Client, netip.AddrPortFrom(n.other(), 80), false},
				"node port, not asked":  {n.world.Client, netip.AddrPortFrom(node, nodePort+10), false},
				"without a Service":     {n.world.Client, netip.AddrPortFrom(pod.Addr(n.family), 8080), false},
				"to itself":             {local, netip.AddrPortFrom(n.vip(), 80), pod != local},
			} {
				for _, network := range []string{"tcp", "udp"} {
					flow := n.open(c.from, network, c.to)
					if c.fast {
						n.mustForward(flow, network, pod, pod == local && c.from == n.world.Client)
					} else if got := n.askLong(flow, network, pod.Name); got > 0 {
						t.Errorf("%s, %s, to %s: %d packets are forwarded", what, network, pod.Name, got)
					}
					_ = flow.Close() // an idle connection is probed, which counts
					if t.Failed() {
						t.Fatalf("%s, %s, to %s", what, network, pod.Name)
					}
				}
			}
		}
	})
}

// A flow that is deleted returns to the rules, and so does a flow whose endpoint goes. Connections go on when the
// fast path ends.
func TestFlowsReturnToTheRules(t *testing.T) {
	t.Parallel()
	eachFamily(t, func(t *testing.T, n *fastNode) {
		n.start()
		first, second := n.world.LocalPods[0], n.world.LocalPods[1]
		n.serve(first)
		udp := n.open(n.world.Client, "udp", netip.AddrPortFrom(n.vip(), 80))
		n.establish(udp, first.Name)
		tcp := n.open(n.world.Client, "tcp", netip.AddrPortFrom(n.vip(), 80))
		n.establish(tcp, first.Name)
		netnstest.Check(t, n.world.Node.Do(func() error {
			filter := &netlink.ConntrackFilter{}
			err := filter.AddProtocol(unix.IPPROTO_UDP)
			_, failed := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, map[v1.IPFamily]netlink.InetFamily{v1.IPv4Protocol: unix.AF_INET, v1.IPv6Protocol: unix.AF_INET6}[n.family], filter)
			return errors.Join(err, failed)
		}))
		if got := n.ask(udp, first.Name); got > requests*2-2 {
			t.Errorf("%d packets of a deleted flow are forwarded", got)
		}
		n.establish(udp, first.Name)
		n.serve(second)
		poll.Until(t, "the flow has the new endpoint", func() bool {
			a, err := udp.Ask(t.Context())
			return err == nil && a.Server == second.Name
		})
		n.establish(udp, second.Name)
		if got := n.ask(tcp, first.Name); got < 2*requests {
			t.Errorf("%d packets of an open connection are forwarded", got)
		}
		n.stop()
		n.config.FastPathByBPF, n.config.FastPathPeer = false, nil
		n.start()
		n.serve(second)
		for flow, server := range map[*proxiertest.Conn]string{tcp: first.Name, udp: second.Name} {
			if a, err := flow.Ask(t.Context()); err != nil || a.Server != server {
				t.Errorf("without fast path: answer %+v, error %v; want %s", a, err, server)
			}
		}
		if left, _ := filepath.Glob(n.config.Sockets.BPFFS + "/serviceplane/*/*/forward*"); len(left) > 0 {
			t.Errorf("without fast path there is %v", left)
		}
	})
}

// TestStrictTrackingKeepsTCP: without be_liberal a connection could not return to the rules.
func TestStrictTrackingKeepsTCP(t *testing.T) {
	t.Parallel()
	eachFamily(t, func(t *testing.T, n *fastNode) {
		n.liberal("0")
		n.start()
		pod := n.world.LocalPods[0]
		n.serve(pod)
		flow := n.open(n.world.Client, "tcp", netip.AddrPortFrom(n.vip(), 80))
		if got := n.ask(flow, pod.Name); got > 0 {
			t.Errorf("%d packets are forwarded", got)
		}
		n.stop()
		n.liberal("1")
		n.start()
		n.serve(pod)
		n.establish(flow, pod.Name)
	})
}

// TestTheFastPathOutlivesTheProcess: flows stay fast without one and through a restart, which writes
// nothing. What somebody has removed is there again. Cleanup removes everything.
func TestTheFastPathOutlivesTheProcess(t *testing.T) {
	t.Parallel()
	for _, clsact := range []bool{false, true} {
		t.Run(fmt.Sprintf("clsact %v", clsact), func(t *testing.T) {
			t.Parallel()
			eachFamily(t, func(t *testing.T, n *fastNode) {
				n.clsact = clsact
				n.start()
				pod := n.world.LocalPods[0]
				n.serve(pod)
				flows := map[string]*proxiertest.Conn{}
				for _, network := range []string{"tcp", "udp"} {
					flows[network] = n.open(n.world.Client, network, netip.AddrPortFrom(n.vip(), 80))
					n.establish(flows[network], pod.Name)
				}
				before := n.counts()
				n.stop()
				for network, flow := range flows {
					for range requests {
						if a, err := flow.Ask(t.Context()); err != nil || a.Server != pod.Name {
							t.Errorf("%s: answer %+v, error %v without a process", network, a, err)
						}
					}
				}
				n.start()
				n.serve(pod)
				if writes := n.writes.Load(); writes > 0 {
					t.Errorf("a restart writes %d objects", writes)
				}
				if got := n.counts().Packets - before.Packets; got < 4*requests {
					t.Errorf("%d packets were forwarded without a process", got)
				}
				for network, flow := range flows {
					if got := n.ask(flow, pod.Name); got < 2*requests {
						t.Errorf("%s: %d packets are forwarded after a restart", network, got)
					}
				}
				if clsact {
					n.loses = true
					netnstest.Run(t, n.world.Node, "tc", "qdisc", "del", "dev", "client", "clsact")
				} else {
					links, err := filepath.Glob(n.config.Sockets.BPFFS + "/serviceplane/*/*/forward-v1/link-*")
					netnstest.Check(t, err)
					for _, l := range links {
						netnstest.Check(t, os.Remove(l))
					}
				}
				poll.Until(t, "no packets forwarded without a program at the client's device", func() bool {
					return n.ask(flows["udp"], pod.Name) <= requests
				})
				n.establish(flows["udp"], pod.Name) // the loss is found within ten seconds
				netnstest.Check(t, n.Cleanup(t.Context()))
				if _, err := os.Stat(filepath.Join(n.config.Sockets.BPFFS, "serviceplane")); err == nil {
					t.Error("after Cleanup something is pinned")
				}
				if left := netnstest.Run(t, n.world.Node, "tc", "qdisc", "show") + netnstest.Run(t, n.world.Node, "tc", "filter", "show", "dev", "client", "ingress"); strings.Contains(left, "clsact") || strings.Contains(left, "serviceplane") {
					t.Errorf("after Cleanup:\n%s", left)
				}
			})
		})
	}
}

// TestAFastPathThatCannotBeOpenedEnds: it would not follow changes any more. The rules have its flows, and the
// next full sync gives them back.
func TestAFastPathThatCannotBeOpenedEnds(t *testing.T) {
	t.Parallel()
	eachFamily(t, func(t *testing.T, n *fastNode) {
		n.start()
		pod := n.world.LocalPods[0]
		n.serve(pod)
		flow := n.open(n.world.Client, "udp", netip.AddrPortFrom(n.vip(), 80))
		n.establish(flow, pod.Name)
		n.stop()
		pins, err := filepath.Glob(n.config.Sockets.BPFFS + "/serviceplane/*/*/forward-v1/flows")
		netnstest.Check(t, err)
		for _, pin := range pins { // another program replaces it
			netnstest.Check(t, errors.Join(os.Remove(pin), os.MkdirAll(filepath.Join(pin, "another"), 0o700)))
		}
		n.start()
		n.serve(pod)
		_, _, err = n.engine.ForwardCounts()
		left, _ := filepath.Glob(n.config.Sockets.BPFFS + "/serviceplane/*/*/forward-v1")
		if a, asked := flow.Ask(t.Context()); len(pins) != 1 || err == nil || len(left) > 0 || asked != nil || a.Server != pod.Name {
			t.Errorf("%d maps are replaced; then answer %+v, error %v, forwarding: %v, left: %v", len(pins), a, asked, err, left)
		}
		n.stop()
		n.start()
		n.serve(pod)
		n.establish(flow, pod.Name)
	})
}

// The fast path follows devices that come and go, without an update, also while another program is at one of them.
func TestDevicesComeAndGo(t *testing.T) {
	t.Parallel()
	for _, clsact := range []bool{false, true} {
		t.Run(fmt.Sprintf("clsact %v", clsact), func(t *testing.T) {
			t.Parallel()
			n := newFastNode(t, v1.IPv4Protocol)
			n.clsact = clsact
			n.start()
			n.serve(n.world.LocalPods[0])
			devices := func() string {
				var b strings.Builder
				netnstest.Check(t, n.engine.Dump(t.Context(), &b))
				var names []string
				for line := range strings.Lines(b.String()) {
					if name, is := strings.CutPrefix(strings.TrimSpace(line), "forward from and to device "); is {
						names = append(names, name)
					}
				}
				return strings.Join(names, " ")
			}
			const all = "client pod0 pod1 pod2 uplink"
			if got := devices(); got != all {
				t.Errorf("devices %q, want %q", got, all)
			}
			netnstest.Run(t, n.world.Node, "ip", "link", "add", "pod9", "type", "veth", "peer", "name", "other9")
			poll.Until(t, "a new device takes part", func() bool { return devices() == "client pod0 pod1 pod2 pod9 uplink" })
			netnstest.Run(t, n.world.Node, "ip", "link", "del", "pod9")
			poll.Until(t, "a device that went is gone", func() bool { return devices() == all })
			links, err := filepath.Glob(n.config.Sockets.BPFFS + "/serviceplane/*/*/forward-v1/link-*")
			if want := map[bool]int{false: 5}[clsact]; err != nil || len(links) != want {
				t.Errorf("links %v, error %v; want %d", links, err, want)
			}
		})
	}
}
