package apitest

import (
	"strconv"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
)

// entry is what the store has.
type entry interface {
	runtime.Object
	metav1.Object
}

// change is a change of one object. Before is nil for a new object, after for a deleted one.
type change struct {
	version       uint64
	resource      string
	before, after entry
}

// lastSeen returns the object before the change, with the version of the change: a client
// continues from the version of the last object that it received.
func (c change) lastSeen() entry {
	copied, _ := c.before.DeepCopyObject().(entry) // it has the same type
	copied.SetResourceVersion(strconv.FormatUint(c.version, 10))
	return copied
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
func (s *Server) prepare(tb testing.TB, given runtime.Object) (resource, name string, stored entry) {
	tb.Helper()
	r, ok := s.resourceOf(given)
	if !ok {
		tb.Fatalf("%T: no such resource", given)
	}
	if stored, ok = given.DeepCopyObject().(entry); !ok {
		tb.Fatalf("%T: it has no metadata", given)
	}
	stored.GetObjectKind().SetGroupVersionKind(r.GroupVersionKind)
	return r.Name, stored.GetNamespace() + "/" + stored.GetName(), stored
}

// change stores an object, or deletes it if after is nil, and wakes the watches.
func (s *Server) change(resource, name string, after entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.stored[resource][name]
	if before == nil && after == nil {
		return
	}
	s.version++
	if s.stored[resource] == nil {
		s.stored[resource] = map[string]entry{}
	}
	if after == nil {
		delete(s.stored[resource], name)
	} else {
		after.SetResourceVersion(strconv.FormatUint(s.version, 10))
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

func (s selection) matches(o entry) bool {
	if o == nil || s.namespace != "" && s.namespace != o.GetNamespace() {
		return false
	}
	set := fields.Set{metav1.ObjectNameField: o.GetName()}
	if service, ok := o.(*v1.Service); ok {
		set["spec.clusterIP"] = service.Spec.ClusterIP
	}
	return s.labels.Matches(labels.Set(o.GetLabels())) && s.fields.Matches(set)
}
