package userspace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/namespace"
)

// open opens a socket.
func (e *Engine) open(ctx context.Context, want *desired.Service, s *service, at spot) (*socket, error) {
	if err := e.addresses.use(ctx, at.addr.Addr()); err != nil {
		return nil, err
	}
	site := Site{Name: want.Name, Role: at.role, Network: e.network(want.Protocol), Addr: at.addr}
	socket, err := e.openAt(want, s, site)
	if err != nil {
		_ = e.addresses.leave(ctx, at.addr.Addr()) // the first error is the one to tell
		return nil, fmt.Errorf("open socket for clients that are %v: %w", at.role, err)
	}
	return socket, nil
}

// openAt opens a socket at a proxy port that is free, or at the frontend's.
func (e *Engine) openAt(want *desired.Service, s *service, site Site) (*socket, error) {
	if site.Addr.Port() != 0 {
		return e.openExactly(want, s, site)
	}
	var others []uint16 // in use by somebody else
	defer func() {
		for _, port := range others {
			e.ports.give(port)
		}
	}()
	for {
		port, err := e.ports.take()
		if err != nil {
			return nil, err
		}
		site.Addr = netip.AddrPortFrom(site.Addr.Addr(), port)
		socket, err := e.openExactly(want, s, site)
		if err == nil {
			return socket, nil
		}
		others = append(others, port)
		if !isTaken(err) || port == 0 {
			return nil, err
		}
	}
}

// isTaken says that a port belongs to somebody else. Windows has numbers of its own for
// that, which package syscall does not translate: WSAEADDRINUSE, and WSAEACCES for ports
// that the system has set aside.
func isTaken(err error) bool {
	const inUse, setAside = syscall.Errno(10048), syscall.Errno(10013)
	return errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, inUse) || errors.Is(err, setAside)
}

func (e *Engine) openExactly(want *desired.Service, s *service, site Site) (*socket, error) {
	ctx, stop := context.WithCancel(e.connCtx)
	socket := &socket{
		held: site.Addr, config: &e.config, family: e.family, protocol: want.Protocol, balancer: s.balancer, counts: s.counts, links: s.links,
		connCtx: e.connCtx, running: &e.running, buffers: &e.buffers, stop: stop, changed: func() {}, observe: e.observe,
		log:    e.log.With(zap.Stringer("service", want.Name), zap.Stringer("role", site.Role)),
		inside: func(f func() error) error { return namespace.Visit(e.config.NetNS, f) },
	}
	var bound net.Addr
	e.config.Budget.listen(1)
	err := socket.inside(func() (err error) {
		if want.Protocol == desired.TCP {
			bound, err = e.openTCP(ctx, socket, site)
		} else {
			bound, err = e.openUDP(ctx, socket, site)
		}
		return err
	})
	if err != nil {
		e.config.Budget.listen(-1)
		stop()
		return nil, err
	}
	site.Addr = addrPort(bound)
	socket.site = site
	return socket, nil
}

func (e *Engine) openTCP(ctx context.Context, s *socket, at Site) (net.Addr, error) {
	l, err := e.config.Hooks.Listen(ctx, at)
	if err != nil {
		return nil, err
	}
	s.close = func() { _ = l.Close() } // accept returns by that
	s.start = func() { serveTCP(ctx, s, l) }
	return l.Addr(), nil
}

func (e *Engine) openUDP(ctx context.Context, s *socket, at Site) (net.Addr, error) {
	c, err := e.config.Hooks.ListenPacket(ctx, at)
	if err != nil {
		return nil, err
	}
	s.close = func() { _ = c.Close() } // reading returns by that
	s.start = func() { serveUDP(ctx, s, c) }
	return c.LocalAddr(), nil
}

func (e *Engine) network(p desired.Protocol) string {
	network := map[desired.Protocol]string{desired.TCP: "tcp", desired.UDP: "udp"}[p]
	if e.family == v1.IPv4Protocol {
		return network + "4"
	}
	return network + "6"
}

// sweepPeriod is how often session affinities that have ended are forgotten.
const sweepPeriod = time.Minute

func (e *Engine) sweep(ctx context.Context) {
	tick := time.NewTicker(sweepPeriod)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			for _, b := range e.balancers() {
				b.sweep(now)
			}
		case <-ctx.Done():
			return
		}
	}
}

func (e *Engine) balancers() []*balancer {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make([]*balancer, 0, len(e.services))
	for _, s := range e.services {
		all = append(all, s.balancer)
	}
	return all
}
