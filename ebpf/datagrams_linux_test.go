package ebpf_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"reflect"
	"strings"
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
	"github.com/serviceplane/serviceplane/proxiertest"
)

var staleSockets = flag.Int("datagrams.stale", 500, "UDP sockets that must end in TestUDPStaleSocketsEnd, beside half as many that must not")

// newUDPNode is a node where UDP is translated too. The namespaces of the test have no name and no process.
func newUDPNode(t *testing.T) *node {
	t.Helper()
	n := newNode(t)
	n.sockets.UDP = true
	n.sockets.NetNSs = func() (all []string, err error) {
		for _, h := range append(n.world.LocalPods, n.world.Node) {
			all = append(all, h.NetNS())
		}
		return all, nil
	}
	return n
}

// udpIsForbidden is whether this machine's kernel knows the programs that UDP needs, and forbids them: then the last
// test of this file says what happens, and the others run in virtual machines only.
func udpIsForbidden(t *testing.T) bool {
	t.Helper()
	err := ebpf.CanDestroy(v1.IPv4Protocol)
	if errors.Is(err, unix.EPERM) {
		t.Log(err)
	}
	return errors.Is(err, unix.EPERM)
}

// dnsVIP is the VIP of one of the Services that serveUDP makes.
func dnsVIP(family v1.IPFamily, number byte) netip.AddrPort {
	if family == v1.IPv4Protocol {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 1, number}), 53)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte{0: 0xfd, 3: 0x10, 5: 0x96, 14: 1, 15: number}), 53)
}

// serveUDP gives a Service of UDP these endpoints, and syncs.
func (n *node) serveUDP(t *testing.T, number byte, pods ...*proxiertest.Host) {
	t.Helper()
	name := fmt.Sprintf("dns-%d", number)
	n.OnServiceUpdate(nil, proxiertest.Service("default", name, proxiertest.ClusterIPs(dnsVIP(v1.IPv4Protocol, number).Addr().String(), dnsVIP(v1.IPv6Protocol, number).Addr().String()),
		proxiertest.Port("dns", v1.ProtocolUDP, 53)))
	for _, family := range families {
		kind := map[v1.IPFamily]discovery.AddressType{v1.IPv4Protocol: discovery.AddressTypeIPv4, v1.IPv6Protocol: discovery.AddressTypeIPv6}[family]
		options := []proxiertest.SliceOption{proxiertest.SlicePort("dns", v1.ProtocolUDP, 8080)}
		for _, pod := range pods {
			options = append(options, proxiertest.Endpoint(pod.Addr(family).String()))
		}
		n.OnEndpointSliceUpdate(nil, proxiertest.Slice("default", name, kind, options...))
	}
	netnstest.Check(t, proxiertest.Sync(t.Context(), n))
}

// unconnected is a UDP socket that is not connected; network "udp" is an IPv6 socket, for mapped addresses too.
type unconnected struct {
	*net.UDPConn

	t *testing.T
}

func newUnconnected(t *testing.T, from *proxiertest.Host, network, address string) *unconnected {
	t.Helper()
	u := &unconnected{t: t}
	netnstest.Check(t, from.Do(func() error {
		addr, err := net.ResolveUDPAddr(network, address)
		if err == nil {
			u.UDPConn, err = net.ListenUDP(network, addr)
		}
		return err
	}))
	t.Cleanup(func() { _ = u.Close() })
	return u
}

// ask sends a question, again if there is no answer for a second, and returns the name of the server. The answer
// must come from the address that was asked.
func (u *unconnected) ask(to netip.AddrPort) (server string) {
	u.t.Helper()
	answer := make([]byte, 512)
	for range 20 {
		if _, err := u.WriteToUDPAddrPort([]byte("?\n"), to); err != nil {
			u.t.Errorf("send to %v: %v", to, err)
			return ""
		}
		netnstest.Check(u.t, u.SetReadDeadline(time.Now().Add(time.Second)))
		n, from, err := u.ReadFromUDPAddrPort(answer)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		netnstest.Check(u.t, err)
		if got := netip.AddrPortFrom(from.Addr().Unmap(), from.Port()); got != to {
			u.t.Errorf("asked %v, the answer is from %v", to, got)
		}
		a, err := netns.ParseAnswer(strings.TrimSpace(string(answer[:n])))
		netnstest.Check(u.t, err)
		return a.Server
	}
	u.t.Errorf("no answer from %v", to)
	return ""
}

// TestUDPFollows: a socket that is not connected keeps its endpoint while that is one of the Service, then
// goes to another one, and all answers come from the VIP. It has two VIPs by sockets, and others by
// rules.
func TestUDPFollows(t *testing.T) {
	t.Parallel()
	if udpIsForbidden(t) {
		return
	}
	n := newUDPNode(t)
	n.start(t)
	pods := n.world.RemotePods
	for number := range byte(4) {
		n.serveUDP(t, number, pods[min(number, 1)])
	}
	for _, family := range families {
		for _, c := range []struct{ name, network, address string }{
			{"IPv4 socket", "udp4", "0.0.0.0:0"}, {"IPv6 socket", "udp6", "[::]:0"}, {"socket of both", "udp", "[::]:0"},
		} {
			if c.network == "udp4" && family == v1.IPv6Protocol || c.network == "udp6" && family == v1.IPv4Protocol {
				continue
			}
			t.Run(string(family)+"/"+c.name, func(t *testing.T) {
				n.serveUDP(t, 0, pods[0])
				n.serveUDP(t, 1, pods[1])
				u := newUnconnected(t, n.world.LocalPods[0], c.network, c.address)
				before := n.translated(t, family)
				must := func(number byte, want *proxiertest.Host) {
					t.Helper()
					if got := u.ask(dnsVIP(family, number)); got != want.Name {
						t.Errorf("VIP %d: %s answers, want %s", number, got, want.Name)
					}
				}
				for number := range byte(4) {
					must(number, pods[min(number, 1)])
				}
				n.serveUDP(t, 0, pods...)
				for range 20 {
					must(0, pods[0])
				}
				if after := n.translated(t, family); after.Translated != before.Translated+2 || after.Bound+after.Empty+after.NoMemory > 0 {
					t.Errorf("counts %+v, %+v before; want 2 more translated", after, before)
				}
				n.serveUDP(t, 1, pods[2])
				must(1, pods[2])
				n.serveUDP(t, 0, pods[1])
				must(0, pods[1])
				n.serveUDP(t, 1, pods[1]) // as the other one: rules have it from now on
				must(1, pods[1])
				must(0, pods[1])
				if after := n.translated(t, family); after.Translated != before.Translated+4 {
					t.Errorf("%d more translated, want 4", after.Translated-before.Translated)
				}
			})
		}
	}
}

// TestUDPSocketsEnd: a connected socket goes to its endpoint while that serves, and shows the VIP. Then it
// ends, and the next one gets another endpoint; also if no process ran when the endpoint went.
func TestUDPSocketsEnd(t *testing.T) {
	t.Parallel()
	if udpIsForbidden(t) {
		return
	}
	n := newUDPNode(t)
	n.start(t)
	pods := n.world.RemotePods
	for _, family := range families {
		n.serveUDP(t, 0, pods[0])
		flow := n.openUDP(t, family)
		mustAnswer(t, flow, pods[0])
		n.serveUDP(t, 0, pods[0], pods[1])
		mustAnswer(t, flow, pods[0])
		n.serveUDP(t, 0, pods[1])
		mustEnd(t, flow)
		flow = n.openUDP(t, family)
		mustAnswer(t, flow, pods[1])
		n.stop()
		mustAnswer(t, flow, pods[1])
		n.start(t)
		n.serveUDP(t, 0, pods[0])
		mustEnd(t, flow)
		flow = n.openUDP(t, family)
		mustAnswer(t, flow, pods[0])
	}
}

// TestNoSocketSendsWhenTheNodeSaysSo: when the node does not say any more that it may send to an endpoint that
// has gone, no connected socket does; also if a process starts that has not seen the endpoint go.
func TestNoSocketSendsWhenTheNodeSaysSo(t *testing.T) {
	t.Parallel()
	if udpIsForbidden(t) {
		return
	}
	n := newUDPNode(t)
	n.start(t)
	for round := range 10 {
		was, is := n.world.RemotePods[round%2], n.world.RemotePods[(round+1)%2]
		n.serveUDP(t, 0, was)
		var flows []*proxiertest.Conn
		for _, family := range families {
			for range 5 {
				flow := n.openUDP(t, family)
				mustAnswer(t, flow, was)
				flows = append(flows, flow)
			}
		}
		if round%3 == 2 {
			n.stop()
			n.start(t)
		}
		n.serveUDP(t, 0, is)
		for _, family := range families {
			poll.Until(t, "the node does not send to "+was.Name, func() bool { return len(n.Sends(netip.AddrPortFrom(was.Addr(family), 8080))) == 0 })
		}
		for _, flow := range flows {
			if answer, err := flow.Ask(t.Context()); err == nil {
				t.Errorf("round %d: %s answers %+v although the node says that it does not send there", round, was.Name, answer)
			}
		}
	}
}

// UDP sockets end when the programs go, by another setting, with or without their engine. Nobody would end the
// sockets later, when their endpoint goes.
func TestUDPSocketsEndWhenTheProgramsGo(t *testing.T) {
	t.Parallel()
	if udpIsForbidden(t) {
		return
	}
	n := newUDPNode(t)
	config := ebpf.Config{Config: nftables.Config{Config: n.world.Config()}, Sockets: n.sockets}
	for what, leave := range map[string]func() error{
		"UDP by rules": func() error { n.sockets.UDP = false; n.start(t); return proxiertest.Sync(t.Context(), n) },
		"clean-up":     func() error { n.start(t); n.stop(); return n.Cleanup(t.Context()) },
		"another mode": func() error { return ebpf.RemoveSockets(config) },
	} {
		n.sockets.UDP = true
		n.start(t)
		n.serveUDP(t, 0, n.world.RemotePods[0])
		var flows []*proxiertest.Conn
		for _, family := range families {
			flow := n.openUDP(t, family)
			mustAnswer(t, flow, n.world.RemotePods[0])
			flows = append(flows, flow)
		}
		n.stop()
		if err := leave(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		for _, flow := range flows {
			mustEnd(t, flow)
		}
		n.stop()
	}
}

// A socket that a program connects to a VIP and then to the endpoint's own address shows that address and does not
// end with the Service.
func TestASocketThatIsConnectedAgain(t *testing.T) {
	t.Parallel()
	if udpIsForbidden(t) {
		return
	}
	n := newUDPNode(t)
	n.start(t)
	pod, from := n.world.RemotePods[0], n.world.LocalPods[0]
	n.serveUDP(t, 0, pod)
	for _, family := range families {
		direct := netip.AddrPortFrom(pod.Addr(family), 8080)
		var fd int
		netnstest.Check(t, from.Do(func() (err error) {
			fd, err = connectUDP(dnsVIP(family, 0))
			return err
		}))
		t.Cleanup(func() { _ = unix.Close(fd) })
		must := func(what string, want netip.AddrPort) {
			t.Helper()
			if got, err := unix.Getpeername(fd); err != nil || !reflect.DeepEqual(sockaddrOf(want), got) {
				t.Errorf("%s: connected to %+v, error %v; want %v", what, got, err, want)
			}
		}
		must("to the VIP", dnsVIP(family, 0))
		netnstest.Check(t, unix.Connect(fd, sockaddrOf(direct)))
		must("to the endpoint", direct)
		ended := n.translated(t, family).Ended
		n.serveUDP(t, 0, n.world.RemotePods[1])
		n.engines[family].Look(t.Context())
		must("when the Service has other endpoints", direct)
		if n := n.translated(t, family).Ended - ended; n > 0 {
			t.Errorf("%d sockets ended, want none", n)
		}
		n.serveUDP(t, 0, pod)
	}
}

func (n *node) openUDP(t *testing.T, family v1.IPFamily) *proxiertest.Conn {
	t.Helper()
	flow, err := n.world.LocalPods[0].Open(t.Context(), "udp", dnsVIP(family, 0), proxiertest.AskOptions{Timeout: time.Second})
	netnstest.Check(t, err)
	t.Cleanup(func() { _ = flow.Close() })
	return flow
}

func mustAnswer(t *testing.T, flow *proxiertest.Conn, want *proxiertest.Host) {
	t.Helper()
	poll.Nil(t, "the endpoint answers", func() error {
		a, err := flow.Ask(t.Context())
		if err == nil && a.Server != want.Name {
			t.Errorf("%s answers, want %s", a.Server, want.Name)
		}
		return err
	})
}

// mustEnd sends datagrams until the kernel says that there is no peer.
func mustEnd(t *testing.T, flow *proxiertest.Conn) {
	t.Helper()
	poll.Until(t, "the socket ends", func() bool {
		_, err := flow.Ask(t.Context())
		return errors.Is(err, unix.EDESTADDRREQ) || errors.Is(err, unix.ECONNABORTED)
	})
}

// TestUDPStaleSocketsEnd: when an endpoint goes, all sockets that are connected to it end, in every network
// namespace, and those of another Service go on, although they have the same endpoint.
func TestUDPStaleSocketsEnd(t *testing.T) {
	if udpIsForbidden(t) {
		return
	}
	counts := [2]int{*staleSockets, *staleSockets / 2}
	raiseDescriptors(t, counts[0]+counts[1]+1000)
	n := newUDPNode(t)
	n.start(t)
	pods := n.world.RemotePods
	for _, family := range families {
		n.serveUDP(t, 0, pods[0])
		n.serveUDP(t, 1, pods[0])
		var sockets [2][]int
		for number := range byte(2) {
			for i, from := range []*proxiertest.Host{n.world.LocalPods[0], n.world.LocalPods[1], n.world.Node} {
				share := counts[number] / 3
				if i == 2 {
					share = counts[number] - 2*share
				}
				netnstest.Check(t, from.Do(func() error {
					for range share {
						fd, err := connectUDP(dnsVIP(family, number))
						if err != nil {
							return err
						}
						sockets[number] = append(sockets[number], fd)
					}
					return nil
				}))
			}
		}
		before := n.translated(t, family).Ended
		began := time.Now()
		n.serveUDP(t, 0, pods[1])
		synced := time.Since(began)
		poll.Until(t, "all sockets end", func() bool { return n.translated(t, family).Ended-before == uint64(*staleSockets) })
		t.Logf("%v: %d sockets ended beside %d others, %v after the change; its sync took %v", family, counts[0], counts[1], time.Since(began), synced)
		for number, all := range sockets {
			connected := 0
			for _, fd := range all {
				if _, err := unix.Getpeername(fd); err == nil {
					connected++
				}
				_ = unix.Close(fd)
			}
			if want := []int{0, counts[1]}[number]; connected != want {
				t.Errorf("%v: %d of %d sockets of Service %d are connected, want %d", family, connected, len(all), number, want)
			}
		}
	}
}

// raiseDescriptors lets this process open so many.
func raiseDescriptors(t *testing.T, n int) {
	t.Helper()
	var limit unix.Rlimit
	netnstest.Check(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	if limit.Cur < uint64(n) {
		netnstest.Check(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(n), Max: max(limit.Max, uint64(n))}))
	}
}

func connectUDP(to netip.AddrPort) (fd int, err error) {
	domain := unix.AF_INET
	if to.Addr().Is6() {
		domain = unix.AF_INET6
	}
	if fd, err = unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return 0, err
	}
	return fd, unix.Connect(fd, sockaddrOf(to))
}

func sockaddrOf(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// TestUDPInANamespaceThatIsNotFound: the Condition says that sockets there stay as they are, and they end when it is.
func TestUDPInANamespaceThatIsNotFound(t *testing.T) {
	t.Parallel()
	if udpIsForbidden(t) {
		return
	}
	n := newUDPNode(t)
	find := n.sockets.NetNSs
	hidden := true
	n.sockets.NetNSs = func() ([]string, error) {
		if hidden {
			return nil, nil
		}
		return find()
	}
	n.start(t)
	n.serveUDP(t, 0, n.world.RemotePods[0])
	flow, err := n.world.LocalPods[0].Open(t.Context(), "udp", dnsVIP(v1.IPv4Protocol, 0), proxiertest.AskOptions{})
	netnstest.Check(t, err)
	defer flow.Close()
	n.serveUDP(t, 0, n.world.RemotePods[1])
	engine := n.engines[v1.IPv4Protocol]
	look := func() { engine.Look(context.WithoutCancel(t.Context())) }
	look()
	if c := engine.Abilities().Conditions(); len(c) != 1 || !strings.Contains(c[0].Message, "1 UDP sockets are connected to endpoints that are gone, in network namespaces that were not found") {
		t.Errorf("conditions %+v, want that a socket could not be ended", c)
	}
	hidden = false
	look()
	if c := engine.Abilities().Conditions(); len(c) > 0 || n.translated(t, v1.IPv4Protocol).Ended != 1 {
		t.Errorf("conditions %+v, %d sockets ended; want none, and 1", c, n.translated(t, v1.IPv4Protocol).Ended)
	}
}

// TestAKernelThatCannotEndSockets: the rules do UDP, and no more, and a Condition says it.
func TestAKernelThatCannotEndSockets(t *testing.T) {
	t.Parallel()
	kernels := map[string]func(ebpf.Config, v1.IPFamily) (*ebpf.Engine, error){
		"without the function": func(c ebpf.Config, family v1.IPFamily) (*ebpf.Engine, error) {
			return ebpf.NewEngineWithout(c, family, proxier.Deps{})
		},
	}
	if udpIsForbidden(t) {
		kernels["that forbids the programs"] = func(c ebpf.Config, family v1.IPFamily) (*ebpf.Engine, error) {
			return ebpf.NewEngine(c, family, proxier.Deps{}) // here
		}
	}
	for name, newEngine := range kernels {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newUDPNode(t)
			n.new = newEngine
			n.start(t, n.world.RemotePods[0])
			n.serveUDP(t, 0, n.world.RemotePods[0])
			before := n.translated(t, v1.IPv4Protocol)
			for network, to := range map[string]netip.AddrPort{"tcp": vip(v1.IPv4Protocol), "udp": dnsVIP(v1.IPv4Protocol, 0)} {
				if _, err := n.world.LocalPods[0].Ask(t.Context(), network, to, proxiertest.AskOptions{}); err != nil {
					t.Errorf("%s: %v", network, err)
				}
			}
			if after := n.translated(t, v1.IPv4Protocol); after.Translated != before.Translated+1 {
				t.Errorf("%d sockets translated, want 1: that of TCP", after.Translated-before.Translated)
			}
			if c := n.engines[v1.IPv4Protocol].Abilities().Conditions(); len(c) != 1 || !strings.Contains(c[0].Message, "rules do UDP") {
				t.Errorf("conditions %+v, want that rules do UDP", c)
			}
		})
	}
}
