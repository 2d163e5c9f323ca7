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
	"github.com/serviceplane/serviceplane/proxier"
)

// serviceImports is the resource of the Multi-Cluster Services API (KEP-1645).
var serviceImports = schema.GroupVersionResource{Group: "multicluster.x-k8s.io", Version: "v1alpha1", Resource: "serviceimports"} // read-only

// importFeed delivers ServiceImports as Services.
type importFeed struct {
	delivery *delivery
	provider proxier.EventHandler
	options  Options

	// synced is closed by markSynced, when the first list has been delivered, or the
	// resource does not exist.
	synced     chan struct{}
	markSynced func()
}

func newImportFeed(d *delivery, p proxier.EventHandler, o Options) *importFeed {
	f := &importFeed{delivery: d, provider: p, options: o, synced: make(chan struct{})}
	f.markSynced = sync.OnceFunc(func() { close(f.synced) })
	if o.ServiceImports == nil {
		f.markSynced()
	}
	return f
}

// run watches ServiceImports until ctx ends.
func (f *importFeed) run(ctx context.Context) {
	w := newWatchErrors(f.options, kindImports)
	if f.options.ServiceImports == nil || !f.await(ctx, w) {
		return
	}
	i := dynamicinformer.NewFilteredDynamicInformer(f.options.ServiceImports, serviceImports, metav1.NamespaceAll,
		f.options.resync(), cache.Indexers{}, nil).Informer()
	f.logError(i.SetWatchErrorHandlerWithContext(w.handle))
	f.logError(i.SetTransform(slim))
	on := f.provider
	registered, err := i.AddEventHandler(handle(f.delivery, events[*unstructured.Unstructured]{
		add:    func(o *unstructured.Unstructured) { on.OnServiceAdd(f.service(o)) },
		update: func(was, is *unstructured.Unstructured) { on.OnServiceUpdate(f.service(was), f.service(is)) },
		remove: func(o *unstructured.Unstructured) { on.OnServiceDelete(f.service(o)) },
	}))
	f.logError(err)
	var waiting sync.WaitGroup
	waiting.Go(func() {
		if arrived(ctx, registered.HasSyncedChecker().Done()) {
			f.markSynced()
		}
	})
	i.RunWithContext(f.options.clientLogs(ctx))
	waiting.Wait()
}

// logError logs an error that informers return only after their start.
func (f *importFeed) logError(err error) {
	if err != nil {
		f.options.Logger.Error("set up informer of ServiceImports", zap.Error(err))
	}
}

// await returns true when the API server has the resource, and false when ctx ends. An
// informer would wait too, but it logs every attempt and ends late.
func (f *importFeed) await(ctx context.Context, w *watchErrors) bool {
	pause, missing := time.Second, false
	for {
		_, err := f.options.ServiceImports.Resource(serviceImports).List(ctx, metav1.ListOptions{Limit: 1})
		switch {
		case err == nil:
			return true
		case ctx.Err() != nil:
		case !apierrors.IsNotFound(err):
			w.handle(ctx, nil, err)
		case !missing:
			missing = true
			f.options.Logger.Info("no ServiceImports: the API server does not have the resource, install its CRD to use them")
			f.markSynced()
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, time.Minute)
		case <-ctx.Done():
			return false
		}
	}
}

// service returns the Service for a ServiceImport. For an invalid one it has only the
// name, and is not proxied.
func (f *importFeed) service(object *unstructured.Unstructured) *v1.Service {
	service, err := serviceOf(object)
	if err != nil {
		f.options.Logger.Warn("ignore invalid ServiceImport", zap.String("namespace", object.GetNamespace()), zap.String("name", object.GetName()), zap.Error(err))
	}
	return service
}

// importSpec holds the relevant fields of a ServiceImport's spec. Its types are those of
// ServiceSpec where the fields are the same.
type importSpec struct {
	Type                  string                           `json:"type"`
	IPs                   []string                         `json:"ips"`
	Ports                 []v1.ServicePort                 `json:"ports"`
	SessionAffinity       v1.ServiceAffinity               `json:"sessionAffinity"`
	SessionAffinityConfig *v1.SessionAffinityConfig        `json:"sessionAffinityConfig"`
	InternalTrafficPolicy *v1.ServiceInternalTrafficPolicy `json:"internalTrafficPolicy"`
}

// serviceOf converts a ServiceImport. Its clusterset IPs become ClusterIPs: clients are
// inside the cluster set, and only a controller assigns the IPs. A ServiceImport of type
// Headless, or without IP, becomes a Service that is not proxied.
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
	for _, ip := range spec.IPs { // the tracker reports invalid ones
		family := v1.IPv4Protocol
		if netutils.IsIPv6String(ip) {
			family = v1.IPv6Protocol
		}
		s.Spec.IPFamilies = append(s.Spec.IPFamilies, family)
	}
	return s, nil
}
