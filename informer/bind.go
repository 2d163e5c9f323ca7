package informer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/cache"

	"github.com/serviceplane/serviceplane/proxier"
)

// Informers are the informers that Bind connects. Services and EndpointSlices are
// required, and Nodes if Options.NodeName is set.
type Informers struct {
	Services, EndpointSlices, ServiceCIDRs, Nodes cache.SharedIndexInformer
	// ServiceImports is an informer of NewServiceImports, or of the same objects.
	ServiceImports cache.SharedIndexInformer
}

// missing returns an error that names the informers that are required and missing.
func (i *Informers) missing(o Options) error {
	var errs []error
	if i.Services == nil {
		errs = append(errs, errors.New("no Services: set Informers.Services"))
	}
	if i.EndpointSlices == nil {
		errs = append(errs, errors.New("no EndpointSlices: set Informers.EndpointSlices"))
	}
	if (i.Nodes != nil) != (o.NodeName != "") {
		errs = append(errs, errors.New("only one of Informers.Nodes and Options.NodeName: set both, or neither"))
	}
	return errors.Join(errs...)
}

// Bind connects informers of the caller to a Provider. The caller runs them, before or
// after. Bind drops events that the Provider does not need: those of other nodes, and of
// EndpointSlices of headless Services.
//
// stop disconnects the Provider, and returns when no more event will reach it. It may be
// called more than once, and before the informers run, but not by the Provider during an
// event.
func Bind(i Informers, p proxier.EventHandler, o Options) (stop func(), err error) {
	o = o.withDefaults()
	if err := o.validate(); err != nil {
		return nil, err
	}
	if err := i.missing(o); err != nil {
		return nil, fmt.Errorf("bind informers: %w", err)
	}
	return bind(i.feeds(), p, o)
}

// feed is an informer or a mirror.
type feed interface {
	AddEventHandler(cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error)
	RemoveEventHandler(cache.ResourceEventHandlerRegistration) error
}

// feeds returns the informers by kind.
func (i *Informers) feeds() map[string]feed {
	all := map[string]feed{}
	for kind, informer := range map[string]cache.SharedIndexInformer{
		kindServices: i.Services, kindSlices: i.EndpointSlices, kindCIDRs: i.ServiceCIDRs, kindNodes: i.Nodes, kindImports: i.ServiceImports,
	} {
		if informer != nil {
			all[kind] = informer
		}
	}
	return all
}

// binding connects feeds to a Provider.
type binding struct {
	provider proxier.EventHandler
	options  Options
	log      *zap.Logger
	delivery *delivery
	bound    map[string]registration // by kind
	node     *nodeFeed
}

type registration struct {
	feed   feed
	handle cache.ResourceEventHandlerRegistration
}

func bind(feeds map[string]feed, p proxier.EventHandler, o Options) (stop func(), err error) {
	b := &binding{
		provider: p, options: o, log: o.Logger, delivery: &delivery{log: o.Logger}, bound: map[string]registration{},
		node: &nodeFeed{provider: p, name: o.nodeName(), log: o.Logger, seen: make(chan struct{})},
	}
	if err := b.register(feeds); err != nil {
		b.unbind()
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background()) //nolint:forbidigo // stop ends it
	var waiting sync.WaitGroup
	waiting.Go(func() { b.announce(ctx) })
	return func() {
		cancel()
		waiting.Wait()
		b.unbind()
	}, nil
}

// register adds all handlers.
func (b *binding) register(feeds map[string]feed) error {
	p, imports, cidrs := b.provider, importFeed{provider: b.provider, log: b.log}, newCIDRFeed(b.provider, b.log)
	handlers := map[string]cache.ResourceEventHandler{
		kindServices: handle(b.delivery, events[*v1.Service]{
			add: p.OnServiceAdd, update: p.OnServiceUpdate, remove: p.OnServiceDelete,
		}),
		kindSlices: cache.FilteringResourceEventHandler{
			FilterFunc: notHeadless,
			Handler: handle(b.delivery, events[*discovery.EndpointSlice]{
				add: p.OnEndpointSliceAdd, update: p.OnEndpointSliceUpdate, remove: p.OnEndpointSliceDelete,
			}),
		},
		kindCIDRs: handle(b.delivery, events[*networking.ServiceCIDR]{
			add: cidrs.changed, update: func(_, s *networking.ServiceCIDR) { cidrs.changed(s) }, remove: cidrs.deleted,
		}),
		kindNodes: handle(b.delivery, events[*v1.Node]{
			add: b.node.changed, update: func(_, node *v1.Node) { b.node.changed(node) }, remove: b.node.deleted,
		}),
		kindImports: handle(b.delivery, events[*unstructured.Unstructured]{
			add: imports.added, update: imports.updated, remove: imports.deleted,
		}),
	}
	for kind, from := range feeds {
		handle, err := from.AddEventHandler(handlers[kind])
		if err != nil {
			return fmt.Errorf("watch %s: %w", kind, err)
		}
		b.bound[kind] = registration{feed: from, handle: handle}
	}
	return nil
}

// unbind stops the delivery and removes the handlers.
func (b *binding) unbind() {
	b.delivery.stop()
	for _, r := range b.bound {
		if err := r.feed.RemoveEventHandler(r.handle); err != nil {
			b.log.Warn("event handler is not removed: it stays registered, and does nothing", zap.Error(err))
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
		b.log.Warn("first sync starts without some objects: the API server refuses them, or they did not arrive in time",
			zap.Strings("missing", missing), zap.Duration("waited", b.options.WaitTimeout), zap.Strings("nodes that exist", b.someNodes(ctx, missing)))
	}
	b.provider.OnServiceSynced()
	b.provider.OnEndpointSlicesSynced()
}

// someNodes returns names of nodes for whoever has given a wrong one.
func (b *binding) someNodes(ctx context.Context, missing []string) []string {
	m, ok := b.bound[kindNodes].feed.(*mirror)
	if !ok || !slices.Contains(missing, "Node "+b.node.name) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, defaultWaitTimeout)
	defer cancel()
	return m.some(ctx)
}

// awaitRequired waits for the first list without limit. It logs that it waits, since
// client-go does not log that an API server is unreachable.
func (b *binding) awaitRequired(ctx context.Context, kind string) bool {
	waiting, cancel := context.WithTimeout(ctx, b.options.WaitTimeout)
	defer cancel()
	delivered := b.bound[kind].handle.HasSyncedChecker().Done()
	if arrived(waiting, delivered, nil) {
		return true
	}
	if ctx.Err() == nil {
		b.log.Warn("nothing is programmed yet: waiting for the API server", zap.String("missing", kind))
	}
	return arrived(ctx, delivered, nil)
}

// awaitOptional waits for the ServiceCIDRs, the Node and the ServiceImports, up to
// Options.WaitTimeout, and returns those that are missing. Without the wait, the first
// sync would program a node without addresses and the second one would correct it.
func (b *binding) awaitOptional(ctx context.Context) (missing []string) {
	waiting, cancel := context.WithTimeout(ctx, b.options.WaitTimeout)
	defer cancel()
	for _, kind := range []string{kindCIDRs, kindImports} {
		if r, ok := b.bound[kind]; ok && !arrived(waiting, r.handle.HasSyncedChecker().Done(), r.refused()) {
			missing = append(missing, kind)
		}
	}
	if b.node.name != "" && !arrived(waiting, b.node.seen, b.bound[kindNodes].refused()) {
		missing = append(missing, "Node "+b.node.name)
	}
	return missing
}

// refused returns a channel that is closed when it is useless to wait for the objects; nil if nobody
// tells, as with informers of the program.
func (r registration) refused() <-chan struct{} {
	if m, ok := r.feed.(*mirror); ok {
		return m.refused
	}
	return nil
}

// arrived waits until done or refused is closed or ctx ends. It returns true if done is closed, even if
// ctx has ended too.
func arrived(ctx context.Context, done, refused <-chan struct{}) bool {
	select {
	case <-done:
		return true
	case <-refused:
	case <-ctx.Done():
	}
	select {
	case <-done:
		return true
	default:
		return false
	}
}
