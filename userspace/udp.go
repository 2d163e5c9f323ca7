package userspace

import (
	"container/list"
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/desired"
)

// maxDatagram is the largest that UDP can carry.
const maxDatagram = 1 << 16

// udpSocket passes on the datagrams of a service port.
type udpSocket struct {
	*socket

	conn net.PacketConn

	mu sync.Mutex // guards all below
	// flows are the clients, and order has them with the one first that was quiet the
	// longest.
	flows map[netip.AddrPort]*udpFlow
	order *list.List
}

// udpFlow is one client.
type udpFlow struct {
	client   netip.AddrPort
	addr     net.Addr // the client's, as the socket wants it
	endpoint netip.AddrPort
	scope    desired.Scope
	upstream net.Conn
	at       *list.Element
}

func serveUDP(ctx context.Context, s *socket, conn net.PacketConn) {
	u := &udpSocket{socket: s, conn: conn, flows: map[netip.AddrPort]*udpFlow{}, order: list.New()}
	s.close = func() {
		_ = conn.Close() // the loop returns by that
		u.endAll(func(*udpFlow) bool { return true })
	}
	s.changed = func() {
		u.endAll(func(f *udpFlow) bool { return !s.balancer.has(f.scope, f.endpoint) })
	}
	s.running.Go(func() { u.loop(ctx) })
}

// loop hands datagrams on until ctx ends. No error ends it earlier.
func (u *udpSocket) loop(ctx context.Context) {
	buffer := make([]byte, maxDatagram)
	pause := firstPause
	for {
		n, addr, err := u.conn.ReadFrom(buffer)
		if err == nil {
			pause = firstPause
			u.deliver(ctx, addr, buffer[:n])
			continue
		}
		if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return
		}
		u.log.Debug("a datagram is lost", zap.Error(err))
		select {
		case <-time.After(pause):
			pause = min(2*pause, longestPause)
		case <-ctx.Done():
			return
		}
	}
}

// deliver sends a datagram to the client's endpoint.
func (u *udpSocket) deliver(ctx context.Context, addr net.Addr, datagram []byte) {
	client := addrPort(addr)
	f := u.find(client)
	if f == nil {
		var err error
		if f, err = u.begin(ctx, client, addr); err != nil {
			u.counts.Refused.Add(1)
			u.log.Debug("datagram dropped", zap.Stringer("client", client), zap.Error(err))
			return
		}
	}
	_ = f.upstream.SetReadDeadline(time.Now().Add(u.config.UDPIdle))
	_, _ = f.upstream.Write(datagram) // like the network, which loses some
}

// find returns a client's flow, and notes that it was not quiet.
func (u *udpSocket) find(client netip.AddrPort) *udpFlow {
	u.mu.Lock()
	defer u.mu.Unlock()
	f := u.flows[client]
	if f != nil {
		u.order.MoveToBack(f.at)
	}
	return f
}

// begin gives a client an endpoint.
func (u *udpSocket) begin(ctx context.Context, client netip.AddrPort, addr net.Addr) (*udpFlow, error) {
	scope, action := u.treatment.Load().verdict(client.Addr())
	if action == desired.Drop && scope == 0 {
		return nil, errNotAdmitted
	}
	c := Connection{Site: u.site, Client: client}
	endpoint, ok := u.pick(c, scope, nil)
	if !ok {
		u.activate(ctx)
		return nil, errNoEndpoints
	}
	attempt, stop := context.WithTimeout(ctx, dialTimeouts()[0])
	defer stop()
	upstream, err := u.dial(attempt, c, "udp", endpoint)
	if err != nil {
		return nil, err
	}
	u.counts.Accepted.Add(1)
	u.counts.Open.Add(1)
	f := &udpFlow{client: client, addr: addr, endpoint: endpoint, scope: scope, upstream: upstream}
	_ = upstream.SetReadDeadline(time.Now().Add(u.config.UDPIdle))
	u.mu.Lock()
	f.at = u.order.PushBack(f)
	u.flows[client] = f
	var oldest *udpFlow
	if u.order.Len() > u.config.UDPClients {
		oldest, _ = u.order.Front().Value.(*udpFlow)
		u.forget(oldest)
	}
	u.mu.Unlock()
	if oldest != nil {
		_ = oldest.upstream.Close()
	}
	u.running.Go(func() { u.answer(f) })
	return f, nil
}

// answer passes an endpoint's datagrams back, until nobody has said anything for
// long, or the flow is closed.
func (u *udpSocket) answer(f *udpFlow) {
	defer u.counts.Open.Add(-1)
	buffer := make([]byte, maxDatagram)
	for {
		n, err := f.upstream.Read(buffer)
		if err != nil {
			break // the endpoint refuses, or all was quiet: the next datagram begins anew
		}
		_ = f.upstream.SetReadDeadline(time.Now().Add(u.config.UDPIdle))
		u.find(f.client)
		_, _ = u.conn.WriteTo(buffer[:n], f.addr) // like the network, which loses some
	}
	u.mu.Lock()
	if u.flows[f.client] == f {
		u.forget(f)
	}
	u.mu.Unlock()
	_ = f.upstream.Close()
}

// forget takes a flow out. u.mu is held.
func (u *udpSocket) forget(f *udpFlow) {
	delete(u.flows, f.client)
	u.order.Remove(f.at)
}

// endAll closes some flows, which end by that.
func (u *udpSocket) endAll(ends func(*udpFlow) bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, f := range u.flows {
		if ends(f) {
			u.forget(f)
			_ = f.upstream.Close()
		}
	}
}
