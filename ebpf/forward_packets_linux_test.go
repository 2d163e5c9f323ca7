package ebpf_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

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

// A datagram without a checksum, which IPv4 allows, gets none.
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

// Neighbours that are lost are found again, also where packets are not given to a peer.
func TestNeighboursAreFound(t *testing.T) {
	t.Parallel()
	eachFamily(t, func(t *testing.T, n *fastNode) {
		n.start()
		for _, pod := range []*proxiertest.Host{n.world.LocalPods[0], n.world.RemotePods[0]} {
			n.serve(pod)
			for _, network := range []string{"tcp", "udp"} {
				flow := n.open(n.world.Client, network, netip.AddrPortFrom(n.vip(), 80))
				n.establish(flow, pod.Name)
				netnstest.Run(t, n.world.Node, "ip", "neigh", "flush", "all", "nud", "permanent")
				if got := n.ask(flow, pod.Name); got < 2*requests {
					t.Errorf("%s, to %s: %d packets are forwarded", network, pod.Name, got)
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
