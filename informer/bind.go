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

// Bind connects the informers of the caller's factory to a Provider. The caller then
// starts the factory, even if it runs already: Start starts the informers that are new.
// Bind drops events that the Provider does not need: those of other nodes, and of
// EndpointSlices of headless Services.
//
// stop disconnects the Provider, and returns when no more event will reach it. It may be
// called more than once, and before the factory is started, but not by the Provider
// during an event. With Options.ServiceImports it may take a minute while the API server
// does not answer.
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

// binding connects sources to a Provider.
type binding struct {
	provider proxier.EventHandler
	options  Options
	log      *zap.Logger
	delivery *delivery
	bound    map[string]registration // by kind
	node     *nodeFeed
	cidrs    *cidrFeed
	imports  *importFeed
}

type registration struct {
	informer cache.SharedIndexInformer
	handle   cache.ResourceEventHandlerRegistration
}

func bind(s sources, p proxier.EventHandler, o Options) (stop func(), err error) {
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("informer options: %w", err)
	}
	b := &binding{
		provider: p, options: o, log: o.Logger, delivery: &delivery{log: o.Logger}, bound: map[string]registration{},
		node:  &nodeFeed{provider: p, name: o.nodeName(), seen: make(chan struct{})},
		cidrs: &cidrFeed{provider: p, store: s.cidrs.GetStore(), log: o.Logger},
	}
	b.imports = newImportFeed(b.delivery, p, o)
	if err := b.register(s); err != nil {
		b.unbind()
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background()) //nolint:forbidigo // stop ends it
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
		b.add(kindServices, s.services, handle(b.delivery, events[*v1.Service]{
			add: b.provider.OnServiceAdd, update: b.provider.OnServiceUpdate, remove: b.provider.OnServiceDelete,
		})),
		b.add(kindSlices, s.slices, cache.FilteringResourceEventHandler{
			FilterFunc: notHeadless,
			Handler: handle(b.delivery, events[*discovery.EndpointSlice]{
				add: b.provider.OnEndpointSliceAdd, update: b.provider.OnEndpointSliceUpdate, remove: b.provider.OnEndpointSliceDelete,
			}),
		}),
		b.add(kindCIDRs, s.cidrs, handle(b.delivery, events[*networking.ServiceCIDR]{
			add:    func(*networking.ServiceCIDR) { b.cidrs.changed() },
			update: func(_, _ *networking.ServiceCIDR) { b.cidrs.changed() },
			remove: func(*networking.ServiceCIDR) { b.cidrs.changed() },
		})),
		b.add(kindNodes, s.nodes, handle(b.delivery, events[*v1.Node]{
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

// unbind stops the delivery and removes the handlers.
func (b *binding) unbind() {
	b.delivery.stop()
	for _, r := range b.bound {
		if err := r.informer.RemoveEventHandler(r.handle); err != nil {
			b.log.Warn("remove event handler: it stays registered but inactive", zap.Error(err))
		}
	}
}

// announce tells the Provider that the first lists are complete.
func (b *binding) announce(ctx context.Context) {
	if !b.awaitRequired(ctx, kindServices) || !b.awaitRequired(ctx, kindSlices) {
		return
	}
	missing := b.awaitOptional(ctx)
	if ctx.Err() != nil {
		return
	}
	if len(missing) > 0 {
		b.log.Warn("first sync starts without some objects: they did not arrive in time", zap.Strings("missing", missing), zap.Duration("waited", b.options.WaitTimeout))
	}
	b.provider.OnServiceSynced()
	b.provider.OnEndpointSlicesSynced()
}

// awaitRequired waits for the first list without limit. It logs that it waits, since
// client-go does not log that an API server is unreachable.
func (b *binding) awaitRequired(ctx context.Context, kind string) bool {
	waiting, cancel := context.WithTimeout(ctx, b.options.WaitTimeout)
	defer cancel()
	delivered := b.bound[kind].handle.HasSyncedChecker().Done()
	if arrived(waiting, delivered) {
		return true
	}
	if ctx.Err() == nil {
		b.log.Warn("nothing is programmed yet: waiting for the API server", zap.String("missing", kind))
	}
	return arrived(ctx, delivered)
}

// awaitOptional waits for the ServiceCIDRs, the Node and the ServiceImports, up to
// Options.WaitTimeout, and returns those that are missing. Without the wait, the first
// sync would program a node without addresses and the second one would correct it.
func (b *binding) awaitOptional(ctx context.Context) (missing []string) {
	waiting, cancel := context.WithTimeout(ctx, b.options.WaitTimeout)
	defer cancel()
	if !arrived(waiting, b.bound[kindCIDRs].handle.HasSyncedChecker().Done()) {
		missing = append(missing, kindCIDRs)
	}
	if b.node.name != "" && !arrived(waiting, b.node.seen) {
		missing = append(missing, "Node "+b.node.name)
	}
	if !arrived(waiting, b.imports.synced) {
		missing = append(missing, kindImports)
	}
	return missing
}

// arrived waits until the channel is closed or ctx ends. It returns true if the channel
// is closed, even if ctx has ended too.
func arrived(ctx context.Context, done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	case <-ctx.Done():
	}
	select {
	case <-done:
		return true
	default:
		return false
	}
}
