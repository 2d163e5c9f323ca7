package apitest

import (
	"strconv"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// change is a change of one object. Before is nil for a new object, after for a deleted one.
type change struct {
	version       uint64
	resource      string
	before, after runtime.Object
}

// lastSeen returns the object before the change, with the version of the change: a client
// continues from the version of the last object that it received.
func (c change) lastSeen() runtime.Object {
	object := c.before.DeepCopyObject()
	if accessor, err := meta.Accessor(object); err == nil {
		accessor.SetResourceVersion(strconv.FormatUint(c.version, 10))
	}
	return object
}

// serviceImports is the group of the Multi-Cluster Services API (KEP-1645).
var serviceImports = schema.GroupVersion{Group: "multicluster.x-k8s.io", Version: "v1alpha1"} // read-only

// ServiceImport returns a ServiceImport without a spec.
func ServiceImport(namespace, name string) *unstructured.Unstructured {
	i := &unstructured.Unstructured{}
	i.SetGroupVersionKind(serviceImports.WithKind("ServiceImport"))
	i.SetNamespace(namespace)
	i.SetName(name)
	return i
}

// kindOf returns the resource and the kind of an object.
func kindOf(object runtime.Object) (resource string, kind schema.GroupVersionKind, ok bool) {
	switch o := object.(type) {
	case *unstructured.Unstructured:
		return "serviceimports", o.GroupVersionKind(), true
	case *v1.Service:
		return "services", v1.SchemeGroupVersion.WithKind("Service"), true
	case *v1.Node:
		return "nodes", v1.SchemeGroupVersion.WithKind("Node"), true
	case *discovery.EndpointSlice:
		return "endpointslices", discovery.SchemeGroupVersion.WithKind("EndpointSlice"), true
	case *networking.ServiceCIDR:
		return "servicecidrs", networking.SchemeGroupVersion.WithKind("ServiceCIDR"), true
	default:
		return "", schema.GroupVersionKind{}, false
	}
}

// bookmarkKinds returns the kinds of objects by resource.
func bookmarkKinds() map[string]schema.GroupVersionKind {
	kinds := map[string]schema.GroupVersionKind{}
	for _, object := range []runtime.Object{&v1.Service{}, &v1.Node{}, &discovery.EndpointSlice{}, &networking.ServiceCIDR{}, ServiceImport("", "")} {
		if resource, kind, ok := kindOf(object); ok {
			kinds[resource] = kind
		}
	}
	return kinds
}

// listKinds returns the kinds of lists by path.
func listKinds() map[string]schema.GroupVersionKind {
	return map[string]schema.GroupVersionKind{
		"/api/v1/services": v1.SchemeGroupVersion.WithKind("ServiceList"),
		"/api/v1/nodes":    v1.SchemeGroupVersion.WithKind("NodeList"),
		"/apis/discovery.k8s.io/v1/endpointslices":            discovery.SchemeGroupVersion.WithKind("EndpointSliceList"),
		"/apis/networking.k8s.io/v1/servicecidrs":             networking.SchemeGroupVersion.WithKind("ServiceCIDRList"),
		"/apis/multicluster.x-k8s.io/v1alpha1/serviceimports": serviceImports.WithKind("ServiceImportList"),
	}
}

// Put creates or replaces objects.
func (s *Server) Put(tb testing.TB, objects ...runtime.Object) {
	tb.Helper()
	for _, object := range objects {
		resource, name, after := prepare(tb, object)
		s.change(resource, name, after)
	}
}

// Delete deletes objects by their names. Objects that do not exist are ignored.
func (s *Server) Delete(tb testing.TB, objects ...runtime.Object) {
	tb.Helper()
	for _, object := range objects {
		resource, name, _ := prepare(tb, object)
		s.change(resource, name, nil)
	}
}

// prepare returns a copy of an object for the store.
func prepare(tb testing.TB, object runtime.Object) (resource, name string, stored runtime.Object) {
	tb.Helper()
	resource, kind, ok := kindOf(object)
	if !ok {
		tb.Fatalf("%T: no such resource", object)
	}
	stored = object.DeepCopyObject()
	stored.GetObjectKind().SetGroupVersionKind(kind)
	accessor, err := meta.Accessor(stored)
	if err != nil {
		tb.Fatalf("%T: %v", object, err)
	}
	return resource, accessor.GetNamespace() + "/" + accessor.GetName(), stored
}

// change stores an object, or deletes it if after is nil, and wakes the watches.
func (s *Server) change(resource, name string, after runtime.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.stored[resource][name]
	if before == nil && after == nil {
		return
	}
	s.version++
	if s.stored[resource] == nil {
		s.stored[resource] = map[string]runtime.Object{}
	}
	if after == nil {
		delete(s.stored[resource], name)
	} else {
		if accessor, err := meta.Accessor(after); err == nil {
			accessor.SetResourceVersion(strconv.FormatUint(s.version, 10))
		}
		s.stored[resource][name] = after
	}
	s.history = append(s.history, change{version: s.version, resource: resource, before: before, after: after})
	close(s.changed)
	s.changed = make(chan struct{})
}

// Compact drops the history. Clients that watch from an older version must list again. A
// running watch continues if it has sent all changes.
func (s *Server) Compact() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.history); n > 0 {
		s.compacted = s.history[n-1].version
	}
	s.version++ // so that the current version of every client expires
	s.oldest, s.history = s.version, nil
}

// expired reports whether a watch may no longer start from a version.
func (s *Server) expired(version uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return version < s.oldest
}

// selection holds a client's selectors.
type selection struct {
	labels labels.Selector
	fields fields.Selector
}

func (s selection) matches(object runtime.Object) bool {
	if object == nil {
		return false
	}
	accessor, err := meta.Accessor(object)
	if err != nil {
		return false
	}
	set := fields.Set{metav1.ObjectNameField: accessor.GetName()}
	if service, ok := object.(*v1.Service); ok {
		set["spec.clusterIP"] = service.Spec.ClusterIP
	}
	return s.labels.Matches(labels.Set(accessor.GetLabels())) && s.fields.Matches(set)
}
