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
	"github.com/serviceplane/serviceplane/internal/apiclient"
	"github.com/serviceplane/serviceplane/proxier"
)

// Run watches the API server and delivers what it says to a Provider until ctx ends. It
// returns nil after all goroutines have ended. The API server sends only Services that
// have a ClusterIP and the right label, EndpointSlices of Services that are not
// headless, and one Node. Run stores only their names, also while a list arrives as a stream:
// an object that changes is delivered as if it was new, and one whose deletion was missed has
// only its name then. Run also says OnVersion. It asks for protobuf, unless config has AcceptContentTypes.
//
// An unreachable API server is no error: the Provider keeps its state, and Run tries
// again, with one request at a time, so that a change comes within two seconds after the API server
// answers again.
func Run(ctx context.Context, config *rest.Config, p proxier.EventHandler, o Options) error {
	o = o.withDefaults()
	if err := o.validate(); err != nil {
		return err
	}
	mirrors, err := newMirrors(config, p, o)
	if err != nil {
		return fmt.Errorf("create clients: %w", err)
	}
	own := map[string]feed{}
	for kind, m := range mirrors {
		own[kind] = m
	}
	stop, err := bind(own, p, o)
	if err != nil {
		return err
	}
	var running sync.WaitGroup
	out := newOutage()
	for kind, m := range mirrors {
		running.Go(func() { m.run(o.clientLogs(ctx), newWatchErrors(o, kind), out) })
	}
	<-ctx.Done()
	stop()
	running.Wait()
	return nil
}

// newMirrors returns the mirrors of Run, by kind.
func newMirrors(config *rest.Config, p proxier.EventHandler, o Options) (map[string]*mirror, error) {
	c, err := apiclient.New(config)
	if err != nil {
		return nil, err
	}
	mirrors := map[string]*mirror{}
	var errs []error
	add := func(kind string, group schema.GroupVersion, resource string, selection func(*metav1.ListOptions), nameless func() named) {
		from, err := c.Source(group, resource, metav1.NamespaceAll, selection)
		mirrors[kind] = newMirror(from, nameless)
		errs = append(errs, err)
	}
	add(kindServices, v1.SchemeGroupVersion, "services", servicesOf(o.ServiceProxyName), func() named { return &v1.Service{} })
	add(kindSlices, discovery.SchemeGroupVersion, "endpointslices", labelled("!"+v1.IsHeadlessService), func() named { return &discovery.EndpointSlice{} })
	add(kindCIDRs, networking.SchemeGroupVersion, "servicecidrs", func(*metav1.ListOptions) {}, func() named { return &networking.ServiceCIDR{} })
	if o.nodeName() != "" {
		add(kindNodes, v1.SchemeGroupVersion, "nodes", nodeNamed(o.nodeName()), func() named { return &v1.Node{} })
		some, err := c.Source(v1.SchemeGroupVersion, "nodes", metav1.NamespaceAll, func(o *metav1.ListOptions) { o.Limit = namesInHint })
		errs = append(errs, err)
		mirrors[kindNodes].some = func(ctx context.Context) []string { return namesOf(ctx, some) }
	}
	if o.ServiceImports {
		client, err := c.Untyped()
		if err != nil {
			return nil, err
		}
		mirrors[kindImports] = newMirror(importsOf(client, o), func() named { return newServiceImport() })
	}
	mirrors[kindServices].heard = func(version string) { p.OnVersion(changetracker.InputServices, version) }
	mirrors[kindSlices].heard = func(version string) { p.OnVersion(changetracker.InputEndpointSlices, version) }
	return mirrors, errors.Join(errs...)
}

// namesInHint is how many nodes a log line names.
const namesInHint = 5

// namesOf lists names for a hint: an error makes it shorter.
func namesOf(ctx context.Context, from cache.ListerWatcher) (names []string) {
	list, err := cache.ToListerWatcherWithContext(from).ListWithContext(ctx, metav1.ListOptions{})
	if err != nil {
		return nil
	}
	_ = meta.EachListItem(list, func(object runtime.Object) error {
		if o, ok := object.(named); ok {
			names = append(names, o.GetName())
		}
		return nil
	})
	return names
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

func nodeNamed(name string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
	}
}
