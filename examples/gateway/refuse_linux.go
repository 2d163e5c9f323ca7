package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
)

// reserve opens sockets that nobody can connect to, so that no other program gets their ports:
// a TCP socket that does not listen, and a UDP socket that is connected to itself. The node's
// addresses are used, not those of the pool. It works in the network namespace of the caller.
func reserve(pool []netip.Prefix) (r refusing, release func(), err error) {
	r = refusing{}
	var sockets []int
	release = func() {
		for _, fd := range sockets {
			_ = unix.Close(fd)
		}
	}
	for _, addr := range nodeAddrs(pool) {
		for protocol, kind := range map[v1.Protocol]int{v1.ProtocolTCP: unix.SOCK_STREAM, v1.ProtocolUDP: unix.SOCK_DGRAM} {
			fd, at, err := occupy(addr, kind)
			if err != nil {
				release()
				return nil, nil, fmt.Errorf("reserve a port of %s: %w", addr, err)
			}
			sockets = append(sockets, fd)
			r[socketKind{protocol, familyOf(addr)}] = at
		}
	}
	return r, release, nil
}

// nodeAddrs returns an address of the node for each family that it has.
func nodeAddrs(pool []netip.Prefix) (addrs []netip.Addr) {
	all, _ := net.InterfaceAddrs() // without any, nothing can arrive either
	for _, family := range families() {
		i := slices.IndexFunc(all, func(a net.Addr) bool {
			addr := parsed(a)
			return addr.IsGlobalUnicast() && familyOf(addr) == family && !slices.ContainsFunc(pool, func(p netip.Prefix) bool { return p.Contains(addr) })
		})
		if i >= 0 {
			addrs = append(addrs, parsed(all[i]))
		}
	}
	return addrs
}

func parsed(a net.Addr) netip.Addr {
	prefix, _ := netip.ParsePrefix(a.String()) // of the kernel
	return prefix.Addr()
}

// occupy opens a socket at a free port.
func occupy(addr netip.Addr, kind int) (fd int, at netip.AddrPort, err error) {
	domain := unix.AF_INET6
	if addr.Is4() {
		domain = unix.AF_INET
	}
	fd, err = unix.Socket(domain, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, at, err
	}
	err = unix.Bind(fd, sockaddr(netip.AddrPortFrom(addr, 0)))
	if err == nil {
		at, err = boundTo(fd, addr)
	}
	if err == nil && kind == unix.SOCK_DGRAM {
		err = unix.Connect(fd, sockaddr(at))
	}
	if err != nil {
		_ = unix.Close(fd)
	}
	return fd, at, err
}

func boundTo(fd int, addr netip.Addr) (netip.AddrPort, error) {
	name, err := unix.Getsockname(fd)
	switch s := name.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(addr, uint16(s.Port)), err //nolint:gosec // a port
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(addr, uint16(s.Port)), err //nolint:gosec // a port
	default:
		return netip.AddrPort{}, errors.Join(err, errors.New("the socket has no IP address"))
	}
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}
