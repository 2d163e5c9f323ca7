package informer

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
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
func Run(ctx context.Context, client kubernetes.Interface, p proxier.EventHandler, o Options) error {
	o = o.withDefaults()
	own := &ownInformers{client: client, options: o}
	s := sources{
		services: own.factory(servicesOf(o.ServiceProxyName)).Core().V1().Services().Informer(),
		slices:   own.factory(labelled("!" + v1.IsHeadlessService)).Discovery().V1().EndpointSlices().Informer(),
		cidrs:    own.factory(nil).Networking().V1().ServiceCIDRs().Informer(),
	}
	if o.nodeName() != "" {
		s.nodes = own.factory(named(o.nodeName())).Core().V1().Nodes().Informer()
	}
	if err := own.prepare(s); err != nil {
		return err
	}
	stop, err := bind(s, p, o)
	if err != nil {
		return err
	}
	for _, f := range own.factories {
		f.StartWithContext(o.clientLogs(ctx))
	}
	<-ctx.Done()
	stop()
	for _, f := range own.factories {
		f.Shutdown()
	}
	return nil
}

// ownInformers has one factory for each selection of objects.
type ownInformers struct {
	client    kubernetes.Interface
	options   Options
	factories []informers.SharedInformerFactory
}

func (i *ownInformers) factory(selection func(*metav1.ListOptions)) informers.SharedInformerFactory {
	f := informers.NewSharedInformerFactoryWithOptions(i.client, i.options.resync(),
		informers.WithTweakListOptions(selection), informers.WithTransform(slim))
	i.factories = append(i.factories, f)
	return f
}

// prepare sets the error handlers of the informers.
func (i *ownInformers) prepare(s sources) error {
	for kind, informer := range map[string]cache.SharedIndexInformer{
		kindServices: s.services, kindSlices: s.slices, kindCIDRs: s.cidrs, kindNodes: s.nodes,
	} {
		if informer == nil {
			continue
		}
		w := newWatchErrors(i.options, kind)
		if err := informer.SetWatchErrorHandlerWithContext(w.handle); err != nil {
			return fmt.Errorf("watch %s: %w", kind, err)
		}
	}
	return nil
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
