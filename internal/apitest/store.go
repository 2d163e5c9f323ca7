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

// lastSeen is the object as it was before, of the version at which it was deleted,
// or left a selection. The version of before would take the client back.
func (c change) lastSeen() runtime.Object {
	object := c.before.DeepCopyObject()
	if accessor, err := meta.Accessor(object); err == nil {
		accessor.SetResourceVersion(strconv.FormatUint(c.version, 10))
	}
	return object
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
		resource, name, after := prepare(tb, object)
		s.change(resource, name, after)
	}
}

// Delete removes objects, by their names. What is not there is no error.
func (s *Server) Delete(tb testing.TB, objects ...runtime.Object) {
	tb.Helper()
	for _, object := range objects {
		resource, name, _ := prepare(tb, object)
		s.change(resource, name, nil)
	}
}

// prepare copies an object as the server keeps it.
func prepare(tb testing.TB, object runtime.Object) (resource, name string, kept runtime.Object) {
	tb.Helper()
	resource, kind, ok := kindOf(object)
	if !ok {
		tb.Fatalf("%T: no such resource", object)
	}
	kept = object.DeepCopyObject()
	kept.GetObjectKind().SetGroupVersionKind(kind)
	accessor, err := meta.Accessor(kept)
	if err != nil {
		tb.Fatalf("%T: %v", object, err)
	}
	return resource, accessor.GetNamespace() + "/" + accessor.GetName(), kept
}

// change stores an object, or removes it if after is nil, and wakes the watches.
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

// Compact forgets what happened so far: who watches from before must list again.
// A running watch goes on if it has sent everything.
func (s *Server) Compact() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.history); n > 0 {
		s.forgotten = s.history[n-1].version
	}
	s.version++ // so that even who has seen everything is too old
	s.oldest, s.history = s.version, nil
}

// compacted says whether a watch from a version comes too late.
func (s *Server) compacted(version uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return version < s.oldest
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
