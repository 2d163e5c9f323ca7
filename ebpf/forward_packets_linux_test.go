package ebpf_test

import (
	"errors"
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
				netnstest.Run(t, n.world.Node, "ip", "neigh", "flush", "all", "nud", "permanent")
				if got := n.ask(flow, pod.Name); got < 2*requests {
					t.Errorf("%s, to %s: %d packets are forwarded", network, pod.Name, got)
				}
			}
		}
	})
}
