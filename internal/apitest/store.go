package apitest

import (
	"strconv"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// change is what happened to one object; before or after may be nil.
type change struct {
	version       uint64
	resource      string
	before, after runtime.Object
}

// kindOf is the resource and the kind of an object.
func kindOf(object runtime.Object) (resource string, kind schema.GroupVersionKind, ok bool) {
	switch object.(type) {
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

// bookmarkKinds are the kinds of the objects, by resource.
func bookmarkKinds() map[string]schema.GroupVersionKind {
	kinds := map[string]schema.GroupVersionKind{}
	for _, object := range []runtime.Object{&v1.Service{}, &v1.Node{}, &discovery.EndpointSlice{}, &networking.ServiceCIDR{}} {
		if resource, kind, ok := kindOf(object); ok {
			kinds[resource] = kind
		}
	}
	return kinds
}

// listKinds are the kinds of the lists, by path.
func listKinds() map[string]schema.GroupVersionKind {
	return map[string]schema.GroupVersionKind{
		"/api/v1/services": v1.SchemeGroupVersion.WithKind("ServiceList"),
		"/api/v1/nodes":    v1.SchemeGroupVersion.WithKind("NodeList"),
		"/apis/discovery.k8s.io/v1/endpointslices": discovery.SchemeGroupVersion.WithKind("EndpointSliceList"),
		"/apis/networking.k8s.io/v1/servicecidrs":  networking.SchemeGroupVersion.WithKind("ServiceCIDRList"),
	}
}

// Put creates or replaces objects.
func (s *Server) Put(tb testing.TB, objects ...runtime.Object) {
	tb.Helper()
	for _, object := range objects {
		if !s.store(object, func(after runtime.Object) runtime.Object { return after }) {
			tb.Fatalf("put %T: no such resource", object)
		}
	}
}

// Delete removes objects. Only their names matter.
func (s *Server) Delete(tb testing.TB, objects ...runtime.Object) {
	tb.Helper()
	for _, object := range objects {
		if !s.store(object, func(runtime.Object) runtime.Object { return nil }) {
			tb.Fatalf("delete %T: no such resource", object)
		}
	}
}

// store notes a change of one object, if it is one.
func (s *Server) store(object runtime.Object, into func(runtime.Object) runtime.Object) bool {
	resource, kind, ok := kindOf(object)
	if !ok {
		return false
	}
	after := object.DeepCopyObject()
	after.GetObjectKind().SetGroupVersionKind(kind)
	accessor, err := meta.Accessor(after)
	if err != nil {
		return false
	}
	name := accessor.GetNamespace() + "/" + accessor.GetName()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	accessor.SetResourceVersion(strconv.FormatUint(s.version, 10))
	if s.stored[resource] == nil {
		s.stored[resource] = map[string]runtime.Object{}
	}
	c := change{version: s.version, resource: resource, before: s.stored[resource][name], after: into(after)}
	if c.after == nil {
		delete(s.stored[resource], name)
	} else {
		s.stored[resource][name] = c.after
	}
	if c.before == nil && c.after == nil {
		return true
	}
	s.history = append(s.history, c)
	close(s.changed)
	s.changed = make(chan struct{})
	return true
}

// Compact forgets what happened so far: who watches from before must list again.
func (s *Server) Compact() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	s.oldest, s.history = s.version, nil
}

// selection is what a client wants of a resource.
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
