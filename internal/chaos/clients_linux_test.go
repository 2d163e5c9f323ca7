package chaos

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/proxiertest"
)

const (
	// patience is how long a client waits for an answer. The kernel sends lost packets of TCP
	// again meanwhile.
	patience = 10 * time.Second
	// patienceUDP is how long a client of UDP sends again: far longer than a repair takes.
	patienceUDP = 30 * time.Second
	// retryUDP is when a datagram is sent again, as the kernel does with the first packet of TCP.
	retryUDP = time.Second
	// pace is the pause of a client between two requests.
	pace = 20 * time.Millisecond
)

// kind is how a client connects.
type kind string

const (
	shortTCP kind = "short TCP"
	longTCP  kind = "long TCP"
	shortUDP kind = "unconnected UDP" // a new socket for each request
	longUDP  kind = "connected UDP"   // a socket with one peer, for many requests
)

func kinds() []kind { return []kind{shortTCP, longTCP, shortUDP, longUDP} }

// way is from where and to where a client connects.
type way struct {
	from netip.Addr // of the node, any
	to   netip.AddrPort
}

// client makes one request after the other. It takes turns among its ways.
type client struct {
	name   string
	host   *proxiertest.Host
	kind   kind
	ways   []way
	sticky bool
	lossy  bool // of the engine
	ledger *ledger
	ports  *atomic.Uint32 // drawn so far; all clients of a kind share it

	// Of its goroutine:
	homes map[way]string
	flows map[way]*flow

	good atomic.Int64 // requests in succession that succeeded
}

// flow is an open connection.
type flow struct {
	*netns.Flow

	again  uint32 // packets that were sent again
	leases int64  // of the clients when it was opened
}

// clients are all clients of a node.
type clients struct {
	all     []*client
	lossy   bool
	ledger  ledger
	working sync.WaitGroup
	leases  atomic.Int64
	ports   map[kind]*atomic.Uint32
}

// add adds clients of each kind on a host to a Service.
func (cs *clients) add(host *proxiertest.Host, s *service) {
	for _, family := range families() {
		var sources []netip.Addr
		for _, addr := range host.Addrs {
			if addr.Is4() == (family == v1.IPv4Protocol) && len(sources) < clientAddrs {
				sources = append(sources, addr)
			}
		}
		for _, k := range kinds() {
			if cs.ports[k] == nil {
				cs.ports[k] = new(atomic.Uint32)
			}
			c := &client{
				name: fmt.Sprintf("%s of %s to %s, %s", k, host.Name, s.name, family),
				host: host, kind: k, sticky: s.sticky, lossy: cs.lossy, ledger: &cs.ledger, ports: cs.ports[k], homes: map[way]string{}, flows: map[way]*flow{},
			}
			for _, to := range s.frontends(k.network(), family) {
				if host.Name == nodeName {
					sources = make([]netip.Addr, 1) // routing chooses
				}
				for _, from := range sources {
					c.ways = append(c.ways, way{from, to})
				}
			}
			cs.all = append(cs.all, c)
		}
	}
}

func (k kind) network() string { return strings.ToLower(string(k[len(k)-3:])) }

// start starts all clients. They end with the context.
func (cs *clients) start(ctx context.Context) {
	for _, c := range cs.all {
		cs.working.Go(func() {
			_ = c.host.Do(func() error { // no error is possible
				for n := 0; ctx.Err() == nil; n++ {
					c.use(ctx, c.ways[n%len(c.ways)], cs.leases.Load())
					pause.For(ctx, pace)
				}
				return nil
			})
			for _, f := range c.flows {
				_ = f.Close()
			}
		})
	}
}

// renew makes all clients close their open connections when they use them next.
func (cs *clients) renew() { cs.leases.Add(1) }

// interrupted returns a client that has not made so many requests in succession that succeeded,
// counted from the last call of beginRounds.
func (cs *clients) interrupted(rounds int) *client {
	for _, c := range cs.all {
		if int(c.good.Load()) <= rounds*len(c.ways)+1 { // one may have begun before
			return c
		}
	}
	return nil
}

func (cs *clients) beginRounds() {
	for _, c := range cs.all {
		c.good.Store(0)
	}
}

// use makes one request.
func (c *client) use(ctx context.Context, w way, leases int64) {
	start := time.Now()
	var (
		seen   counts
		answer netns.Answer
		err    error
	)
	switch c.kind {
	case shortTCP:
		answer, err = c.shortTCP(ctx, w, &seen)
	case shortUDP:
		answer, err = c.shortUDP(ctx, w, &seen)
	default:
		answer, err = c.long(ctx, w, leases, &seen)
	}
	if ctx.Err() != nil {
		return
	}
	if home := c.homes[w]; c.sticky && err == nil && home != answer.Server {
		c.homes[w] = answer.Server
		if home != "" {
			seen.moved = 1
			c.ledger.add(c, start, seen, fmt.Errorf("%s answers %v instead of %s", answer.Server, w.to, home))
			return
		}
	}
	if err != nil {
		err = fmt.Errorf("%v: %w", w.to, err)
		c.good.Store(0)
	} else {
		c.good.Add(1)
	}
	c.ledger.add(c, start, seen, err)
}

// options are those of a new connection. No other one of TCP has its port, or has had it lately: with
// IPVS, a second connection from one port to another VIP that leads to the same endpoint gets
// answers of the first one (TestTwoVIPsFromOneSourcePort of ipvs).
func (c *client) options(w way) netns.AskOptions {
	if c.kind.network() == "udp" {
		return netns.AskOptions{From: w.from, Timeout: retryUDP}
	}
	return netns.AskOptions{From: w.source(), FromPort: c.port(), Timeout: patience}
}

// attempts is how many ports a client tries: servers of its host have some.
const attempts = 1000

// open opens a connection, or a connected socket, from the next free port.
func (c *client) open(ctx context.Context, w way) (f *netns.Flow, err error) {
	for range attempts {
		if f, err = netns.OpenHere(ctx, c.kind.network(), w.to, c.options(w)); !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	return f, err
}

// shortTCP opens a connection for one request.
func (c *client) shortTCP(ctx context.Context, w way, seen *counts) (answer netns.Answer, err error) {
	seen.connections = 1
	defer func() {
		if err != nil {
			seen.failed = 1
		}
	}()
	f, err := c.open(ctx, w)
	if err != nil {
		return answer, err
	}
	defer f.Close()
	answer, err = f.Ask(ctx)
	if again, _ := f.SentAgain(); again > 0 {
		seen.again = 1
	}
	return answer, err
}

// shortUDP sends a datagram from a new socket, which has no peer.
func (c *client) shortUDP(ctx context.Context, w way, seen *counts) (answer netns.Answer, err error) {
	seen.connections = 1
	socket, err := c.bind(w)
	if err != nil {
		return answer, err
	}
	defer socket.Close()
	err = c.insist(ctx, seen, func() error {
		if _, err := socket.WriteToUDPAddrPort([]byte("?\n"), w.to); err != nil {
			return err
		}
		answer, err = receive(ctx, socket, w.to)
		return err
	})
	if err != nil {
		seen.failed = 1
	}
	return answer, err
}

// bind opens a socket at the next port. The system would draw one at random: sooner or later
// the port of an earlier socket, when connection tracking still knows its flow.
func (c *client) bind(w way) (socket *net.UDPConn, err error) {
	for range attempts {
		if socket, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(w.source(), c.port()))); err == nil {
			return socket, nil
		}
	}
	return nil, err
}

// port returns the next port of a kind, below those that systems choose. Connections that stay open
// have some of their own.
func (c *client) port() uint16 {
	first, last := uint32(2000), uint32(30000)
	switch c.kind {
	case shortTCP:
		last = 16000
	case longTCP:
		first = 16000
	case shortUDP, longUDP:
	}
	return uint16(first + c.ports.Add(1)%(last-first))
}

// source is the address that a client binds to.
func (w way) source() netip.Addr {
	switch {
	case w.from.IsValid():
		return w.from
	case w.to.Addr().Is4():
		return netip.IPv4Unspecified()
	default:
		return netip.IPv6Unspecified()
	}
}

// receive waits for an answer from an address.
func receive(ctx context.Context, socket *net.UDPConn, from netip.AddrPort) (netns.Answer, error) {
	deadline := time.Now().Add(retryUDP)
	if end, ok := ctx.Deadline(); ok && end.Before(deadline) {
		deadline = end
	}
	if err := socket.SetReadDeadline(deadline); err != nil {
		return netns.Answer{}, err
	}
	text := make([]byte, 512)
	for {
		n, peer, err := socket.ReadFromUDPAddrPort(text)
		if err != nil {
			return netns.Answer{}, errors.Join(netns.ErrTimeout, err)
		}
		if peer.Port() == from.Port() && peer.Addr().Unmap() == from.Addr() {
			return netns.ParseAnswer(string(text[:n]))
		}
	}
}

// insist sends a datagram until there is an answer.
func (c *client) insist(ctx context.Context, seen *counts, send func() error) error {
	err := send()
	for end := time.Now().Add(patienceUDP); c.lost(err) && time.Now().Before(end); err = send() {
		seen.again = 1
		if !errors.Is(err, netns.ErrTimeout) {
			pause.For(ctx, pace)
		}
	}
	if c.lost(err) {
		seen.deaf = 1
	}
	return err
}

// lost reports whether the network lost a datagram or its answer.
func (c *client) lost(err error) bool {
	return errors.Is(err, netns.ErrTimeout) || c.lossy && errors.Is(err, syscall.EPERM)
}

// long makes a request over an open connection, and opens it if there is none.
func (c *client) long(ctx context.Context, w way, leases int64, seen *counts) (netns.Answer, error) {
	f := c.flows[w]
	if f != nil && f.leases != leases {
		_ = f.Close()
		delete(c.flows, w)
		f = nil
	}
	isNew := f == nil
	if isNew {
		seen.connections = 1
		opened, err := c.open(ctx, w)
		if err != nil {
			seen.failed = 1
			return netns.Answer{}, err
		}
		f = &flow{Flow: opened, leases: leases}
		c.flows[w] = f
	}
	var answer netns.Answer
	ask := func() (err error) { answer, err = f.Ask(ctx); return err }
	var err error
	if c.kind == longUDP {
		err = c.insist(ctx, seen, ask)
	} else {
		err = ask()
	}
	if again, _ := f.SentAgain(); again > f.again {
		f.again, seen.again = again, 1
	}
	switch {
	case err == nil:
		seen.answers = 1
		return answer, nil
	case isNew:
		seen.failed = 1
	default:
		seen.reset = 1
	}
	_ = f.Close()
	delete(c.flows, w)
	return answer, err
}
