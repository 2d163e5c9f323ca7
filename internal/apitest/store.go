package apitest

import (
	"strconv"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
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

// Version returns the version of the last change.
func (s *Server) Version() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.version
}

// Put creates or replaces objects.
func (s *Server) Put(tb testing.TB, objects ...runtime.Object) {
	tb.Helper()
	for _, object := range objects {
		resource, name, after := s.prepare(tb, object)
		s.change(resource, name, after)
	}
}

// Delete deletes objects by their names. Objects that do not exist are ignored.
func (s *Server) Delete(tb testing.TB, objects ...runtime.Object) {
	tb.Helper()
	for _, object := range objects {
		resource, name, _ := s.prepare(tb, object)
		s.change(resource, name, nil)
	}
}

// prepare returns a copy of an object for the store.
func (s *Server) prepare(tb testing.TB, object runtime.Object) (resource, name string, stored runtime.Object) {
	tb.Helper()
	r, ok := s.resourceOf(object)
	if !ok {
		tb.Fatalf("%T: no such resource", object)
	}
	stored = object.DeepCopyObject()
	stored.GetObjectKind().SetGroupVersionKind(r.GroupVersionKind)
	accessor, err := meta.Accessor(stored)
	if err != nil {
		tb.Fatalf("%T: %v", object, err)
	}
	return r.Name, accessor.GetNamespace() + "/" + accessor.GetName(), stored
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
	namespace string // empty for all
	labels    labels.Selector
	fields    fields.Selector
}

func (s selection) matches(object runtime.Object) bool {
	if object == nil {
		return false
	}
	accessor, err := meta.Accessor(object)
	if err != nil {
		return false
	}
	if s.namespace != "" && s.namespace != accessor.GetNamespace() {
		return false
	}
	set := fields.Set{metav1.ObjectNameField: accessor.GetName()}
	if service, ok := object.(*v1.Service); ok {
		set["spec.clusterIP"] = service.Spec.ClusterIP
	}
	return s.labels.Matches(labels.Set(accessor.GetLabels())) && s.fields.Matches(set)
}
