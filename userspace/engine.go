package userspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// Engine proxies one IP family. It implements proxier.Engine, Planner, Dumper,
// Watcher and Counter. Close ends all connections. Calls of Apply, Cleanup and Close must not
// overlap; all other methods may be called at any time.
type Engine struct {
	config  Config
	family  v1.IPFamily
	log     *zap.Logger
	portals proxier.Engine // nil: none
	// affinityShare is that of all service ports.
	affinityShare affinityShare
	observe       func(connection.Report)
	goal          atomic.Pointer[goal] // by the last Apply

	// Only Apply, Cleanup and Close use these fields.
	ports         *portPool
	addresses     addressRefs
	proxyAddr     netip.Addr // of the proxy ports
	globals       desired.Globals
	portalGlobals desired.Globals // those of the last successful Apply of the portals
	closing       []*socket       // to close as soon as no portal leads to them
	end           context.CancelFunc
	connCtx       context.Context //nolint:containedctx // of all connections, until Close
	running       sync.WaitGroup
	workers       workers   // of TCP connections
	buffers       sync.Pool // of *[copyBufferSize]byte, for TCP; used by all connections
	refuser       refuser   // of UDP

	mu       sync.Mutex // guards the map and the sockets of services; never held during I/O
	services map[changetracker.ServicePortName]*service
	began    time.Time // of the first Apply
}

// service is one service port.
type service struct {
	balancer     *balancer
	counts       counts
	drainer      *drainer
	sockets      map[socketKey]*socket
	reservations reservations
	// portal is what the portals last applied; nil when that is unknown.
	portal *desired.Service
}

var _ proxier.Engine = (*Engine)(nil)

// NewEngine returns the engine of one IP family. The first Apply opens the sockets.
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
		addresses: addressRefs{addresses: config.Addresses, sockets: map[netip.Addr]int{}},
		workers:   workers{next: make(chan func())},
		buffers:   sync.Pool{New: func() any { return new([copyBufferSize]byte) }},
		refuser:   refuser{inside: func(f func() error) error { return namespace.Visit(config.NetNS, f) }},
	}
	if o, ok := deps.Observer.(connection.Observer); ok {
		e.observe = o.ObserveConnection
	}
	if config.Portals != nil {
		var err error
		if e.portals, err = config.Portals(family); err != nil {
			return nil, fmt.Errorf("create portals of %s: %w", family, err)
		}
	}
	return e, nil
}

// New returns a Provider with a userspace engine for each IP family of the config. It
// serves health check node ports unless deps have their own Health. With portals, deps
// should have a Conntrack.
func New(config Config, deps proxier.Deps) (*proxier.Proxier, error) {
	config = config.WithDefaults()
	deps = lightdeps.Complete(deps, config.NetNS)
	shared := config.Config
	shared.CountTraffic = false // the sockets count, and no connection tracking
	return lightdeps.Provider(shared, deps, func(family v1.IPFamily) (*Engine, error) { return NewEngine(config, family, deps) })
}

// Sockets returns where service ports listen, sorted by name, role and address.
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

// PortCounts counts the connections of a service port since its creation.
type PortCounts struct {
	// Accepted counts TCP connections, or flows of UDP clients. Refused counts the ones
	// that no endpoint served, and Open the ones that have not ended.
	Accepted, Refused, Open int64
	// Retried counts the failed attempts to reach an endpoint.
	Retried int64
}

// Traffic returns the counters of every service port.
func (e *Engine) Traffic() map[changetracker.ServicePortName]PortCounts {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make(map[changetracker.ServicePortName]PortCounts, len(e.services))
	for name, s := range e.services {
		all[name] = PortCounts{
			Accepted: s.counts.Accepted.Load(), Refused: s.counts.Refused.Load(),
			Open: s.counts.Open.Load(), Retried: s.counts.Retried.Load(),
		}
	}
	return all
}

// flowEnds returns the destinations of the conntrack entries of service ports that stay:
// the sockets, if there are endpoints or a hook that provides some.
func (e *Engine) flowEnds(update *desired.Update) map[changetracker.ServicePortName][]netip.AddrPort {
	all := make(map[changetracker.ServicePortName][]netip.AddrPort, len(update.Changes))
	ends := make([]netip.AddrPort, 0, 2*len(update.Changes)) // one allocation for all
	for want := range update.Services() {
		first := len(ends)
		if s := e.services[want.Name]; s != nil && (want.Serving.Len() > 0 || e.config.Hooks.Activate != nil) {
			for _, socket := range s.sockets {
				ends = append(ends, socket.site.Addr)
			}
		}
		own := ends[first:len(ends):len(ends)]
		slices.SortFunc(own, netip.AddrPort.Compare)
		all[want.Name] = own
	}
	return all
}

// Abilities implements proxier.Engine. Watch watches the portals; Dump prints the sockets and the portals;
// Descriptors are the figures of Config.Budget.
func (e *Engine) Abilities() proxier.Abilities {
	can := proxier.Abilities{Plan: e.Plan, Dump: e.Dump, Counts: e.Counts, Verify: e.Verify, Descriptors: e.config.Budget.Descriptors}
	if e.portals != nil {
		portals := e.portals.Abilities()
		can.OwnsNames, can.Watch, can.Part = portals.OwnsNames, portals.Watch, portals.Part
	}
	if can.Watch == nil {
		can.Watch = func(ctx context.Context, _ func(proxier.Damage)) error {
			<-ctx.Done()
			return nil
		}
	}
	return can
}

// Traits implements proxier.Engine. They are those of the portals; endpoints see the node's
// address instead of the client's, and sockets have all load balancing policies.
func (e *Engine) Traits(s *desired.Service) desired.Traits {
	var t desired.Traits
	if e.portals != nil {
		t = e.portals.Traits(s)
	}
	t.SourceLost, t.LeastConnections, t.NoHash, t.Scheduler = true, policies.LeastConnections, policies.NoHash, policies.Scheduler
	t.ClientLimits = false // see portalOf
	return t
}

// Close lets connections continue for Config.Linger. Then it ends all sockets and
// connections, and waits for them. The portals stay in the
// kernel and refuse clients until the next start updates them. Apply may be called
// again after Close; that update must be full.
func (e *Engine) Close() error {
	e.linger()
	err := e.shutdown(context.Background()) //nolint:forbidigo // addresses are always removed
	if e.portals != nil {
		err = errors.Join(err, e.portals.Close())
	}
	return err
}

func (e *Engine) shutdown(ctx context.Context) error {
	for name := range e.services {
		e.remove(name)
	}
	if e.end != nil {
		e.end()
		e.end = nil
	}
	err := e.closeSockets(ctx)
	e.running.Wait()
	e.workers.running.Wait()
	e.refuser.close()
	e.portalGlobals = desired.Globals{}
	return err
}
