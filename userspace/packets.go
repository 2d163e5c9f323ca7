package userspace

import (
	"net"
	"net/netip"
	"sync"
	"syscall"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

const (
	maxDatagram = 1 << 16 // larger than any UDP datagram
	maxControl  = 128     // larger than what the kernel says of a datagram's destination
)

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
	var err error
	if local.Is4() { // checked, since Linux accepts the option on IPv6 sockets too
		err = ipv4.NewPacketConn(udp).SetControlMessage(ipv4.FlagDst|ipv4.FlagInterface, true)
	} else {
		err = ipv6.NewPacketConn(udp).SetControlMessage(ipv6.FlagDst|ipv6.FlagInterface, true)
	}
	if err != nil {
		return udpPackets{udp} // the system does not report destinations
	}
	return wildcard{udp, local.Is4(), make([]byte, maxControl)}
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

// wildcard is a socket bound to all addresses.
type wildcard struct {
	conn *net.UDPConn
	four bool
	oob  []byte // of read
}

func (p wildcard) read(buffer []byte) (int, origin, error) {
	n, size, _, from, err := p.conn.ReadMsgUDPAddrPort(buffer, p.oob)
	o := origin{client: unmapped(from)}
	if err != nil {
		return n, o, err
	}
	if p.four {
		var control ipv4.ControlMessage
		err = control.Parse(p.oob[:size])
		o.dst, _ = netip.AddrFromSlice(control.Dst.To4())
		return n, o, err
	}
	var control ipv6.ControlMessage
	err = control.Parse(p.oob[:size])
	if o.dst, _ = netip.AddrFromSlice(control.Dst); o.dst.IsLinkLocalUnicast() {
		o.ifIndex = control.IfIndex
	}
	return n, o, err
}

func (p wildcard) write(datagram []byte, to origin) error {
	var oob []byte
	if p.four {
		oob = (&ipv4.ControlMessage{Src: to.dst.AsSlice()}).Marshal()
	} else {
		oob = (&ipv6.ControlMessage{Src: to.dst.AsSlice(), IfIndex: to.ifIndex}).Marshal()
	}
	_, _, err := p.conn.WriteMsgUDPAddrPort(datagram, oob, to.client)
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
