package netns

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// Server answers each line of a TCP connection, and each datagram, with one line: its
// name, the client's address and the destination address.
type Server struct {
	name    string
	ns      *NS
	local   []netip.AddrPort // where it reaches itself
	serving sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	sockets map[io.Closer]struct{} // guarded by mu
}

// Serve starts a server inside a namespace, on all addresses and the given ports. Its
// goroutines run until Close.
func Serve(ctx context.Context, ns *NS, name string, ports ...uint16) (*Server, error) {
	s := &Server{name: name, ns: ns, sockets: map[io.Closer]struct{}{}}
	for _, port := range ports {
		for _, family := range []struct{ digit, wildcard, loopback string }{{"4", "0.0.0.0", "127.0.0.1"}, {"6", "::", "::1"}} {
			address := net.JoinHostPort(family.wildcard, strconv.Itoa(int(port)))
			if err := s.open(ctx, ns, family.digit, address); err != nil {
				return nil, errors.Join(fmt.Errorf("serve as %s: %w", name, err), s.Close())
			}
			s.local = append(s.local, netip.AddrPortFrom(netip.MustParseAddr(family.loopback), port))
		}
	}
	return s, nil
}

// Close closes all sockets, and returns when the server's goroutines have ended. A second
// Close does nothing.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	var errs []error
	for socket := range s.sockets {
		errs = append(errs, socket.Close())
	}
	clear(s.sockets)
	s.mu.Unlock()
	s.serving.Wait()
	return errors.Join(errs...)
}

func (s *Server) open(ctx context.Context, ns *NS, digit, address string) error {
	listener, err := ns.Listen(ctx, "tcp"+digit, address)
	if err != nil {
		return err
	}
	s.keep(listener)
	s.serving.Go(func() { s.accept(listener) })
	packets, err := ns.ListenPacket(ctx, "udp"+digit, address)
	if err != nil {
		return err
	}
	s.keep(packets)
	datagrams, ok := packets.(*net.UDPConn)
	if !ok {
		return fmt.Errorf("serve datagrams on %s: unexpected %T", address, packets)
	}
	s.serving.Go(func() { s.answerDatagrams(datagrams) })
	return nil
}

// keep registers a socket for Close; after Close it closes the socket at once.
func (s *Server) keep(socket io.Closer) (kept bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = socket.Close()
		return false
	}
	s.sockets[socket] = struct{}{}
	return true
}

func (s *Server) drop(socket io.Closer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, open := s.sockets[socket]; open {
		delete(s.sockets, socket)
		_ = socket.Close()
	}
}

func (s *Server) accept(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return // closed
		}
		if s.keep(conn) {
			s.serving.Go(func() { s.answerLines(conn) })
		}
	}
}

func (s *Server) answerLines(conn net.Conn) {
	defer s.drop(conn)
	line := s.answer(addrPort(conn.RemoteAddr()), addrPort(conn.LocalAddr()))
	for questions := bufio.NewScanner(conn); questions.Scan(); {
		if _, err := conn.Write(line); err != nil {
			return
		}
	}
}

func (s *Server) answerDatagrams(conn *net.UDPConn) {
	question, control := make([]byte, 512), make([]byte, 128)
	port := addrPort(conn.LocalAddr()).Port()
	for {
		_, n, _, client, err := conn.ReadMsgUDPAddrPort(question, control)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error about an earlier answer
		}
		to, ok := destination(control[:n])
		if !ok {
			continue
		}
		line := s.answer(client, netip.AddrPortFrom(to, port))
		_, _, _ = conn.WriteMsgUDPAddrPort(line, sendFrom(to), client)
	}
}

func (s *Server) answer(source, local netip.AddrPort) []byte {
	return fmt.Appendln(nil, s.name, unmap(source), unmap(local))
}

// destination returns the destination address of a datagram.
func destination(control []byte) (netip.Addr, bool) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return netip.Addr{}, false
	}
	for _, m := range messages {
		switch {
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= unix.SizeofInet4Pktinfo:
			return netip.AddrFrom4([4]byte(m.Data[8:12])), true // in_pktinfo.ipi_addr of ip(7)
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= unix.SizeofInet6Pktinfo:
			return netip.AddrFrom16([16]byte(m.Data[:16])), true // in6_pktinfo.ipi6_addr of ipv6(7)
		}
	}
	return netip.Addr{}, false
}

// sendFrom sets the source address; routing chooses the interface.
func sendFrom(source netip.Addr) []byte {
	if source.Is4() {
		return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: source.As4()})
	}
	return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: source.As16()})
}

// addrPort converts the address of a TCP or UDP socket.
func addrPort(addr net.Addr) netip.AddrPort {
	if a, ok := addr.(interface{ AddrPort() netip.AddrPort }); ok {
		return a.AddrPort()
	}
	return netip.AddrPort{}
}

func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}
