package canary

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

// network is what the canary needs of the network namespace.
type network interface {
	// source returns the node's address from which it would connect to the VIP. The error
	// means that it cannot, and says what to do.
	source(ctx context.Context, vip netip.Addr) (netip.Addr, error)
	listen(ctx context.Context, address netip.AddrPort) (net.Listener, error)
	dial(ctx context.Context, to netip.AddrPort) (net.Conn, error)
}

// sockets is the network of a namespace.
type sockets struct{ netNS string }

func (s sockets) source(ctx context.Context, vip netip.Addr) (netip.Addr, error) {
	address, err := s.route(ctx, vip)
	if err == nil && address == vip { // the engine has put the VIP on the node, as IPVS needs it
		address, err = s.route(ctx, vip.Prev())
	}
	switch {
	case err != nil:
		return address, fmt.Errorf("find the route to %v: %w: %s", vip, cause(err), routeAdvice(err))
	case address.IsLoopback() || address.IsLinkLocalUnicast():
		return address, fmt.Errorf("node would connect from %v, which no rule may translate to: give the node a global address of the IP family", address)
	}
	return address, nil
}

// routeAdvice returns what an operator can do if the route to a VIP is not found.
func routeAdvice(err error) string {
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
		return advice(err)
	}
	return "the node's own connections to ClusterIPs fail before any rule: add a default route for the IP family"
}

// route asks the kernel's routes. Connecting a UDP socket sends nothing.
func (s sockets) route(ctx context.Context, to netip.Addr) (source netip.Addr, err error) {
	err = namespace.Visit(s.netNS, func() error {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "udp", netip.AddrPortFrom(to, servicePort).String())
		if err != nil {
			return err
		}
		local, err := netip.ParseAddrPort(conn.LocalAddr().String())
		source = local.Addr().Unmap()
		return errors.Join(err, conn.Close())
	})
	return source, err
}

func (s sockets) listen(ctx context.Context, address netip.AddrPort) (l net.Listener, err error) {
	err = namespace.Visit(s.netNS, func() error {
		var config net.ListenConfig
		l, err = config.Listen(ctx, "tcp", address.String())
		return err
	})
	return l, err
}

func (s sockets) dial(ctx context.Context, to netip.AddrPort) (conn net.Conn, err error) {
	err = namespace.Visit(s.netNS, func() error {
		d := net.Dialer{KeepAlive: -1}
		conn, err = d.DialContext(ctx, "tcp", to.String())
		return err
	})
	return conn, err
}
