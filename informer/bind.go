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

// Bind connects the informers of the caller's factory to a Provider. Before or
// after, the caller starts the factory. The informers may deliver more than the
// Provider needs: other nodes and EndpointSlices of headless Services stop here.
//
// stop takes the Provider off the informers again, and returns when no more event
// will reach it. It may be called more than once, and whether or not the factory
// was ever started.
func Bind(factory informers.SharedInformerFactory, p proxier.Provider, o Options) (stop func(), err error) {
	s := sources{
		services: factory.Core().V1().Services().Informer(),
		slices:   factory.Discovery().V1().EndpointSlices().Informer(),
		cidrs:    factory.Networking().V1().ServiceCIDRs().Informer(),
	}
	if o.NodeName != "" {
		s.nodes = factory.Core().V1().Nodes().Informer()
	}
	return bind(s, p, o)
}

// sources are the informers to bind; nodes may be nil.
type sources struct {
	services, slices, nodes, cidrs cache.SharedIndexInformer
}

// binding is what connects sources to a Provider.
type binding struct {
	provider proxier.Provider
	options  Options
	log      *zap.Logger
	bound    []registration
	node     *nodeFeed
	cidrs    *cidrFeed

	mu      sync.RWMutex // held for reading while an event is delivered
	stopped bool         // guarded by mu
}

type registration struct {
	informer cache.SharedIndexInformer
	handle   cache.ResourceEventHandlerRegistration
}

func bind(s sources, p proxier.Provider, o Options) (stop func(), err error) {
	o = o.withDefaults()
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("informer options: %w", err)
	}
	b := &binding{
		provider: p, options: o, log: o.Logger,
		node:  &nodeFeed{provider: p, name: o.NodeName, seen: make(chan struct{})},
		cidrs: &cidrFeed{provider: p, store: s.cidrs.GetStore(), log: o.Logger},
	}
	if err := b.register(s); err != nil {
		b.unbind()
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background()) //nolint:forbidigo // stop ends it, as its caller was promised
	var waiting sync.WaitGroup
	waiting.Go(func() { b.announce(ctx) })
	return func() {
		cancel()
		waiting.Wait()
		b.unbind()
	}, nil
}

// register adds all handlers, Services first.
func (b *binding) register(s sources) error {
	return errors.Join(
		b.add("Services", s.services, handle(b, events[*v1.Service]{
			add: b.provider.OnServiceAdd, update: b.provider.OnServiceUpdate, remove: b.provider.OnServiceDelete,
		})),
		b.add("EndpointSlices", s.slices, cache.FilteringResourceEventHandler{
			FilterFunc: notHeadless,
			Handler: handle(b, events[*discovery.EndpointSlice]{
				add: b.provider.OnEndpointSliceAdd, update: b.provider.OnEndpointSliceUpdate, remove: b.provider.OnEndpointSliceDelete,
			}),
		}),
		b.add("ServiceCIDRs", s.cidrs, handle(b, events[*networking.ServiceCIDR]{
			add:    func(*networking.ServiceCIDR) { b.cidrs.changed() },
			update: func(_, _ *networking.ServiceCIDR) { b.cidrs.changed() },
			remove: func(*networking.ServiceCIDR) { b.cidrs.changed() },
		})),
		b.add("Nodes", s.nodes, handle(b, events[*v1.Node]{
			add:    b.node.changed,
			update: func(_, node *v1.Node) { b.node.changed(node) },
			remove: b.node.deleted(b.log),
		})),
	)
}

func (b *binding) add(what string, informer cache.SharedIndexInformer, handler cache.ResourceEventHandler) error {
	if informer == nil {
		return nil
	}
	handle, err := informer.AddEventHandler(handler)
	if err != nil {
		return fmt.Errorf("watch %s: %w", what, err)
	}
	b.bound = append(b.bound, registration{informer: informer, handle: handle})
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

// announce tells the Provider that everything has arrived. The Node and the
// ServiceCIDRs are worth some waiting, or the first sync would program a node
// without addresses and the second one would put that right.
func (b *binding) announce(ctx context.Context) {
	const services, slices = 0, 1 // in order of registration
	if !b.mustArrive(ctx, "Services", b.bound[services]) || !b.mustArrive(ctx, "EndpointSlices", b.bound[slices]) {
		return
	}
	patience, cancel := context.WithTimeout(ctx, b.options.Patience)
	defer cancel()
	for _, r := range b.bound[slices+1:] {
		arrived(patience, r)
	}
	if b.options.NodeName != "" {
		select {
		case <-b.node.seen:
		case <-patience.Done():
		}
	}
	if ctx.Err() != nil {
		return
	}
	if patience.Err() != nil {
		b.log.Warn("the first sync waits no longer for the Node or the ServiceCIDRs",
			zap.String("node", b.options.NodeName), zap.Duration("waited", b.options.Patience))
	}
	b.provider.OnServiceSynced()
	b.provider.OnEndpointSlicesSynced()
}

// mustArrive waits however long it takes, but not in silence: client-go says
// nothing of an API server that cannot be reached.
func (b *binding) mustArrive(ctx context.Context, what string, r registration) bool {
	patience, cancel := context.WithTimeout(ctx, b.options.Patience)
	defer cancel()
	if arrived(patience, r) {
		return true
	}
	if ctx.Err() == nil {
		b.log.Warn("nothing is written before the API server has answered", zap.String("waiting for", what))
	}
	return arrived(ctx, r)
}

// arrived waits until a handler was given all objects of the first list.
func arrived(ctx context.Context, r registration) bool {
	select {
	case <-r.handle.HasSyncedChecker().Done():
		return true
	case <-ctx.Done():
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
