package userspace

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/connection"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/proxier"
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

// Traffic counts the connections of a service port since its creation.
type Traffic struct {
	// Accepted counts TCP connections, or flows of UDP clients. Refused counts those
	// that no endpoint served, and Open those that have not ended.
	Accepted, Refused, Open int64
	// Retried counts the failed attempts to reach an endpoint.
	Retried int64
}

// Traffic returns the counters of every service port.
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
