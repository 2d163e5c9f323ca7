package informer

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/tools/cache"
	netutils "k8s.io/utils/net"

	"github.com/serviceplane/serviceplane/changetracker"
)

// serviceImports is the resource of the Multi-Cluster Services API (KEP-1645).
func serviceImports() schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "multicluster.x-k8s.io", Version: "v1alpha1", Resource: "serviceimports"}
}

// importFeed delivers ServiceImports as Services.
type importFeed struct {
	*binding

	// known is closed by markKnown, when what exists has been delivered, or the resource does
	// not exist.
	known     chan struct{}
	markKnown func()
}

func newImportFeed(b *binding) *importFeed {
	f := &importFeed{binding: b, known: make(chan struct{})}
	f.markKnown = sync.OnceFunc(func() { close(f.known) })
	if b.options.ServiceImports == nil {
		f.markKnown()
	}
	return f
}

// run works until ctx ends.
func (f *importFeed) run(ctx context.Context) {
	c := &complaints{log: f.log, kind: kindImports, linked: f.options.Link != nil}
	if f.options.ServiceImports == nil || !f.await(ctx, c) {
		return
	}
	i := dynamicinformer.NewFilteredDynamicInformer(f.options.ServiceImports, serviceImports(), metav1.NamespaceAll,
		f.options.resync(), cache.Indexers{}, nil).Informer()
	f.must(i.SetWatchErrorHandlerWithContext(c.hear))
	f.must(i.SetTransform(slim))
	on := f.provider
	registered, err := i.AddEventHandler(handle(f.binding, events[*unstructured.Unstructured]{
		add:    func(o *unstructured.Unstructured) { on.OnServiceAdd(f.service(o)) },
		update: func(was, is *unstructured.Unstructured) { on.OnServiceUpdate(f.service(was), f.service(is)) },
		remove: func(o *unstructured.Unstructured) { on.OnServiceDelete(f.service(o)) },
	}))
	f.must(err)
	var waiting sync.WaitGroup
	waiting.Go(func() {
		if arrived(ctx, registered.HasSyncedChecker().Done()) {
			f.markKnown()
		}
	})
	i.RunWithContext(f.options.clientLogs(ctx))
	waiting.Wait()
}

// must reports an error that an informer gives only when it has started already.
func (f *importFeed) must(err error) {
	if err != nil {
		f.log.Error("ServiceImports are watched without all it takes", zap.Error(err))
	}
}

// await returns true when the API server has the resource, and false when ctx ends. A
// resource that is missing is looked for again and again: an informer would do so too, but
// it complains of it, and takes long to end.
func (f *importFeed) await(ctx context.Context, c *complaints) bool {
	pause, missing := time.Second, false
	for {
		_, err := f.options.ServiceImports.Resource(serviceImports()).List(ctx, metav1.ListOptions{Limit: 1})
		switch {
		case err == nil:
			return true
		case ctx.Err() != nil:
		case !apierrors.IsNotFound(err):
			c.hear(ctx, nil, err)
		case !missing:
			missing = true
			f.log.Info("there are no ServiceImports: the API server has no such resource; install its CRD to have them watched")
			f.markKnown()
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, time.Minute)
		case <-ctx.Done():
			return false
		}
	}
}

// service is the Service that stands for a ServiceImport. Of one that cannot be read it has
// the name only, and is not proxied.
func (f *importFeed) service(object *unstructured.Unstructured) *v1.Service {
	service, err := serviceOf(object)
	if err != nil {
		f.log.Warn("ServiceImport set aside", zap.String("namespace", object.GetNamespace()), zap.String("name", object.GetName()), zap.Error(err))
	}
	return service
}

// importSpec is what counts of a ServiceImport's spec, with the fields of a ServiceSpec
// where both have them.
type importSpec struct {
	Type                  string                           `json:"type"`
	IPs                   []string                         `json:"ips"`
	Ports                 []v1.ServicePort                 `json:"ports"`
	SessionAffinity       v1.ServiceAffinity               `json:"sessionAffinity"`
	SessionAffinityConfig *v1.SessionAffinityConfig        `json:"sessionAffinityConfig"`
	InternalTrafficPolicy *v1.ServiceInternalTrafficPolicy `json:"internalTrafficPolicy"`
}

// serviceOf translates a ServiceImport. Its clusterset IPs are ClusterIPs: they are dialled
// from inside, sources are kept, and only a controller can allot them. One of type Headless,
// or still without IP, becomes a Service that is not proxied.
func serviceOf(object *unstructured.Unstructured) (*v1.Service, error) {
	name := changetracker.ImportedService(types.NamespacedName{Namespace: object.GetNamespace(), Name: object.GetName()})
	s := &v1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: name.Namespace, Name: name.Name, Labels: object.GetLabels(), Annotations: object.GetAnnotations(),
		UID: object.GetUID(), CreationTimestamp: object.GetCreationTimestamp(), ResourceVersion: object.GetResourceVersion(),
	}}
	s.Spec.ClusterIP = v1.ClusterIPNone
	var typed struct {
		Spec importSpec `json:"spec"`
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &typed); err != nil {
		return s, err
	}
	spec := &typed.Spec
	s.Spec.Type, s.Spec.Ports = v1.ServiceTypeClusterIP, spec.Ports
	s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = spec.SessionAffinity, spec.SessionAffinityConfig
	s.Spec.InternalTrafficPolicy = spec.InternalTrafficPolicy
	if spec.Type == "Headless" || len(spec.IPs) == 0 {
		return s, nil
	}
	s.Spec.ClusterIP, s.Spec.ClusterIPs = spec.IPs[0], spec.IPs
	for _, ip := range spec.IPs { // the trackers report one that is none
		family := v1.IPv4Protocol
		if netutils.IsIPv6String(ip) {
			family = v1.IPv6Protocol
		}
		s.Spec.IPFamilies = append(s.Spec.IPFamilies, family)
	}
	return s, nil
}
