package userspace

import (
	"net"
	"net/netip"
	"sync"
	"syscall"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// maxDatagram is larger than any UDP datagram.
const maxDatagram = 1 << 16

// packets reads and writes the datagrams of clients.
type packets interface {
	// read returns a datagram, its source and its destination.
	read(buffer []byte) (n int, from origin, err error)
	// write sends an answer, from the destination of the datagram to its source.
	write(datagram []byte, to origin) error
}

// origin is where a client's datagram came from, and by which address.
type origin struct {
	client netip.AddrPort
	// dst is the destination address; invalid if the socket is bound to one address.
	dst netip.Addr
	// ifIndex is the interface of a link-local dst, or 0.
	ifIndex int
}

// packetsOf returns the packets of a socket. A socket bound to all addresses must tell
// the kernel the source address of an answer: a client accepts an answer only from the
// address that it sent to.
func packetsOf(conn net.PacketConn) packets {
	udp, ok := conn.(*net.UDPConn)
	if !ok {
		return anyPackets{conn}
	}
	local := addrPort(udp.LocalAddr()).Addr()
	if !local.IsUnspecified() {
		return udpPackets{udp}
	}
	if four := ipv4.NewPacketConn(udp); local.Is4() { // checked, since Linux accepts the option on IPv6 sockets too
		if err := four.SetControlMessage(ipv4.FlagDst|ipv4.FlagInterface, true); err == nil {
			return wildcard4{four}
		}
		return udpPackets{udp} // the system does not report destinations
	}
	six := ipv6.NewPacketConn(udp)
	if err := six.SetControlMessage(ipv6.FlagDst|ipv6.FlagInterface, true); err == nil {
		return wildcard6{six}
	}
	return udpPackets{udp}
}

type udpPackets struct{ conn *net.UDPConn }

func (p udpPackets) read(buffer []byte) (int, origin, error) {
	n, from, err := p.conn.ReadFromUDPAddrPort(buffer)
	return n, origin{client: unmapped(from)}, err
}

func (p udpPackets) write(datagram []byte, to origin) error {
	_, err := p.conn.WriteToUDPAddrPort(datagram, to.client)
	return err
}

type wildcard4 struct{ conn *ipv4.PacketConn }

func (p wildcard4) read(buffer []byte) (int, origin, error) {
	n, control, from, err := p.conn.ReadFrom(buffer)
	if err != nil {
		return n, origin{}, err
	}
	o := origin{client: addrPort(from)}
	if control != nil {
		o.dst, _ = netip.AddrFromSlice(control.Dst.To4())
	}
	return n, o, nil
}

func (p wildcard4) write(datagram []byte, to origin) error {
	_, err := p.conn.WriteTo(datagram, &ipv4.ControlMessage{Src: to.dst.AsSlice()}, net.UDPAddrFromAddrPort(to.client))
	return err
}

type wildcard6 struct{ conn *ipv6.PacketConn }

func (p wildcard6) read(buffer []byte) (int, origin, error) {
	n, control, from, err := p.conn.ReadFrom(buffer)
	if err != nil {
		return n, origin{}, err
	}
	o := origin{client: addrPort(from)}
	if control != nil {
		o.dst, _ = netip.AddrFromSlice(control.Dst)
		if o.dst.IsLinkLocalUnicast() {
			o.ifIndex = control.IfIndex
		}
	}
	return n, o, nil
}

func (p wildcard6) write(datagram []byte, to origin) error {
	_, err := p.conn.WriteTo(datagram, &ipv6.ControlMessage{Src: to.dst.AsSlice(), IfIndex: to.ifIndex}, net.UDPAddrFromAddrPort(to.client))
	return err
}

// anyPackets is a socket of another type, from the ListenPacket hook.
type anyPackets struct{ conn net.PacketConn }

func (p anyPackets) read(buffer []byte) (int, origin, error) {
	n, from, err := p.conn.ReadFrom(buffer)
	if err != nil {
		return n, origin{}, err
	}
	return n, origin{client: addrPort(from)}, nil
}

func (p anyPackets) write(datagram []byte, to origin) error {
	_, err := p.conn.WriteTo(datagram, net.UDPAddrFromAddrPort(to.client))
	return err
}

// receiver reads the datagrams of an endpoint.
type receiver struct {
	conn    net.Conn
	raw     syscall.RawConn // nil if conn is no *net.UDPConn
	buffers *sync.Pool      // of *[maxDatagram]byte
}

func newReceiver(conn net.Conn, buffers *sync.Pool) *receiver {
	r := &receiver{conn: conn, buffers: buffers}
	if udp, ok := conn.(*net.UDPConn); ok {
		r.raw, _ = udp.SyscallConn() // if that fails, next reads from conn
	}
	return r
}

// pass reads a datagram and passes it to handle.
func (r *receiver) pass(read func(buffer []byte) (int, error), handle func(datagram []byte)) error {
	buffer, _ := r.buffers.Get().(*[maxDatagram]byte)
	defer r.buffers.Put(buffer)
	n, err := read(buffer[:])
	if err == nil {
		handle(buffer[:n])
	}
	return err
}
