package ebpf_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// node is a running proxy with its engines.
type node struct {
	*proxier.Proxier
	world   *proxiertest.Topology
	sockets ebpf.Sockets
	vip     func(v1.IPFamily) netip.AddrPort // of its Service
	engines map[v1.IPFamily]*ebpf.Engine
	new     func(ebpf.Config, v1.IPFamily) (*ebpf.Engine, error)
	stop    func()

	writes atomic.Int64 // of all syncs since start
}

// ObserveSync counts.
func (n *node) ObserveSync(r proxier.SyncReport) { n.writes.Add(int64(r.Apply.Writes)) }

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{world: proxiertest.NewTopology(t), sockets: sockets(t), vip: vip, new: func(c ebpf.Config, family v1.IPFamily) (*ebpf.Engine, error) {
		return ebpf.NewEngine(c, family, proxier.Deps{})
	}}
	join(t, n.sockets, n.world.Node.NetNS())
	for _, pod := range n.world.LocalPods {
		join(t, n.sockets, pod.NetNS())
	}
	return n
}

// start runs a new Provider with a Service that has these endpoints.
func (n *node) start(t *testing.T, pods ...*proxiertest.Host) {
	t.Helper()
	n.writes.Store(0)
	config := n.world.Config()
	config.Runner = runner.Options{MinInterval: runner.Unlimited}
	n.engines = map[v1.IPFamily]*ebpf.Engine{}
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range families {
		engine, err := n.new(ebpf.Config{Config: nftables.Config{Config: config}, Sockets: n.sockets}, family)
		netnstest.Check(t, err)
		n.engines[family], engines[family] = engine, engine
	}
	p, err := proxier.New(config, proxier.Deps{Observer: n}, engines)
	netnstest.Check(t, err)
	n.Proxier = p
	n.serve(pods...)
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	n.stop = poll.Background(t, p.Run)
}

var families = []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} // read-only

func vip(family v1.IPFamily) netip.AddrPort {
	if family == v1.IPv4Protocol {
		return netip.MustParseAddrPort("10.96.0.10:80")
	}
	return netip.MustParseAddrPort("[fd00:10:96::a]:80")
}

// serve gives the Service these endpoints.
func (n *node) serve(pods ...*proxiertest.Host) {
	n.OnServiceUpdate(nil, proxiertest.Service("default", "web", proxiertest.ClusterIPs(n.vip(v1.IPv4Protocol).Addr().String(), n.vip(v1.IPv6Protocol).Addr().String()),
		proxiertest.Port("web", v1.ProtocolTCP, 80)))
	for family, kind := range map[v1.IPFamily]discovery.AddressType{v1.IPv4Protocol: discovery.AddressTypeIPv4, v1.IPv6Protocol: discovery.AddressTypeIPv6} {
		options := []proxiertest.SliceOption{proxiertest.SlicePort("web", v1.ProtocolTCP, 8080)}
		for _, pod := range pods {
			options = append(options, proxiertest.Endpoint(pod.Addr(family).String()))
		}
		n.OnEndpointSliceUpdate(nil, proxiertest.Slice("default", "web", kind, options...))
	}
}

func (n *node) translated(t *testing.T, family v1.IPFamily) connection.SocketCounts {
	t.Helper()
	counts, err := n.engines[family].SocketCounts()
	netnstest.Check(t, err)
	return counts
}

// TestWhoTranslates counts the sockets that the programs have translated, so that no test passes because
// rules do it all.
func TestWhoTranslates(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pod, node, endpoint := n.world.LocalPods[0], n.world.Node, n.world.RemotePods[0]
	// The programs also see the sockets of others in the cgroup to VIPs that they have, as of another run of this test,
	// in network namespaces that are not listed here.
	number := 1 + rand.IntN(60_000)
	vip := func(family v1.IPFamily) netip.AddrPort {
		if family == v1.IPv4Protocol {
			return netip.MustParseAddrPort(fmt.Sprintf("10.97.%d.%d:80", number>>8, number&255))
		}
		return netip.MustParseAddrPort(fmt.Sprintf("[fd00:10:97::%x]:80", number))
	}
	n.vip = vip
	n.start(t, endpoint)
	netnstest.Check(t, proxiertest.Sync(t.Context(), n))
	for _, family := range families {
		for _, c := range []struct {
			name string
			from *proxiertest.Host
			addr netip.Addr
			want connection.SocketCounts
		}{
			{"a pod", pod, netip.Addr{}, connection.SocketCounts{Translated: 1}},
			{"a pod's bound socket", pod, pod.Addr(family), connection.SocketCounts{Translated: 1}},
			{"the node", node, netip.Addr{}, connection.SocketCounts{Translated: 1}},
			{"the node's bound socket", node, node.Addr(family), connection.SocketCounts{Bound: 1}},
			{"a host outside", n.world.Client, netip.Addr{}, connection.SocketCounts{Namespace: 1}},
		} {
			before := n.translated(t, family)
			answer, err := c.from.Ask(t.Context(), "tcp", vip(family), proxiertest.AskOptions{From: c.addr})
			after := n.translated(t, family)
			got := connection.SocketCounts{Translated: after.Translated - before.Translated, Bound: after.Bound - before.Bound, Namespace: after.Namespace - before.Namespace}
			if err != nil || answer.Server != endpoint.Name || got != c.want {
				t.Errorf("%v, %s: answer %+v, error %v, counts %+v; want %+v", family, c.name, answer, err, got, c.want)
			}
		}
	}
	if err := n.sockets.Namespaces.Remove(pod.NetNS()); err != nil {
		t.Fatal(err)
	}
	before := n.translated(t, v1.IPv4Protocol)
	if _, err := pod.Ask(t.Context(), "tcp", vip(v1.IPv4Protocol), proxiertest.AskOptions{}); err != nil {
		t.Error(err)
	}
	if after := n.translated(t, v1.IPv4Protocol); after.Translated != before.Translated || after.Namespace != before.Namespace+1 {
		t.Errorf("counts %+v and %+v; want the rules to serve a pod that has left the list", before, after)
	}
}

// TestThePeerIsTheVIP: getpeername(2) returns what the program has connected to, unless RealPeer is set. An
// IPv6 socket that connects to a mapped IPv4 address is translated too.
func TestThePeerIsTheVIP(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	endpoint := n.world.RemotePods[0]
	for _, n.sockets.RealPeer = range []bool{false, true} { // a change of settings replaces the programs
		n.start(t, endpoint)
		netnstest.Check(t, proxiertest.Sync(t.Context(), n))
		for _, family := range families {
			for _, v6 := range []bool{false, true} {
				if !v6 && family == v1.IPv6Protocol {
					continue
				}
				want := vip(family)
				if n.sockets.RealPeer {
					want = netip.AddrPortFrom(endpoint.Addr(family), 8080)
				}
				before := n.translated(t, family)
				if got := peer(t, n.world.LocalPods[0], v6, vip(family)); got != want {
					t.Errorf("%v, IPv6 socket %v: peer %v, want %v", family, v6, got, want)
				}
				if after := n.translated(t, family); after.Translated != before.Translated+1 {
					t.Errorf("%v, IPv6 socket %v: %d sockets translated, want 1", family, v6, after.Translated-before.Translated)
				}
			}
		}
		n.stop()
	}
}

// peer connects and returns what getpeername does.
func peer(t *testing.T, from *proxiertest.Host, v6 bool, to netip.AddrPort) (addr netip.AddrPort) {
	t.Helper()
	netnstest.Check(t, from.Do(func() error {
		domain, sockaddr := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Port: int(to.Port())})
		if v6 {
			domain, sockaddr = unix.AF_INET6, &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
		} else {
			sockaddr.(*unix.SockaddrInet4).Addr = to.Addr().As4() //nolint:forcetypeassert // see above
		}
		fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(fd) }()
		if err := unix.Connect(fd, sockaddr); err != nil {
			return err
		}
		name, err := unix.Getpeername(fd)
		switch name := name.(type) {
		case *unix.SockaddrInet4:
			addr = netip.AddrPortFrom(netip.AddrFrom4(name.Addr), uint16(name.Port))
		case *unix.SockaddrInet6:
			addr = netip.AddrPortFrom(netip.AddrFrom16(name.Addr).Unmap(), uint16(name.Port))
		}
		return err
	}))
	return addr
}

// TestRestart: connections go on without a process and through a restart, which writes nothing, and a
// process that finds something else repairs it.
func TestRestart(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.world.RemotePods
	n.start(t, pods[0])
	netnstest.Check(t, proxiertest.Sync(t.Context(), n))
	pod := n.world.LocalPods[0]
	mustReach := func(endpoint *proxiertest.Host) {
		t.Helper()
		for _, family := range families {
			answer, err := pod.Ask(t.Context(), "tcp", vip(family), proxiertest.AskOptions{})
			if err != nil || answer.Server != endpoint.Name {
				t.Errorf("answer %+v, error %v; want %s", answer, err, endpoint.Name)
			}
		}
	}
	n.stop()
	mustReach(pods[0])
	if dirs, err := filepath.Glob(n.sockets.BPFFS + "/serviceplane/*/ip[46]/v1/links-*/connect*"); err != nil || len(dirs) != 3 {
		t.Errorf("links %v, error %v", dirs, err)
	}
	n.start(t, pods[0])
	netnstest.Check(t, proxiertest.Sync(t.Context(), n))
	if writes := n.writes.Load(); writes > 0 {
		t.Errorf("a restart writes %d objects", writes)
	}
	n.stop()
	links, err := filepath.Glob(n.sockets.BPFFS + "/serviceplane/*/ip4/v1/links-*/connect4-*")
	netnstest.Check(t, errors.Join(err, os.Remove(links[0]))) // which detaches the program
	n.start(t, pods[1])
	netnstest.Check(t, proxiertest.Sync(t.Context(), n))
	before := n.translated(t, v1.IPv4Protocol)
	mustReach(pods[1])
	if after := n.translated(t, v1.IPv4Protocol); after.Translated != before.Translated+1 {
		t.Errorf("%d sockets translated, want 1: the link is there again", after.Translated-before.Translated)
	}
	netnstest.Check(t, n.Cleanup(t.Context()))
	if left, err := os.Stat(filepath.Join(n.sockets.BPFFS, "serviceplane")); err == nil {
		t.Errorf("after Cleanup: %v", left)
	}
	poll.Until(t, "no Service answers after Cleanup", func() bool { // the kernel detaches in the background
		_, err := pod.Ask(t.Context(), "tcp", vip(v1.IPv4Protocol), proxiertest.AskOptions{Timeout: 300 * time.Millisecond})
		return err != nil
	})
}

// TestWhatIsMissing: the rules do everything, a Condition says it, and no sync fails, so that stale flows
// of UDP are deleted. When it comes, sockets are translated.
func TestWhatIsMissing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	good := n.sockets
	link := filepath.Join(t.TempDir(), "link")
	for what, spoil := range map[string]func(*ebpf.Sockets) (comes string){
		"is not a BPF file system":        func(s *ebpf.Sockets) string { s.BPFFS = link; return good.BPFFS },
		"is not a directory of cgroup v2": func(s *ebpf.Sockets) string { s.Cgroups = []string{link}; return good.Cgroups[0] },
	} {
		n.sockets = good
		comes := spoil(&n.sockets)
		netnstest.Check(t, os.Symlink(t.TempDir(), link))
		n.start(t, n.world.RemotePods[0])
		netnstest.Check(t, proxiertest.Sync(t.Context(), n))
		if _, err := n.world.LocalPods[0].Ask(t.Context(), "tcp", vip(v1.IPv4Protocol), proxiertest.AskOptions{}); err != nil {
			t.Error(err)
		}
		if c := n.Status().Conditions; len(c) != len(families) || c[0].Type != proxier.ConditionSockets || !strings.Contains(c[0].Message, what) {
			t.Errorf("conditions %+v, want one of each family with %q", c, what)
		}
		netnstest.Check(t, os.Remove(link))
		netnstest.Check(t, os.Symlink(comes, link))
		poll.Until(t, "sockets are translated", func() bool { return len(n.Status().Conditions) == 0 })
		n.mustTranslate(t)
		n.stop()
		netnstest.Check(t, os.Remove(link))
	}
}

// TestMPTCP: the kernel connects a socket of TCP for one of MPTCP, and the programs translate that one.
// getpeername(2) of the socket of MPTCP shows the endpoint.
func TestMPTCP(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pod := n.world.RemotePods[0]
	n.start(t, pod)
	netnstest.Check(t, proxiertest.Sync(t.Context(), n))
	for _, family := range families {
		before := n.translated(t, family).Translated
		netnstest.Check(t, n.world.LocalPods[0].Do(func() error {
			domain := map[v1.IPFamily]int{v1.IPv4Protocol: unix.AF_INET, v1.IPv6Protocol: unix.AF_INET6}[family]
			fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
			if errors.Is(err, unix.EPROTONOSUPPORT) {
				t.Logf("this kernel has no MPTCP: %v", err)
				return nil
			} else if err != nil {
				return err
			}
			defer func() { _ = unix.Close(fd) }()
			if err := unix.Connect(fd, sockaddrOf(vip(family))); err != nil {
				return err
			}
			want := sockaddrOf(netip.AddrPortFrom(pod.Addr(family), 8080))
			got, err := unix.Getpeername(fd)
			if after := n.translated(t, family).Translated; !reflect.DeepEqual(got, want) || after != before+1 {
				t.Errorf("%s: peer %+v, %d sockets translated, want %+v and 1", family, got, after-before, want)
			}
			return err
		}))
	}
}

// TestConnectsDuringChanges: while endpoints are replaced and the maps grow, each connection is
// answered, and sockets do it.
func TestConnectsDuringChanges(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.world.RemotePods
	n.start(t, pods...)
	netnstest.Check(t, proxiertest.Sync(t.Context(), n))
	pod, before := n.world.LocalPods[0], n.translated(t, v1.IPv6Protocol)
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	var connections atomic.Int64
	for _, family := range families {
		clients.Go(func() {
			err := pod.Do(func() error {
				for ctx.Err() == nil {
					flow, err := netns.OpenHere(t.Context(), "tcp", vip(family), netns.AskOptions{Timeout: time.Minute})
					if err != nil {
						return err
					}
					_, err = flow.Ask(t.Context())
					if err := errors.Join(err, flow.Close()); err != nil {
						return err
					}
					connections.Add(1)
				}
				return nil
			})
			if err != nil {
				t.Errorf("%v: %v", family, err)
			}
		})
	}
	const changes, services = 200, 400
	for i := range changes {
		n.serve(pods[i%len(pods)], pods[(i+1)%len(pods)])
		for j := i * services / changes; j < (i+1)*services/changes; j++ { // 64 fit at first
			addr := netip.AddrFrom4([4]byte{10, 96, byte(1 + j/250), byte(j % 250)})
			name := "other-" + strconv.Itoa(j)
			n.OnServiceAdd(proxiertest.Service("default", name, proxiertest.ClusterIPs(addr.String()), proxiertest.Port("web", v1.ProtocolTCP, 80)))
			n.OnEndpointSliceAdd(proxiertest.Slice("default", name, discovery.AddressTypeIPv4,
				proxiertest.SlicePort("web", v1.ProtocolTCP, 8080), proxiertest.Endpoint(pods[j%len(pods)].Addr(v1.IPv4Protocol).String())))
		}
		netnstest.Check(t, proxiertest.Sync(t.Context(), n))
	}
	stop()
	clients.Wait()
	after := n.translated(t, v1.IPv6Protocol)
	if after.Translated == before.Translated || after.Empty+after.NoMemory > 0 {
		t.Errorf("counts %+v, %+v before", after, before)
	}
	t.Logf("%d connections during %d changes", connections.Load(), changes)
	for j := range services {
		addr := netip.AddrFrom4([4]byte{10, 96, byte(1 + j/250), byte(j % 250)})
		answer, err := pod.Ask(t.Context(), "tcp", netip.AddrPortFrom(addr, 80), proxiertest.AskOptions{})
		if want := pods[j%len(pods)].Name; err != nil || answer.Server != want {
			t.Errorf("Service %d: answer %+v, error %v; want %s", j, answer, err, want)
		}
	}
	if all := n.translated(t, v1.IPv4Protocol); all.Empty+all.NoMemory > 0 {
		t.Errorf("counts %+v", all)
	}
}
