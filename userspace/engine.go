package userspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/userspace/connection"
)

// Engine proxies one IP family. It implements proxier.Engine, Planner, Dumper and
// Watcher. Close ends all connections. Apply, Cleanup and Close must
// not overlap; all else may be called at any time.
type Engine struct {
	config  Config
	family  v1.IPFamily
	log     *zap.Logger
	portals proxier.Engine // nil: none
	observe func(connection.Report)

	// These are owned by who calls Apply, Cleanup and Close.
	ports     *portPool
	addresses addressBook
	at        netip.Addr // of proxy ports
	globals   desired.Globals
	led       desired.Globals // what the portals have
	closing   []*socket       // when the portals do not lead there any more
	end       context.CancelFunc
	connCtx   context.Context //nolint:containedctx // of all connections, until Close
	running   sync.WaitGroup
	buffers   sync.Pool // of *[passBuffer]byte, for TCP; used by all connections

	mu       sync.Mutex // guards the map and the sockets of services; never held while something is awaited
	services map[changetracker.ServicePortName]*service
}

// service is one service port.
type service struct {
	balancer *balancer
	counts   *counts
	links    *links
	sockets  map[spot]*socket
	claims   claims
	// portal is what the portals have; nil when that is not known.
	portal *desired.Service
}

var _ interface {
	proxier.Engine
	proxier.Planner
	proxier.Dumper
	proxier.Watcher
} = (*Engine)(nil)

// NewEngine returns the engine of one family. It opens nothing before the first
// Apply.
func NewEngine(config Config, family v1.IPFamily, deps proxier.Deps) (*Engine, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	e := &Engine{
		config: config, family: family,
		log:       lightdeps.Logger(deps.Logger, "userspace", family),
		observe:   func(connection.Report) {},
		services:  map[changetracker.ServicePortName]*service{},
		ports:     newPortPool(config.Ports),
		addresses: addressBook{addresses: config.Addresses, sockets: map[netip.Addr]int{}},
		buffers:   sync.Pool{New: func() any { return new([passBuffer]byte) }},
	}
	if o, ok := deps.Observer.(connection.Observer); ok {
		e.observe = o.ObserveConnection
	}
	if config.Portals != nil {
		var err error
		if e.portals, err = config.Portals(family); err != nil {
			return nil, fmt.Errorf("portals of %s: %w", family, err)
		}
	}
	return e, nil
}

// New returns a Provider with a userspace engine for each family of the config. It
// answers at health check node ports, unless deps say otherwise. With portals, deps
// should have a Conntrack.
func New(config Config, deps proxier.Deps) (*proxier.Proxier, error) {
	config = config.WithDefaults()
	deps = lightdeps.Complete(deps, config.NetNS)
	return lightdeps.Provider(config.Config, deps, func(family v1.IPFamily) (*Engine, error) { return NewEngine(config, family, deps) })
}

// Apply implements proxier.Engine. A service port whose socket cannot be opened, or
// whose node port somebody else has, is among those that failed; SCTP always is.
func (e *Engine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	var result proxier.Result
	err := e.apply(ctx, &update, &result)
	result.FlowEnds = e.flowEnds(&update)
	return result, err
}

func (e *Engine) apply(ctx context.Context, update *desired.Update, result *proxier.Result) error {
	e.begin()
	e.globals = update.Globals
	if err := e.chooseAddress(update); err != nil {
		return err
	}
	for _, name := range slices.AppendSeq(e.missing(update), update.Removed()) {
		e.remove(name)
	}
	plans, err := e.plan(update)
	if err != nil {
		return err
	}
	if e.config.Place == PlaceFrontends { // one may need what another one leaves
		err = e.retire(ctx)
	}
	failed := map[changetracker.ServicePortName]bool{}
	for i := range update.Changes {
		s := update.Changes[i].After
		if s == nil {
			continue
		}
		if err := e.set(ctx, s, plans[i]); err != nil {
			failed[s.Name] = e.services[s.Name] == nil || !e.serves(s.Name, plans[i])
			result.Failed = append(result.Failed, &proxier.ServiceError{Name: s.Name, Err: err, Partial: true})
		}
	}
	if leads := e.lead(ctx, update, failed, result); leads != nil {
		return errors.Join(err, leads) // connections may still be led to what is to close
	}
	return errors.Join(err, e.retire(ctx))
}

// begin makes it possible to serve.
func (e *Engine) begin() {
	if e.end != nil {
		return
	}
	e.connCtx, e.end = context.WithCancel(context.Background()) //nolint:forbidigo // Close ends it
	e.running.Go(func() { e.sweep(e.connCtx) })
}

// missing are the service ports that a full update does not have any more.
func (e *Engine) missing(update *desired.Update) (gone []changetracker.ServicePortName) {
	if !update.Full {
		return nil
	}
	wanted := make(map[changetracker.ServicePortName]bool, len(update.Changes))
	for i := range update.Changes {
		wanted[update.Changes[i].Name] = true
	}
	for name := range e.services {
		if !wanted[name] {
			gone = append(gone, name)
		}
	}
	return gone
}

// plan works out where the service ports of the Changes listen, and takes out the sockets
// that they do not need any more.
func (e *Engine) plan(update *desired.Update) ([]map[spot]treatment, error) {
	plans := make([]map[spot]treatment, len(update.Changes))
	for i := range update.Changes {
		want := update.Changes[i].After
		if want == nil {
			continue
		}
		if want.Protocol == desired.SCTP {
			e.remove(want.Name)
			continue
		}
		spots, err := e.spots(want)
		if err != nil {
			return nil, err
		}
		plans[i] = spots
		s := e.services[want.Name]
		if s == nil {
			continue
		}
		e.disclaim(s, want)
		e.mu.Lock()
		for at, socket := range s.sockets {
			if _, ok := spots[at]; !ok {
				delete(s.sockets, at)
				e.closing = append(e.closing, socket)
			}
		}
		e.mu.Unlock()
	}
	return plans, nil
}

// remove takes a service port out.
func (e *Engine) remove(name changetracker.ServicePortName) {
	s := e.services[name]
	if s == nil {
		return
	}
	e.mu.Lock()
	delete(e.services, name)
	e.mu.Unlock()
	e.closing = slices.AppendSeq(e.closing, maps.Values(s.sockets))
	e.config.Budget.listen(-len(s.claims))
	s.claims.giveAll()
	s.links.update(func(netip.AddrPort) bool { return true })
}

// set brings a service port to what it must be. Sockets that stay keep their ports
// and connections.
func (e *Engine) set(ctx context.Context, want *desired.Service, spots map[spot]treatment) error {
	if want.Protocol == desired.SCTP {
		return fmt.Errorf("%w: there is no proxying of SCTP in user space, as associations have several addresses", proxier.ErrNotSupported)
	}
	s := e.services[want.Name]
	if s == nil {
		s = &service{
			balancer: newBalancer(), counts: &counts{}, links: newLinks(e.config.Drain),
			sockets: map[spot]*socket{}, claims: claims{},
		}
		e.mu.Lock()
		e.services[want.Name] = s
		e.mu.Unlock()
	}
	s.balancer.update(want)
	s.links.update(func(endpoint netip.AddrPort) bool { return !s.balancer.serves(endpoint) })
	var errs []error
	if e.portals != nil {
		errs = append(errs, e.claim(s, want))
	}
	for at, t := range spots {
		errs = append(errs, e.setSocket(ctx, want, s, at, &t))
	}
	return errors.Join(errs...)
}

// setSocket opens a socket, or makes one that is there treat clients as it must.
func (e *Engine) setSocket(ctx context.Context, want *desired.Service, s *service, at spot, t *treatment) error {
	if socket := s.sockets[at]; socket != nil {
		socket.treatment.Store(t)
		socket.changed()
		return nil
	}
	socket, err := e.open(ctx, want, s, at)
	if err != nil {
		return err
	}
	e.mu.Lock()
	s.sockets[at] = socket
	e.mu.Unlock()
	socket.treatment.Store(t)
	socket.start()
	return nil
}

// serves says whether a service port has all its sockets.
func (e *Engine) serves(name changetracker.ServicePortName, spots map[spot]treatment) bool {
	return len(e.services[name].sockets) == len(spots)
}

// retire closes the sockets that nobody needs any more. TCP connections that came by
// them may go on for a while.
func (e *Engine) retire(ctx context.Context) error {
	var after time.Duration
	if e.portals != nil {
		after = handshake
	}
	var errs []error
	for _, s := range e.closing {
		s.retire(after, func() { e.ports.give(s.held.Port()) })
		errs = append(errs, e.addresses.leave(ctx, s.held.Addr()))
	}
	e.closing = nil
	return errors.Join(errs...)
}

// Sockets are where service ports can be reached, sorted by name, role and address.
func (e *Engine) Sockets() []Site {
	e.mu.Lock()
	defer e.mu.Unlock()
	var sites []Site
	for _, s := range e.services {
		for _, socket := range s.sockets {
			sites = append(sites, socket.site)
		}
	}
	slices.SortFunc(sites, func(a, b Site) int {
		return cmp.Or(a.Name.Compare(b.Name), cmp.Compare(a.Role, b.Role), a.Addr.Compare(b.Addr))
	})
	return sites
}

// Traffic is what a service port has had to do, since it came.
type Traffic struct {
	// Accepted are the TCP connections, or the flows of UDP clients, Refused those
	// that no endpoint served, and Open those that go on.
	Accepted, Refused, Open int64
	// Retried are the attempts to reach an endpoint that failed.
	Retried int64
}

// Traffic tells of every service port.
func (e *Engine) Traffic() map[changetracker.ServicePortName]Traffic {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make(map[changetracker.ServicePortName]Traffic, len(e.services))
	for name, s := range e.services {
		all[name] = Traffic{
			Accepted: s.counts.Accepted.Load(), Refused: s.counts.Refused.Load(),
			Open: s.counts.Open.Load(), Retried: s.counts.Retried.Load(),
		}
	}
	return all
}

// Cleanup implements proxier.Engine: it is Close, and removes the portals.
func (e *Engine) Cleanup(ctx context.Context) error {
	var err error
	if e.portals != nil {
		err = e.portals.Cleanup(ctx)
	}
	return errors.Join(err, e.shut(ctx))
}

// Close ends all sockets and connections, and waits for them. Portals stay, and lead
// nowhere until a successor sets them. A later Apply, which must be full, begins anew.
func (e *Engine) Close() error {
	err := e.shut(context.Background()) //nolint:forbidigo // addresses are taken back in any case
	if e.portals != nil {
		err = errors.Join(err, e.portals.Close())
	}
	return err
}

func (e *Engine) shut(ctx context.Context) error {
	for name := range e.services {
		e.remove(name)
	}
	if e.end != nil {
		e.end()
		e.end = nil
	}
	err := e.retire(ctx)
	e.running.Wait()
	e.led = desired.Globals{}
	return err
}
