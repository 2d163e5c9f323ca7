package informer

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"
	netutils "k8s.io/utils/net"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// serviceImports is the resource of the Multi-Cluster Services API (KEP-1645).
var serviceImports = schema.GroupVersionResource{Group: "multicluster.x-k8s.io", Version: "v1alpha1", Resource: "serviceimports"} // read-only

// NewServiceImports returns an informer of the ServiceImports of the Multi-Cluster Services
// API (KEP-1645, multicluster.x-k8s.io/v1alpha1), for Bind. The caller runs it. The Provider
// gets each as a Service with the name of changetracker.ImportedService and the clusterset
// IPs as ClusterIPs; its endpoints are the imported EndpointSlices. The type Headless is not
// proxied. An API server without the resource has no ServiceImports; it is asked again each
// minute. Link and Logger of the Options matter.
func NewServiceImports(client dynamic.Interface, o Options) (cache.SharedIndexInformer, error) {
	return newServiceImports(client, o.withDefaults())
}

func newServiceImports(client dynamic.Interface, o Options) (cache.SharedIndexInformer, error) {
	i := cache.NewSharedIndexInformer(importsOf(client, o), newServiceImport(), 0, cache.Indexers{})
	if err := errors.Join(i.SetTransform(withoutManagedFields), i.SetWatchErrorHandlerWithContext(newWatchErrors(o, kindImports).handle)); err != nil {
		return nil, fmt.Errorf("watch %s: %w", kindImports, err)
	}
	return i, nil
}

// withoutManagedFields drops what no proxy reads, before the informer stores the object.
func withoutManagedFields(object any) (any, error) {
	if o, ok := object.(named); ok {
		o.SetManagedFields(nil)
	}
	return object, nil
}

func importsOf(client dynamic.Interface, o Options) cache.ListerWatcher {
	s := &importSource{resource: client.Resource(serviceImports), log: o.Logger}
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{ListWithContextFunc: s.list, WatchFuncWithContext: s.watch}, s)
}

func newServiceImport() *unstructured.Unstructured {
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(serviceImports.GroupVersion().WithKind("ServiceImport"))
	return object
}

// importSource lists and watches ServiceImports. Only the goroutine of an informer uses it.
type importSource struct {
	resource dynamic.ResourceInterface
	log      *zap.Logger
	absent   bool // the API server does not have the resource
	said     bool // the log says so
}

// IsWatchListSemanticsUnSupported makes an informer begin with a list, not with a watch.
func (*importSource) IsWatchListSemanticsUnSupported() bool { return true }

func (s *importSource) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	list, err := s.resource.List(ctx, o)
	if s.absent = apierrors.IsNotFound(err); !s.absent {
		return list, err
	}
	if !s.said {
		s.said = true
		s.log.Info("no ServiceImports: the API server does not have the resource, install its CRD to use them")
	}
	return &unstructured.UnstructuredList{}, nil
}

// watch makes the informer list again if the resource is absent, after client-go's pause between
// lists, which grows to a minute.
func (s *importSource) watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	if s.absent {
		return nil, apierrors.NewResourceExpired("the resource was absent")
	}
	return s.resource.Watch(ctx, o)
}

// importFeed delivers ServiceImports as Services.
type importFeed struct {
	provider proxier.EventHandler
	log      *zap.Logger
}

func (f importFeed) added(o *unstructured.Unstructured)   { f.provider.OnServiceAdd(f.service(o)) }
func (f importFeed) deleted(o *unstructured.Unstructured) { f.provider.OnServiceDelete(f.service(o)) }

func (f importFeed) updated(was, is *unstructured.Unstructured) {
	f.provider.OnServiceUpdate(f.service(was), f.service(is))
}

// service returns the Service for a ServiceImport. For an invalid one it has only the
// name, and is not proxied.
func (f importFeed) service(object *unstructured.Unstructured) *v1.Service {
	service, err := serviceOf(object)
	if err != nil {
		f.log.Warn("invalid ServiceImport is ignored", zap.String("namespace", object.GetNamespace()), zap.String("name", object.GetName()), zap.Error(err))
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
