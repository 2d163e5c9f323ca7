package netns

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"net/netip"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Listen opens a listening socket inside the namespace, at a numeric address.
func (n *NS) Listen(ctx context.Context, network, address string) (listener net.Listener, err error) {
	err = n.doing(fmt.Sprintf("listen on %s %s", network, address), func() (err error) {
		var config net.ListenConfig
		config.SetMultipathTCP(false) // so that each connection has one conntrack entry
		listener, err = config.Listen(ctx, network, address)
		return err
	})
	return listener, err
}

// ListenPacket opens a datagram socket inside the namespace, at a numeric address. A UDP
// socket reports the destination of each datagram in a control message.
func (n *NS) ListenPacket(ctx context.Context, network, address string) (conn net.PacketConn, err error) {
	err = n.doing(fmt.Sprintf("listen on %s %s", network, address), func() (err error) {
		config := net.ListenConfig{Control: reportDestination}
		conn, err = config.ListenPacket(ctx, network, address)
		return err
	})
	return conn, err
}

// Dial connects to a numeric address from inside the namespace.
func (n *NS) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return n.DialFrom(ctx, network, netip.Addr{}, address)
}

// DialFrom is Dial with a source address.
func (n *NS) DialFrom(ctx context.Context, network string, from netip.Addr, address string) (net.Conn, error) {
	return n.dial(ctx, network, AskOptions{From: from}, address)
}

func (n *NS) dial(ctx context.Context, network string, opts AskOptions, address string) (conn net.Conn, err error) {
	n.choosePort(network, &opts)
	dialer, err := opts.dialer(network)
	if err != nil {
		return nil, err
	}
	err = n.Do(func() error {
		conn, err = dialer.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// configure sets the options of the sockets that a dialer opens.
func configure(dialer *net.Dialer) {
	dialer.SetMultipathTCP(false)
	dialer.Control = reportUnreachable
	if from, ok := dialer.LocalAddr.(*net.TCPAddr); ok {
		dialer.Control = newPort
		if from.Port != 0 {
			dialer.Control = reuseAddress
		}
	}
}

func localAddr(network string, from netip.AddrPort) (net.Addr, error) {
	switch network {
	case "tcp", "tcp4", "tcp6":
		return net.TCPAddrFromAddrPort(from), nil
	case "udp", "udp4", "udp6":
		return net.UDPAddrFromAddrPort(from), nil
	case icmp4, icmp6:
		return &net.IPAddr{IP: from.Addr().AsSlice()}, nil
	default:
		return nil, fmt.Errorf("dial from %s: %w", from.Addr(), net.UnknownNetworkError(network))
	}
}

func reportDestination(network, _ string, raw syscall.RawConn) error {
	if network == "udp6" {
		return setOption(raw, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO)
	}
	return setOption(raw, unix.IPPROTO_IP, unix.IP_PKTINFO)
}

// reportUnreachable makes a datagram socket fail with EHOSTUNREACH: by default it reports
// no ICMP error except port unreachable. TCP sockets need no option.
func reportUnreachable(network, _ string, raw syscall.RawConn) error {
	switch network {
	case "udp4", "ip4":
		return setOption(raw, unix.IPPROTO_IP, unix.IP_RECVERR)
	case "udp6", "ip6":
		return setOption(raw, unix.IPPROTO_IPV6, unix.IPV6_RECVERR)
	default:
		return nil
	}
}

// choosePort gives each TCP connection with a source address a port of its own, as long as there
// are some. The kernel would give one port to connections to several VIPs. IPVS mixes up those
// that reach the same endpoint, and each gets the answers of the others.
func (n *NS) choosePort(network string, opts *AskOptions) {
	const first, number = 11000, 19000 // no server of a test listens there
	if !opts.From.IsValid() || opts.FromPort != 0 || !strings.HasPrefix(network, "tcp") {
		return
	}
	if i := n.ports.Add(1) - 1; i < number {
		opts.FromPort = uint16(first + i)
	}
}

// newPort lets connect(2) choose the source port, which takes one after the other. bind(2)
// draws it at random: sooner or later the one of a connection that got no answer before, which
// still has a conntrack entry without NAT.
func newPort(_, _ string, raw syscall.RawConn) error {
	return setOption(raw, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT)
}

// reuseAddress allows a source port that a closed connection to another address still has.
func reuseAddress(_, _ string, raw syscall.RawConn) error {
	return setOption(raw, unix.SOL_SOCKET, unix.SO_REUSEADDR)
}

func setOption(raw syscall.RawConn, level, option int) error {
	return control(raw, func(fd int) error { return unix.SetsockoptInt(fd, level, option, 1) })
}

// control calls a function with the file descriptor of a socket, and returns its error.
func control(raw syscall.RawConn, do func(fd int) error) (err error) {
	if controlErr := raw.Control(func(fd uintptr) { err = do(int(fd)) }); controlErr != nil {
		return controlErr
	}
	return err
}

// inetDiagRequest is an inet_diag_req_v2 of linux/inet_diag.h.
type inetDiagRequest []byte

// Len implements nl.NetlinkRequestData.
func (r inetDiagRequest) Len() int { return len(r) }

// Serialize implements nl.NetlinkRequestData.
func (r inetDiagRequest) Serialize() []byte { return r }

// CloseSocket closes a socket of any process that listens at an address, tcp or udp, as ss -K does. A socket
// that is bound to a device needs its name. Newer kernels refuse to close a socket of Multipath TCP.
func (n *NS) CloseSocket(network string, at netip.AddrPort, device string) error {
	const size, portAt, addressAt, linkAt, cookieAt = 56, 8, 12, 44, 48
	request := make(inetDiagRequest, size)
	request[0], request[1] = unix.AF_INET6, map[string]byte{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP}[network]
	if at.Addr().Is4() {
		request[0] = unix.AF_INET
	}
	binary.BigEndian.PutUint16(request[portAt:], at.Port())
	copy(request[addressAt:], at.Addr().AsSlice())
	binary.NativeEndian.PutUint64(request[cookieAt:], math.MaxUint64) // any
	return n.Do(func() error {
		if device != "" {
			link, err := net.InterfaceByName(device)
			if err != nil {
				return err
			}
			binary.NativeEndian.PutUint32(request[linkAt:], uint32(link.Index))
		}
		r := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
		r.AddData(request)
		if _, err := r.Execute(unix.NETLINK_INET_DIAG, 0); err != nil {
			return fmt.Errorf("close the %s socket at %v: %w", network, at, err)
		}
		return nil
	})
}
