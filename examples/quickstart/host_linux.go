package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// host is a host or a pod: a network namespace without a name, which ends with the process at the latest.
type host struct {
	ns     netns.NsHandle
	routes *netlink.Handle
}

func newHost() (h *host, err error) {
	h = &host{ns: netns.None()}
	err = onThread(func() (err error) {
		h.ns, err = netns.New()
		return err
	}, setSysctls)
	if err == nil {
		h.routes, err = netlink.NewHandleAt(h.ns, unix.NETLINK_ROUTE)
	}
	if err == nil {
		err = h.routes.LinkSetUp(device("lo"))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("create network namespace: %w", err), h.close())
	}
	return h, nil
}

func (h *host) close() error {
	if h.routes != nil {
		h.routes.Close()
	}
	if !h.ns.IsOpen() {
		return nil
	}
	return h.ns.Close()
}

// path is valid until close.
func (h *host) path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), int(h.ns)) }

// do calls f in the namespace. Sockets that f opens stay there; goroutines that f starts are not in it.
func (h *host) do(f func() error) error {
	return onThread(func() error { return netns.Set(h.ns) }, f)
}

// onThread calls f on a thread that enter has moved to another namespace.
func onThread(enter, f func() error) error {
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer func() {
		if netns.Set(home) == nil { // otherwise the thread ends with its goroutine
			runtime.UnlockOSThread()
		}
		_ = home.Close()
	}()
	if err := enter(); err != nil {
		return err
	}
	return f()
}

// setSysctls makes addresses usable at once, and all rejections heard. The kernel's defaults delay the first,
// and limit the second.
func setSysctls() error {
	for name, value := range map[string]string{
		"ipv6/conf/default/accept_dad": "0", "ipv6/conf/all/accept_dad": "0",
		"ipv4/conf/default/rp_filter": "0", "ipv4/conf/all/rp_filter": "0", // the kernel copies a strict filter of the first namespace
		"ipv4/icmp_ratemask": "0", "ipv6/icmp/ratemask": "128", // 128 limits only echo requests
	} {
		if err := setSysctl(name, value); err != nil && !errors.Is(err, fs.ErrNotExist) { // as without IPv6
			return err
		}
	}
	return nil
}

func setSysctl(name, value string) error {
	return os.WriteFile(filepath.Join("/proc/sys/net", name), []byte(value), 0)
}

// forward makes the host a router.
func (h *host) forward() error {
	return h.do(func() error {
		return errors.Join(setSysctl("ipv4/ip_forward", "1"), setSysctl("ipv6/conf/all/forwarding", "1"))
	})
}

// plug is one end of a cable.
type plug struct {
	host  *host
	link  string
	addrs []netip.Prefix
}

// connect creates a cable between two hosts, a veth pair, and waits until both ends are up.
func connect(a, b plug) error {
	pair := netlink.NewVeth(netlink.LinkAttrs{Name: a.link})
	pair.PeerName, pair.PeerNamespace = b.link, netlink.NsFd(b.host.ns)
	if err := a.host.routes.LinkAdd(pair); err != nil {
		return fmt.Errorf("connect link %s with %s: %w", a.link, b.link, err)
	}
	for _, p := range []plug{a, b} {
		for _, addr := range p.addrs {
			if err := p.host.addAddr(p.link, addr); err != nil {
				return err
			}
		}
		if err := p.host.routes.LinkSetUp(device(p.link)); err != nil {
			return fmt.Errorf("set link %s up: %w", p.link, err)
		}
	}
	return errors.Join(a.awaitUp(), b.awaitUp())
}

// awaitUp polls: the kernel sets the state of a link in the background.
func (p plug) awaitUp() error {
	return p.host.do(func() error {
		for end := time.Now().Add(5 * time.Second); ; <-time.After(time.Millisecond) {
			link, err := net.InterfaceByName(p.link)
			if err != nil || link.Flags&net.FlagRunning != 0 {
				return err
			}
			if time.Now().After(end) {
				return fmt.Errorf("link %s is still down", p.link)
			}
		}
	})
}

func (h *host) addAddr(link string, addr netip.Prefix) error {
	a := &netlink.Addr{IPNet: ipNet(addr)}
	if addr.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	if err := h.routes.AddrAdd(device(link), a); err != nil {
		return fmt.Errorf("add address %s to link %s: %w", addr, link, err)
	}
	return nil
}

func (h *host) addRoute(to netip.Prefix, via string) error {
	if err := h.routes.RouteAdd(&netlink.Route{Dst: ipNet(to), Gw: net.ParseIP(via)}); err != nil {
		return fmt.Errorf("add route to %s via %s: %w", to, via, err)
	}
	return nil
}

// device refers to a link by its name; package netlink looks up the index.
func device(name string) *netlink.Device {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: name}}
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// server answers each line of a TCP connection, and each datagram, with its name and the client's address.
type server struct {
	name    string
	sockets [2]io.Closer
	serving sync.WaitGroup
}

func (h *host) serve(ctx context.Context, name string, at netip.AddrPort) (*server, error) {
	s := &server{name: name}
	var config net.ListenConfig
	var listener net.Listener
	var packets net.PacketConn
	err := h.do(func() (err error) {
		if listener, err = config.Listen(ctx, "tcp", at.String()); err != nil {
			return err
		}
		if packets, err = config.ListenPacket(ctx, "udp", at.String()); err != nil {
			_ = listener.Close()
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("serve as %s: %w", name, err)
	}
	s.sockets = [2]io.Closer{listener, packets}
	s.serving.Go(func() { s.accept(listener) })
	s.serving.Go(func() { s.answerDatagrams(packets) })
	return s, nil
}

func (s *server) accept(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return // closed
		}
		s.serving.Go(func() {
			defer func() { _ = conn.Close() }()
			_ = conn.SetDeadline(time.Now().Add(timeout))
			for questions := bufio.NewScanner(conn); questions.Scan(); {
				_, _ = conn.Write(s.answer(conn.RemoteAddr()))
			}
		})
	}
}

func (s *server) answerDatagrams(conn net.PacketConn) {
	question := make([]byte, 512)
	for {
		_, client, err := conn.ReadFrom(question)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil { // otherwise an ICMP error about an earlier answer
			_, _ = conn.WriteTo(s.answer(client), client)
		}
	}
}

func (s *server) answer(client net.Addr) []byte { return fmt.Appendln(nil, s.name, client) }

// close returns when the server's goroutines have ended.
func (s *server) close() error {
	err := errors.Join(s.sockets[0].Close(), s.sockets[1].Close())
	s.serving.Wait()
	return err
}

// ask asks a server over TCP or UDP, and returns the server's name and the client's address as the server sees it.
func (h *host) ask(ctx context.Context, network string, from netip.Addr, to netip.AddrPort) (name string, source netip.AddrPort, err error) {
	dialer := net.Dialer{Timeout: timeout, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
	if network == "udp" {
		dialer.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
	}
	var conn net.Conn
	if err := h.do(func() (err error) {
		conn, err = dialer.DialContext(ctx, network, to.String())
		return err
	}); err != nil {
		return "", source, err
	}
	defer func() { _ = conn.Close() }() // the answer has arrived
	_ = conn.SetDeadline(time.Now().Add(timeout))
	_, _ = io.WriteString(conn, "?\n") // reading returns the error
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return "", source, err
	}
	var text string
	if _, err := fmt.Sscan(line, &name, &text); err != nil {
		return "", source, fmt.Errorf("parse answer %q: %w", line, err)
	}
	source, err = netip.ParseAddrPort(text)
	return name, source, err
}
