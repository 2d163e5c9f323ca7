package informer

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/serviceplane/serviceplane/proxier"
)

// Bind connects the informers of the caller's factory to a Provider. Then the
// caller starts the factory, also if it runs already: Start starts what it did not
// have before. The informers may deliver more than the Provider needs: other nodes
// and EndpointSlices of headless Services stop here.
//
// stop takes the Provider off the informers again, and returns when no more event
// will reach it. It may be called more than once, and whether or not the factory
// was ever started, but not by the Provider from within an event. With
// Options.ServiceImports it may take a minute while the API server does not answer.
func Bind(factory informers.SharedInformerFactory, p proxier.EventHandler, o Options) (stop func(), err error) {
	s := sources{
		services: factory.Core().V1().Services().Informer(),
		slices:   factory.Discovery().V1().EndpointSlices().Informer(),
		cidrs:    factory.Networking().V1().ServiceCIDRs().Informer(),
	}
	if o.nodeName() != "" {
		s.nodes = factory.Core().V1().Nodes().Informer()
	}
	return bind(s, p, o.withDefaults())
}

// sources are the informers to bind; nodes may be nil.
type sources struct {
	services, slices, nodes, cidrs cache.SharedIndexInformer
}

// binding is what connects sources to a Provider.
type binding struct {
	provider proxier.EventHandler
	options  Options
	log      *zap.Logger
	bound    map[string]registration // by kind
	node     *nodeFeed
	cidrs    *cidrFeed
	imports  *importFeed

	mu      sync.RWMutex // held for reading while an event is delivered
	stopped bool         // guarded by mu
}

type registration struct {
	informer cache.SharedIndexInformer
	handle   cache.ResourceEventHandlerRegistration
}

// Kinds of objects, as the log names them.
const (
	kindServices = "Services"
	kindSlices   = "EndpointSlices"
	kindCIDRs    = "ServiceCIDRs"
	kindNodes    = "Nodes"
	kindImports  = "ServiceImports"
)

func bind(s sources, p proxier.EventHandler, o Options) (stop func(), err error) {
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("informer options: %w", err)
	}
	b := &binding{
		provider: p, options: o, log: o.Logger, bound: map[string]registration{},
		node:  &nodeFeed{provider: p, name: o.nodeName(), seen: make(chan struct{})},
		cidrs: &cidrFeed{provider: p, store: s.cidrs.GetStore(), log: o.Logger},
	}
	b.imports = newImportFeed(b)
	if err := b.register(s); err != nil {
		b.unbind()
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background()) //nolint:forbidigo // stop ends it, as its caller was promised
	var waiting sync.WaitGroup
	waiting.Go(func() { b.announce(ctx) })
	waiting.Go(func() { b.imports.run(ctx) })
	return func() {
		cancel()
		waiting.Wait()
		b.unbind()
	}, nil
}

// register adds all handlers.
func (b *binding) register(s sources) error {
	return errors.Join(
		b.add(kindServices, s.services, handle(b, events[*v1.Service]{
			add: b.provider.OnServiceAdd, update: b.provider.OnServiceUpdate, remove: b.provider.OnServiceDelete,
		})),
		b.add(kindSlices, s.slices, cache.FilteringResourceEventHandler{
			FilterFunc: notHeadless,
			Handler: handle(b, events[*discovery.EndpointSlice]{
				add: b.provider.OnEndpointSliceAdd, update: b.provider.OnEndpointSliceUpdate, remove: b.provider.OnEndpointSliceDelete,
			}),
		}),
		b.add(kindCIDRs, s.cidrs, handle(b, events[*networking.ServiceCIDR]{
			add:    func(*networking.ServiceCIDR) { b.cidrs.changed() },
			update: func(_, _ *networking.ServiceCIDR) { b.cidrs.changed() },
			remove: func(*networking.ServiceCIDR) { b.cidrs.changed() },
		})),
		b.add(kindNodes, s.nodes, handle(b, events[*v1.Node]{
			add:    b.node.changed,
			update: func(_, node *v1.Node) { b.node.changed(node) },
			remove: b.node.deleted(b.log),
		})),
	)
}

func (b *binding) add(kind string, informer cache.SharedIndexInformer, handler cache.ResourceEventHandler) error {
	if informer == nil {
		return nil
	}
	handle, err := informer.AddEventHandler(handler)
	if err != nil {
		return fmt.Errorf("watch %s: %w", kind, err)
	}
	b.bound[kind] = registration{informer: informer, handle: handle}
	return nil
}

// unbind returns when no event is being delivered, and lets none in any more.
func (b *binding) unbind() {
	b.mu.Lock()
	b.stopped = true
	b.mu.Unlock()
	for _, r := range b.bound {
		if err := r.informer.RemoveEventHandler(r.handle); err != nil {
			b.log.Warn("handler stays registered, and does nothing", zap.Error(err))
		}
	}
}

// announce tells the Provider that everything has arrived.
func (b *binding) announce(ctx context.Context) {
	if !b.mustArrive(ctx, kindServices) || !b.mustArrive(ctx, kindSlices) {
		return
	}
	missing := b.mayArrive(ctx)
	if ctx.Err() != nil {
		return
	}
	if len(missing) > 0 {
		b.log.Warn("the first sync waits no longer", zap.Strings("for", missing), zap.Duration("waited", b.options.WaitTimeout))
	}
	b.provider.OnServiceSynced()
	b.provider.OnEndpointSlicesSynced()
}

// mustArrive waits however long it takes, but not in silence: client-go says
// nothing of an API server that cannot be reached.
func (b *binding) mustArrive(ctx context.Context, kind string) bool {
	waiting, cancel := context.WithTimeout(ctx, b.options.WaitTimeout)
	defer cancel()
	delivered := b.bound[kind].handle.HasSyncedChecker().Done()
	if arrived(waiting, delivered) {
		return true
	}
	if ctx.Err() == nil {
		b.log.Warn("nothing is written before the API server has answered", zap.String("waiting for", kind))
	}
	return arrived(ctx, delivered)
}

// mayArrive waits for the ServiceCIDRs, the Node and the ServiceImports, and names what
// does not come in time. They are worth some waiting: without, the first sync would
// program a node without addresses, and the second one would put that right.
func (b *binding) mayArrive(ctx context.Context) (missing []string) {
	waiting, cancel := context.WithTimeout(ctx, b.options.WaitTimeout)
	defer cancel()
	if !arrived(waiting, b.bound[kindCIDRs].handle.HasSyncedChecker().Done()) {
		missing = append(missing, kindCIDRs)
	}
	if b.node.name != "" && !arrived(waiting, b.node.seen) {
		missing = append(missing, "Node "+b.node.name)
	}
	if !arrived(waiting, b.imports.known) {
		missing = append(missing, kindImports)
	}
	return missing
}

// arrived waits until what closes the channel has come. What is there already
// counts, however late it is.
func arrived(ctx context.Context, come <-chan struct{}) bool {
	select {
	case <-come:
		return true
	case <-ctx.Done():
	}
	select {
	case <-come:
		return true
	default:
		return false
	}
}

// deliver hands an event on, unless the binding is stopped.
func (b *binding) deliver(event func()) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if !b.stopped {
		event()
	}
}
