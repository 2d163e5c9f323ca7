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
