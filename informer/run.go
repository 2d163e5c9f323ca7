package informer

import (
	"context"
	"errors"
	"fmt"
	"sync"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// Run creates informers and delivers their events to a Provider until ctx ends. It
// returns nil after all goroutines have ended. The API server sends only Services that
// have a ClusterIP and the right label, EndpointSlices of Services that are not
// headless, and one Node.
//
// An unreachable API server is no error: the Provider keeps its state, and Run tries
// again. Run may then return up to a minute after the end of ctx, because client-go 0.37
// does not interrupt its pause between two attempts.
func Run(ctx context.Context, config *rest.Config, p proxier.EventHandler, o Options) error {
	o = o.withDefaults()
	own, err := newInformers(config, o)
	if err != nil {
		return fmt.Errorf("create informers: %w", err)
	}
	stop, err := bind(own, p, o)
	if err != nil {
		return err
	}
	var running sync.WaitGroup
	for _, i := range []cache.SharedIndexInformer{own.Services, own.EndpointSlices, own.ServiceCIDRs, own.Nodes, own.ServiceImports} {
		if i != nil {
			running.Go(func() { i.RunWithContext(o.clientLogs(ctx)) })
		}
	}
	<-ctx.Done()
	stop()
	running.Wait()
	return nil
}

// newInformers returns the informers of Run.
func newInformers(config *rest.Config, o Options) (i Informers, err error) {
	c, err := newClients(config)
	if err != nil {
		return i, err
	}
	var errs []error
	informer := func(kind string, group schema.GroupVersion, resource string, selection func(*metav1.ListOptions), object runtime.Object) cache.SharedIndexInformer {
		from, err := c.source(group, resource, selection)
		if err != nil {
			errs = append(errs, err)
			return nil
		}
		made, err := o.newInformer(kind, from, object)
		errs = append(errs, err)
		return made
	}
	i.Services = informer(kindServices, v1.SchemeGroupVersion, "services", servicesOf(o.ServiceProxyName), &v1.Service{})
	i.EndpointSlices = informer(kindSlices, discovery.SchemeGroupVersion, "endpointslices", labelled("!"+v1.IsHeadlessService), &discovery.EndpointSlice{})
	i.ServiceCIDRs = informer(kindCIDRs, networking.SchemeGroupVersion, "servicecidrs", func(*metav1.ListOptions) {}, &networking.ServiceCIDR{})
	if o.nodeName() != "" {
		i.Nodes = informer(kindNodes, v1.SchemeGroupVersion, "nodes", named(o.nodeName()), &v1.Node{})
	}
	if o.ServiceImports {
		client, err := c.untyped()
		if err != nil {
			return i, err
		}
		i.ServiceImports, err = newServiceImports(client, o)
		errs = append(errs, err)
	}
	return i, errors.Join(errs...)
}

// newInformer returns an informer that drops what no proxy reads and logs errors once.
func (o Options) newInformer(kind string, from cache.ListerWatcher, object runtime.Object) (cache.SharedIndexInformer, error) {
	i := cache.NewSharedIndexInformer(from, object, o.resync(), cache.Indexers{})
	if err := errors.Join(i.SetTransform(slim), i.SetWatchErrorHandlerWithContext(newWatchErrors(o, kind).handle)); err != nil {
		return nil, fmt.Errorf("watch %s: %w", kind, err)
	}
	return i, nil
}

func servicesOf(proxyName string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) {
		o.LabelSelector = "!" + changetracker.LabelServiceProxyName
		if proxyName != "" {
			o.LabelSelector = changetracker.LabelServiceProxyName + "=" + proxyName
		}
		o.FieldSelector = fields.OneTermNotEqualSelector("spec.clusterIP", v1.ClusterIPNone).String()
	}
}

func labelled(selector string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) { o.LabelSelector = selector }
}

func named(name string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
	}
}

// slim drops fields that no proxy reads, before the informer stores the object.
func slim(object any) (any, error) {
	if o, err := meta.Accessor(object); err == nil {
		o.SetManagedFields(nil)
	}
	if node, ok := object.(*v1.Node); ok {
		node.Status.Images = nil
	}
	return object, nil
}
