package ebpf_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
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
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/nodedeps"
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
	n.config.Forward = ebpf.Forward{Device: func(name string) bool { return isPod(name) || name == "client" || name == "uplink" }, Peer: isPod}
	return n
}

func (n *fastNode) liberal(value string) {
	n.t.Helper()
	netnstest.Check(n.t, n.world.Node.Do(func() error {
		return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal", []byte(value), 0)
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
	ctx, stop := context.WithCancel(n.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	n.stop = sync.OnceFunc(func() {
		stop()
		if err := <-ended; err != nil {
			n.t.Errorf("Run = %v", err)
		}
	})
	n.t.Cleanup(n.stop)
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
	netnstest.Check(n.t, n.Sync(n.t.Context()))
}

func (n *fastNode) counts() ebpf.ForwardCounts {
	n.t.Helper()
	c, err := n.engine.ForwardCounts()
	netnstest.Check(n.t, err)
	return c
}

func (n *fastNode) open(from *proxiertest.Host, network string, to netip.AddrPort) *proxiertest.Flow {
	n.t.Helper()
	flow, err := from.Open(n.t.Context(), network, to, proxiertest.AskOptions{})
	netnstest.Check(n.t, err)
	n.t.Cleanup(func() { _ = flow.Close() })
	return flow
}

const requests = 10

// ask sends requests over an open flow, and returns how many packets were forwarded meanwhile.
func (n *fastNode) ask(flow *proxiertest.Flow, server string) uint64 {
	n.t.Helper()
	before := n.counts()
	for range requests {
		if a, err := flow.Ask(n.t.Context()); err != nil || a.Server != server {
			n.t.Fatalf("answer %+v, error %v, want one of %s", a, err, server)
		}
	}
	return n.counts().Packets - before.Packets
}

// establish asks until connection tracking has decided all about the flow: UDP takes two seconds.
func (n *fastNode) establish(flow *proxiertest.Flow, server string) {
	n.t.Helper()
	poll.Until(n.t, "the flow is forwarded", func() bool { return n.ask(flow, server) >= 2*requests })
}

// eachFamily runs a test with one local endpoint.
func eachFamily(t *testing.T, test func(t *testing.T, n *fastNode)) {
	for _, family := range families {
		t.Run(string(family), func(t *testing.T) {
			t.Parallel()
			test(t, newFastNode(t, family))
		})
	}
}

// askLong asks for as long as a flow needs until it is forwarded.
func (n *fastNode) askLong(flow *proxiertest.Flow, network, server string) (packets uint64) {
	n.t.Helper()
	for start := time.Now(); packets == 0 && time.Since(start) < 2500*time.Millisecond; {
		packets += n.ask(flow, server)
		if network == "tcp" {
			break
		}
	}
	return packets
}

// mustForward wants that all packets of a flow are forwarded.
func (n *fastNode) mustForward(flow *proxiertest.Flow, network string, pod *proxiertest.Host, peer bool) {
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

// TestEstablishedFlowsAreForwarded: those of Services that ask for it, and no others; all packets of both
// directions, and to a local pod by its end of the veth.
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

// listen serves connections in a pod, one after the other.
func (n *fastNode) listen(pod *proxiertest.Host, serve func(*net.TCPConn) error) {
	n.t.Helper()
	var listener net.Listener
	netnstest.Check(n.t, pod.Do(func() (err error) {
		listener, err = net.ListenTCP("tcp", &net.TCPAddr{IP: pod.Addr(n.family).AsSlice(), Port: bulkPort})
		return err
	}))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			if err := serve(conn.(*net.TCPConn)); err != nil {
				n.t.Errorf("server: %v", err)
			}
			_ = conn.Close()
		}
	}()
	n.t.Cleanup(func() { _ = listener.Close(); <-ended })
}

func (n *fastNode) dial(from *proxiertest.Host) (conn *net.TCPConn) {
	n.t.Helper()
	netnstest.Check(n.t, from.Do(func() (err error) {
		conn, err = net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(netip.AddrPortFrom(n.vip(), 90)))
		return err
	}))
	n.t.Cleanup(func() { _ = conn.Close() })
	netnstest.Check(n.t, conn.SetDeadline(time.Now().Add(poll.Timeout)))
	return conn
}

// TestStreams: large packets, which devices cut into segments later, do not stall; and all bytes arrive, in
// both directions, to a local and a remote pod, from a client outside and from a pod.
func TestStreams(t *testing.T) {
	t.Parallel()
	const size = 64 << 20
	data := bytes.Repeat([]byte("0123456789abcdef!"), size/17+1)[:size]
	want := sha256.Sum256(data)
	eachFamily(t, func(t *testing.T, n *fastNode) {
		n.start()
		for _, pod := range []*proxiertest.Host{n.world.LocalPods[0], n.world.RemotePods[0]} {
			n.listen(pod, func(c *net.TCPConn) error {
				sum := sha256.New()
				if _, err := io.Copy(sum, c); err != nil {
					return err
				}
				if _, err := c.Write(sum.Sum(nil)); err != nil {
					return err
				}
				_, err := c.Write(data)
				return err
			})
			n.serve(pod)
			for _, from := range []*proxiertest.Host{n.world.Client, n.world.LocalPods[1]} {
				before := n.counts()
				conn := n.dial(from)
				_, err := conn.Write(data)
				netnstest.Check(t, errors.Join(err, conn.CloseWrite()))
				afterUpload := n.counts()
				got := make([]byte, sha256.Size)
				_, err = io.ReadFull(conn, got)
				if err != nil || !bytes.Equal(got, want[:]) {
					t.Fatalf("%s to %s: the server has %x, error %v; want %x", from.Name, pod.Name, got, err, want)
				}
				sum := sha256.New()
				if _, err := io.Copy(sum, conn); err != nil || !bytes.Equal(sum.Sum(nil), want[:]) {
					t.Fatalf("%s to %s: the client has %x, error %v; want %x", from.Name, pod.Name, sum.Sum(nil), err, want)
				}
				// GRO and GSO make packets of up to 64 kB.
				if packets := afterUpload.Packets - before.Packets; packets < size/(64<<10) {
					t.Errorf("%s to %s: %d packets are forwarded for %d bytes", from.Name, pod.Name, packets, size)
				}
			}
		}
	})
}

// flow returns the entry of the only connection from the port to the VIP.
func (n *fastNode) flow(protocol uint8, from netip.AddrPort) *netlink.ConntrackFlow {
	n.t.Helper()
	var found *netlink.ConntrackFlow
	netnstest.Check(n.t, n.world.Node.Do(func() error {
		all, err := netlink.ConntrackTableList(netlink.ConntrackTable, netlink.InetFamily(map[v1.IPFamily]int{v1.IPv4Protocol: unix.AF_INET, v1.IPv6Protocol: unix.AF_INET6}[n.family]))
		for _, f := range all {
			if f.Forward.Protocol == protocol && f.Forward.SrcPort == from.Port() && f.Forward.SrcIP.Equal(from.Addr().AsSlice()) {
				found = f
			}
		}
		return err
	}))
	return found
}

func localOf(conn net.Conn) netip.AddrPort { return netip.MustParseAddrPort(conn.LocalAddr().String()) }

// The states of linux/netfilter/nf_conntrack_tcp.h.
const (
	tcpEstablished, tcpCloseWait, tcpTimeWait = 3, 5, 7
)

func (n *fastNode) stateOf(conn net.Conn) (state uint8, timeout uint32) {
	n.t.Helper()
	f := n.flow(unix.IPPROTO_TCP, localOf(conn))
	if f == nil {
		return 0, 0
	}
	return f.ProtoInfo.(*netlink.ProtoInfoTCP).State, f.TimeOut
}

// TestConnectionsBeginAndEnd: the kernel follows the beginning and the end; in between nothing reaches it.
// Each side can close first, and send as long as it likes after the other has closed.
func TestConnectionsBeginAndEnd(t *testing.T) {
	t.Parallel()
	eachFamily(t, func(t *testing.T, n *fastNode) {
		n.start()
		proceed := make(chan struct{})
		n.listen(n.world.LocalPods[0], func(c *net.TCPConn) error {
			line := make([]byte, 1)
			for {
				if _, err := io.ReadFull(c, line); err != nil {
					return err
				}
				switch line[0] {
				case 'e': // echo
					if _, err := c.Write(line); err != nil {
						return err
					}
				case 'h': // half close, then the client sends more
					if err := c.CloseWrite(); err != nil {
						return err
					}
					rest, err := io.ReadAll(c)
					if err == nil && len(rest) != 3*70_000 {
						err = fmt.Errorf("%d bytes after a half close", len(rest))
					}
					proceed <- struct{}{}
					return err
				case 'w': // the client closes, and gets more
					rest, err := io.ReadAll(c)
					if err == nil && len(rest) > 0 {
						err = errors.New("the client sends more")
					}
					for range 3 {
						_, failed := c.Write(make([]byte, 70_000))
						err = errors.Join(err, failed)
					}
					return err
				case 'r': // the client resets
					_, err := io.ReadAll(c)
					if !errors.Is(err, syscall.ECONNRESET) {
						return fmt.Errorf("error %w, want a reset", err)
					}
					proceed <- struct{}{}
					return nil
				case 'R':
					return c.SetLinger(0)
				}
			}
		})
		n.serve(n.world.LocalPods[0])
		begin := func() *net.TCPConn {
			before := n.counts()
			conn := n.dial(n.world.Client)
			if after := n.counts(); after != before {
				t.Errorf("%d packets of the beginning are forwarded", after.Packets-before.Packets)
			}
			echo := func() {
				t.Helper()
				_, err := conn.Write([]byte("e"))
				netnstest.Check(t, err)
				_, err = io.ReadFull(conn, make([]byte, 1))
				netnstest.Check(t, err)
			}
			for range requests {
				echo()
			}
			if after := n.counts(); after.Packets < before.Packets+2*requests {
				t.Errorf("%d packets are forwarded", after.Packets-before.Packets)
			}
			if state, timeout := n.stateOf(conn); state != tcpEstablished || timeout < 86000 {
				t.Errorf("state %d, timeout %d; want an established connection", state, timeout)
			}
			// So much that the kernel, which has not seen it, takes the end for invalid if it is strict.
			return conn
		}
		ends := func(conn net.Conn) {
			t.Helper()
			poll.Until(t, "the kernel has the end", func() bool {
				state, timeout := n.stateOf(conn)
				return state == 0 || state == tcpTimeWait && timeout <= 120
			})
		}
		say := func(conn net.Conn, b byte) {
			t.Helper()
			_, err := conn.Write([]byte{b})
			netnstest.Check(t, err)
		}

		conn := begin()
		say(conn, 'h')
		if rest, err := io.ReadAll(conn); err != nil || len(rest) > 0 {
			t.Errorf("the server half closes: %d bytes, error %v", len(rest), err)
		}
		for range 3 {
			_, err := conn.Write(make([]byte, 70_000))
			netnstest.Check(t, err)
		}
		if state, timeout := n.stateOf(conn); state == tcpEstablished || timeout > 120 {
			t.Errorf("half closed: state %d, timeout %d", state, timeout)
		}
		netnstest.Check(t, conn.CloseWrite())
		<-proceed
		ends(conn)

		conn = begin()
		say(conn, 'w')
		netnstest.Check(t, conn.CloseWrite())
		if rest, err := io.ReadAll(conn); err != nil || len(rest) != 3*70_000 {
			t.Errorf("the client half closes: %d bytes, error %v", len(rest), err)
		}
		ends(conn)

		conn = begin()
		say(conn, 'r')
		netnstest.Check(t, errors.Join(conn.SetLinger(0), conn.Close()))
		<-proceed
		poll.Until(t, "the entry ends soon after a reset", func() bool {
			_, timeout := n.stateOf(conn)
			return timeout <= 10
		})

		conn = begin()
		say(conn, 'R')
		if _, err := io.ReadAll(conn); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("error %v, want a reset", err)
		}
		if _, timeout := n.stateOf(conn); timeout > 10 {
			t.Errorf("%d seconds left after a reset of the server", timeout)
		}
	})
}

func sh(t *testing.T, host *proxiertest.Host, command string, args ...string) string {
	t.Helper()
	var out []byte
	err := host.Do(func() (err error) {
		out, err = exec.CommandContext(t.Context(), command, args...).CombinedOutput()
		return err
	})
	if err != nil {
		t.Fatalf("%s %v: %v: %s", command, args, err, out)
	}
	return string(out)
}

// udp opens a socket to the VIP.
func (n *fastNode) udp(from *proxiertest.Host) (conn *net.UDPConn) {
	n.t.Helper()
	netnstest.Check(n.t, from.Do(func() (err error) {
		conn, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(n.vip(), 80)))
		return err
	}))
	n.t.Cleanup(func() { _ = conn.Close() })
	netnstest.Check(n.t, conn.SetDeadline(time.Now().Add(poll.Timeout)))
	return conn
}

// ask1 sends a datagram of a size, waits for the answer, and returns how many packets were forwarded.
func (n *fastNode) ask1(conn *net.UDPConn, size int) (packets uint64) {
	n.t.Helper()
	before := n.counts()
	_, err := conn.Write(make([]byte, size))
	netnstest.Check(n.t, err)
	_, err = conn.Read(make([]byte, 1500))
	netnstest.Check(n.t, err)
	return n.counts().Packets - before.Packets
}

func option(t *testing.T, conn *net.UDPConn, level, name int, value []byte) {
	t.Helper()
	raw, err := conn.SyscallConn()
	netnstest.Check(t, err)
	var failed error
	netnstest.Check(t, raw.Control(func(fd uintptr) { failed = unix.SetsockoptString(int(fd), level, name, string(value)) }))
	netnstest.Check(t, failed)
}

// TestUnusualPacketsTakeTheStack: fragments, options, the last hop, and packets that are too long for the
// next device. The flow stays on the fast path with all others.
func TestUnusualPacketsTakeTheStack(t *testing.T) {
	t.Parallel()
	eachFamily(t, func(t *testing.T, n *fastNode) {
		n.start()
		n.serve(n.world.LocalPods[0])
		conn := n.udp(n.world.Client)
		level, hops, ttl := unix.IPPROTO_IP, unix.IP_TTL, []byte{1, 0, 0, 0}
		options, value := unix.IP_OPTIONS, []byte{1, 1, 1, 0} // no operation
		if n.family == v1.IPv6Protocol {
			level, hops = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
			options, value = unix.IPV6_DSTOPTS, []byte{0, 0, 1, 4, 0, 0, 0, 0} // padding
		}
		usual := func(after string) {
			t.Helper()
			poll.Until(t, after+": the flow is forwarded", func() bool { return n.ask1(conn, 10) == 2 })
		}
		usual("at first")
		if got := n.ask1(conn, 300); got != 2 {
			t.Errorf("%d packets are forwarded, want 2", got)
		}
		netnstest.Check(t, n.world.Client.Do(func() error {
			link, err := netlink.LinkByName("eth0")
			return errors.Join(err, netlink.LinkSetMTU(link, 1300))
		}))
		option(t, conn, level, map[int]int{unix.IPPROTO_IP: unix.IP_MTU_DISCOVER, unix.IPPROTO_IPV6: unix.IPV6_MTU_DISCOVER}[level], []byte{0, 0, 0, 0})
		if got := n.ask1(conn, 2000); got != 1 {
			t.Errorf("%d packets of a fragmented datagram and its answer are forwarded, want 1", got)
		}
		usual("after a fragment")
		option(t, conn, level, options, value)
		if got := n.ask1(conn, 10); got != 1 {
			t.Errorf("%d packets of a datagram with options and its answer are forwarded, want 1", got)
		}
		option(t, conn, level, options, nil)
		usual("after options")
		before := n.counts()
		option(t, conn, level, hops, ttl)
		receive := map[int]int{unix.IPPROTO_IP: unix.IP_RECVERR, unix.IPPROTO_IPV6: unix.IPV6_RECVERR}[level]
		option(t, conn, level, receive, []byte{1, 0, 0, 0})
		_, err := conn.Write([]byte("x"))
		netnstest.Check(t, err)
		if _, err := conn.Read(make([]byte, 10)); !errors.Is(err, syscall.EHOSTUNREACH) {
			t.Errorf("error %v of the last hop, want that the time is exceeded", err)
		}
		if after := n.counts(); after != before {
			t.Error("a packet whose time is exceeded is forwarded")
		}
		option(t, conn, level, hops, []byte{64, 0, 0, 0})
		usual("after the last hop")
		netnstest.Check(t, n.world.Node.Do(func() error {
			link, err := netlink.LinkByName("pod0")
			return errors.Join(err, netlink.LinkSetMTU(link, 1280))
		}))
		netnstest.Check(t, n.world.Client.Do(func() error {
			link, err := netlink.LinkByName("eth0")
			return errors.Join(err, netlink.LinkSetMTU(link, 1500))
		}))
		discover := map[int]int{unix.IPPROTO_IP: unix.IP_MTU_DISCOVER, unix.IPPROTO_IPV6: unix.IPV6_MTU_DISCOVER}[level]
		option(t, conn, level, discover, []byte{unix.IP_PMTUDISC_DO, 0, 0, 0})
		_, err = conn.Write(make([]byte, 1400))
		netnstest.Check(t, err)
		if _, err := conn.Read(make([]byte, 10)); !errors.Is(err, syscall.EMSGSIZE) {
			t.Errorf("error %v of a long packet, want that it needs fragments", err)
		}
	})
}

// TestDatagramsWithoutChecksum, which IPv4 has, keep none.
func TestDatagramsWithoutChecksum(t *testing.T) {
	t.Parallel()
	n := newFastNode(t, v1.IPv4Protocol)
	n.start()
	n.serve(n.world.LocalPods[0])
	conn := n.udp(n.world.Client)
	const noCheck = 11 // SO_NO_CHECK
	option(t, conn, unix.SOL_SOCKET, noCheck, []byte{1, 0, 0, 0})
	poll.Until(t, "the flow is forwarded", func() bool { return n.ask1(conn, 10) == 2 })
}

// TestNeighboursAreFound again after they are lost, also where packets are not given to a peer.
func TestNeighboursAreFound(t *testing.T) {
	t.Parallel()
	eachFamily(t, func(t *testing.T, n *fastNode) {
		n.start()
		for _, pod := range []*proxiertest.Host{n.world.LocalPods[0], n.world.RemotePods[0]} {
			n.serve(pod)
			for _, network := range []string{"tcp", "udp"} {
				flow := n.open(n.world.Client, network, netip.AddrPortFrom(n.vip(), 80))
				n.establish(flow, pod.Name)
				sh(t, n.world.Node, "ip", "neigh", "flush", "all", "nud", "permanent")
				if got := n.ask(flow, pod.Name); got < 2*requests {
					t.Errorf("%s, to %s: %d packets are forwarded", network, pod.Name, got)
				}
			}
		}
	})
}

// TestFlowsReturnToTheRules: one that is deleted, and one whose endpoint goes. Connections go on when the
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
		n.config.Forward = ebpf.Forward{}
		n.start()
		n.serve(second)
		for flow, server := range map[*proxiertest.Flow]string{tcp: first.Name, udp: second.Name} {
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
				flows := map[string]*proxiertest.Flow{}
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
					sh(t, n.world.Node, "tc", "qdisc", "del", "dev", "client", "clsact")
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
				if left := sh(t, n.world.Node, "tc", "qdisc", "show") + sh(t, n.world.Node, "tc", "filter", "show", "dev", "client", "ingress"); strings.Contains(left, "clsact") || strings.Contains(left, "serviceplane") {
					t.Errorf("after Cleanup:\n%s", left)
				}
			})
		})
	}
}

// TestDevicesComeAndGo without an update, also while another program is at one.
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
			sh(t, n.world.Node, "ip", "link", "add", "pod9", "type", "veth", "peer", "name", "other9")
			poll.Until(t, "a new device takes part", func() bool { return devices() == "client pod0 pod1 pod2 pod9 uplink" })
			sh(t, n.world.Node, "ip", "link", "del", "pod9")
			poll.Until(t, "a device that went is gone", func() bool { return devices() == all })
			links, err := filepath.Glob(n.config.Sockets.BPFFS + "/serviceplane/*/*/forward-v1/link-*")
			if want := map[bool]int{false: 5}[clsact]; err != nil || len(links) != want {
				t.Errorf("links %v, error %v; want %d", links, err, want)
			}
		})
	}
}
