package userspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/neterror"
	"github.com/serviceplane/serviceplane/internal/pause"
)

// open opens a socket, inside Config.NetNS: see setServices. It adds the address first if necessary.
func (e *Engine) open(ctx context.Context, want *desired.Service, s *service, key socketKey) (*socket, error) {
	if err := e.addresses.acquire(ctx, key.addr.Addr()); err != nil {
		return nil, err
	}
	network := strings.ToLower(want.Protocol.String()) + strings.TrimPrefix(string(e.family), "IPv")
	site := Site{Name: want.Name, Role: key.role, Network: network, Addr: key.addr}
	socket, err := e.openAt(want, s, site)
	if err != nil {
		_ = e.addresses.release(ctx, key.addr.Addr()) // the first error is reported
		return nil, fmt.Errorf("open socket of role %v: %w", key.role, err)
	}
	return socket, nil
}

// openAt opens a socket at a frontend's port, or at a free proxy port if the port is 0.
func (e *Engine) openAt(want *desired.Service, s *service, site Site) (*socket, error) {
	if site.Addr.Port() != 0 {
		return e.openExactly(want, s, site)
	}
	var taken []uint16 // by other programs
	defer func() {
		for _, port := range taken {
			e.ports.release(port)
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
		taken = append(taken, port)
		if !neterror.InUse.Is(err) || port == 0 {
			return nil, err
		}
	}
}

func (e *Engine) openExactly(want *desired.Service, s *service, site Site) (*socket, error) {
	ctx, stop := context.WithCancel(e.connCtx)
	socket := &socket{Engine: e, service: s, requested: site.Addr, protocol: want.Protocol, stop: stop, changed: func() {}}
	open := socket.openUDP
	if want.Protocol == desired.TCP {
		open = socket.openTCP
	}
	e.config.Budget.listen(1)
	bound, err := open(ctx, site)
	if err != nil {
		e.config.Budget.listen(-1)
		stop()
		return nil, err
	}
	site.Addr = addrPort(bound)
	socket.site = site
	return socket, nil
}

// setConn remembers the socket of a listener, if it has one.
func (s *socket) setConn(listener any) {
	if c, ok := listener.(syscall.Conn); ok {
		if raw, err := c.SyscallConn(); err == nil {
			s.conn, s.opened = raw, stateOf(raw, s.protocol)
		}
	}
}

const sweepPeriod = time.Minute

// sweep periodically drops expired session affinities.
func (e *Engine) sweep(ctx context.Context) {
	for pause.For(ctx, sweepPeriod) {
		e.mu.Lock()
		services := slices.Collect(maps.Values(e.services))
		e.mu.Unlock()
		for _, s := range services {
			s.balancer.sweep(time.Now())
		}
	}
}

var errNoPorts = errors.New("allocate proxy port: all ports of the range are in use: enlarge Config.Ports")

// portPool allocates the ports of a range in ascending order from a random one, so that
// a released port is reused as late as possible.
type portPool struct {
	all PortRange

	mu   sync.Mutex // guards all below
	next int
	used map[uint16]bool
}

func newPortPool(all PortRange) *portPool {
	p := &portPool{all: all, used: map[uint16]bool{}}
	p.next = rand.IntN(p.size())
	return p
}

func (p *portPool) size() int { return int(p.all.Last-p.all.First) + 1 }

// take allocates a port. Without a range it returns 0, and the system chooses.
func (p *portPool) take() (uint16, error) {
	if p.all == (PortRange{}) {
		return 0, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for range p.size() {
		port := p.all.First + uint16(p.next)
		p.next = (p.next + 1) % p.size()
		if !p.used[port] {
			p.used[port] = true
			return port, nil
		}
	}
	return 0, errNoPorts
}

func (p *portPool) release(port uint16) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.used, port)
}
