package userspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// Engine proxies one IP family. It implements proxier.Engine, and io.Closer, which
// ends all connections. Apply, Cleanup and Close must not overlap; all else may be
// called at any time.
type Engine struct {
	config Config
	family v1.IPFamily
	log    *zap.Logger
	node   []netip.Addr

	mu       sync.Mutex // guards all below; never held while something is awaited
	services map[changetracker.ServicePortName]*service
	ports    *portPool
	globals  desired.Globals
	sweeping context.CancelFunc
	swept    sync.WaitGroup
}

// service is one service port.
type service struct {
	balancer *balancer
	counts   *counts
	sockets  map[Role]*socket
}

var _ proxier.Engine = (*Engine)(nil)

// NewEngine returns the engine of one family. It opens nothing before the first
// Apply.
func NewEngine(config Config, family v1.IPFamily, deps proxier.Deps) (*Engine, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	log := deps.Logger
	if log == nil {
		log = zap.NewNop()
	}
	return &Engine{
		config: config, family: family, node: config.Node.Addresses,
		log:      log.Named("userspace").With(zap.String("family", string(family))),
		services: map[changetracker.ServicePortName]*service{},
		ports:    newPortPool(config.Ports),
	}, nil
}

// New returns a Provider with a userspace engine for each family of the config.
func New(config Config, deps proxier.Deps) (*proxier.Proxier, error) {
	config = config.WithDefaults()
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range config.Families {
		engine, err := NewEngine(config, family, deps)
		if err != nil {
			return nil, err
		}
		engines[family] = engine
	}
	return proxier.New(config.Config, deps, engines)
}

// Apply implements proxier.Engine. A service port whose socket cannot be opened is a
// *proxier.ServiceError; SCTP always is.
func (e *Engine) Apply(_ context.Context, update desired.Update) error {
	e.mu.Lock()
	e.globals = update.Globals
	var closing []*socket
	for _, name := range slices.Concat(update.Removed, e.missing(&update)) {
		closing = append(closing, e.remove(name)...)
	}
	var errs []error
	for _, s := range update.Services {
		superfluous, err := e.set(s)
		closing = append(closing, superfluous...)
		if err != nil {
			errs = append(errs, &proxier.ServiceError{Name: s.Name, Family: e.family, Err: err})
		}
	}
	e.beginSweeping()
	e.mu.Unlock()
	shutAll(closing)
	return errors.Join(errs...)
}

// missing are the service ports that a full update does not have any more.
func (e *Engine) missing(update *desired.Update) (gone []changetracker.ServicePortName) {
	if !update.Full {
		return nil
	}
	wanted := make(map[changetracker.ServicePortName]bool, len(update.Services))
	for _, s := range update.Services {
		wanted[s.Name] = true
	}
	for name := range e.services {
		if !wanted[name] {
			gone = append(gone, name)
		}
	}
	return gone
}

// remove takes a service port out, and returns its sockets.
func (e *Engine) remove(name changetracker.ServicePortName) []*socket {
	s := e.services[name]
	if s == nil {
		return nil
	}
	delete(e.services, name)
	sockets := slices.Collect(maps.Values(s.sockets))
	for _, socket := range sockets {
		e.ports.give(socket.site.Addr.Port())
	}
	return sockets
}

// set brings a service port to what it must be. Sockets that stay keep their ports
// and connections.
func (e *Engine) set(want *desired.Service) (superfluous []*socket, err error) {
	if want.Protocol == desired.SCTP {
		return e.remove(want.Name), fmt.Errorf("%w: there is no proxying of SCTP in user space, as associations have several addresses", proxier.ErrNotSupported)
	}
	s := e.services[want.Name]
	if s == nil {
		s = &service{balancer: newBalancer(), counts: &counts{}, sockets: map[Role]*socket{}}
		e.services[want.Name] = s
	}
	s.balancer.update(want)
	treatments := map[Role]treatment{}
	for i := range want.Frontends {
		f := &want.Frontends[i]
		treatments[roleOf(f)] = treatmentOf(f, &e.globals, e.node)
	}
	for role, socket := range s.sockets {
		if _, ok := treatments[role]; !ok {
			delete(s.sockets, role)
			e.ports.give(socket.site.Addr.Port())
			superfluous = append(superfluous, socket)
		}
	}
	for role, t := range treatments {
		if s.sockets[role] == nil {
			socket, openErr := e.open(want, s, role)
			if openErr != nil {
				err = errors.Join(err, openErr)
				continue
			}
			s.sockets[role] = socket
			socket.treatment.Store(&t)
			socket.start()
			continue
		}
		s.sockets[role].treatment.Store(&t)
		s.sockets[role].changed()
	}
	return superfluous, err
}

// open opens the socket of a role.
func (e *Engine) open(want *desired.Service, s *service, role Role) (*socket, error) {
	port, err := e.ports.take()
	if err != nil {
		return nil, err
	}
	site := Site{Name: want.Name, Role: role, Network: e.network(want.Protocol), Addr: netip.AddrPortFrom(e.config.listenAddr(e.family), port)}
	ctx, stop := context.WithCancel(context.Background()) //nolint:forbidigo // shut ends it
	socket := &socket{
		config: &e.config, balancer: s.balancer, counts: s.counts, stop: stop, changed: func() {},
		log: e.log.With(zap.Stringer("service", want.Name), zap.Stringer("role", role)),
	}
	var bound net.Addr
	if want.Protocol == desired.TCP {
		var l net.Listener
		if l, err = e.listen(ctx, site); err == nil {
			bound = l.Addr()
			socket.start = func() { serveTCP(ctx, socket, l) }
		}
	} else {
		var c net.PacketConn
		if c, err = e.listenPacket(ctx, site); err == nil {
			bound = c.LocalAddr()
			socket.start = func() { serveUDP(ctx, socket, c) }
		}
	}
	if err != nil {
		stop()
		e.ports.give(port)
		return nil, fmt.Errorf("open socket for clients that are %v: %w", role, err)
	}
	site.Addr = addrPort(bound)
	socket.site = site
	return socket, nil
}

func (e *Engine) network(p desired.Protocol) string {
	network := map[desired.Protocol]string{desired.TCP: "tcp", desired.UDP: "udp"}[p]
	if e.family == v1.IPv4Protocol {
		return network + "4"
	}
	return network + "6"
}

func (e *Engine) listen(ctx context.Context, at Site) (net.Listener, error) {
	if e.config.Hooks.Listen != nil {
		return e.config.Hooks.Listen(ctx, at)
	}
	var config net.ListenConfig
	return config.Listen(ctx, at.Network, at.Addr.String())
}

func (e *Engine) listenPacket(ctx context.Context, at Site) (net.PacketConn, error) {
	if e.config.Hooks.ListenPacket != nil {
		return e.config.Hooks.ListenPacket(ctx, at)
	}
	var config net.ListenConfig
	return config.ListenPacket(ctx, at.Network, at.Addr.String())
}

// sweepPeriod is how often session affinities that have ended are forgotten.
const sweepPeriod = time.Minute

func (e *Engine) beginSweeping() {
	if e.sweeping != nil {
		return
	}
	ctx, stop := context.WithCancel(context.Background()) //nolint:forbidigo // Close ends it
	e.sweeping = stop
	e.swept.Go(func() {
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
	})
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

// Sockets are where service ports can be reached, sorted by name and role.
func (e *Engine) Sockets() []Site {
	e.mu.Lock()
	defer e.mu.Unlock()
	var sites []Site
	for _, s := range e.services {
		for _, socket := range s.sockets {
			sites = append(sites, socket.site)
		}
	}
	slices.SortFunc(sites, func(a, b Site) int { return cmp.Or(a.Name.Compare(b.Name), cmp.Compare(a.Role, b.Role)) })
	return sites
}

// Cleanup implements proxier.Engine: it is Close, as nothing outlives the process.
func (e *Engine) Cleanup(context.Context) error { return e.Close() }

// Close ends all sockets and connections, and waits for them. A later Apply, which
// must be full, begins anew.
func (e *Engine) Close() error {
	e.mu.Lock()
	var closing []*socket
	for name := range e.services {
		closing = append(closing, e.remove(name)...)
	}
	stop := e.sweeping
	e.sweeping = nil
	e.mu.Unlock()
	if stop != nil {
		stop()
	}
	e.swept.Wait()
	shutAll(closing)
	return nil
}

// shutAll shuts sockets at once.
func shutAll(sockets []*socket) {
	var closing sync.WaitGroup
	for _, s := range sockets {
		closing.Go(s.shut)
	}
	closing.Wait()
}
