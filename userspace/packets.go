package userspace

import (
	"net"
	"net/netip"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// packets reads and writes the datagrams of clients.
type packets interface {
	// read returns a datagram, where it came from, and what it was sent to.
	read(buffer []byte) (n int, from origin, err error)
	// write answers: from what was asked, to who asked.
	write(datagram []byte, to origin) error
}

// origin is one client's way to ask.
type origin struct {
	client netip.AddrPort
	// asked is the address that the client sent to; not valid where the socket has
	// only one.
	asked netip.Addr
	// link is the number of the interface that it came by, or 0.
	link int
}

// packetsOf reads and writes a socket. One that listens on every address has to tell
// the kernel which one to answer from, or clients that asked another would not know
// the answer for one.
func packetsOf(conn net.PacketConn) packets {
	udp, ok := conn.(*net.UDPConn)
	if !ok {
		return anyPackets{conn}
	}
	local := addrPort(udp.LocalAddr()).Addr()
	if !local.IsUnspecified() {
		return udpPackets{udp}
	}
	if four := ipv4.NewPacketConn(udp); local.Is4() { // Linux would take the option on a socket of IPv6 too
		if err := four.SetControlMessage(ipv4.FlagDst|ipv4.FlagInterface, true); err == nil {
			return wildcard4{four}
		}
		return udpPackets{udp} // the system does not tell
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
		asked, _ := netip.AddrFromSlice(control.Dst.To4())
		o.asked = asked
	}
	return n, o, nil
}

func (p wildcard4) write(datagram []byte, to origin) error {
	_, err := p.conn.WriteTo(datagram, &ipv4.ControlMessage{Src: to.asked.AsSlice()}, net.UDPAddrFromAddrPort(to.client))
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
		o.asked, _ = netip.AddrFromSlice(control.Dst)
		if o.asked.IsLinkLocalUnicast() {
			o.link = control.IfIndex
		}
	}
	return n, o, nil
}

func (p wildcard6) write(datagram []byte, to origin) error {
	_, err := p.conn.WriteTo(datagram, &ipv6.ControlMessage{Src: to.asked.AsSlice(), IfIndex: to.link}, net.UDPAddrFromAddrPort(to.client))
	return err
}

// anyPackets is a socket of somebody else's making.
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
