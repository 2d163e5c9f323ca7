package informer

import (
	"reflect"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

// A list that arrives as a stream is delivered object by object, of which only the names are kept.
// One that breaks off is followed by another, which tells what is gone meanwhile.
func TestAStreamedListIsDeliveredAtOnce(t *testing.T) {
	m := newMirror(nil, func() named { return &v1.Service{} })
	var events []string
	_, _ = m.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { events = append(events, "add "+o.(*v1.Service).Name) },
		DeleteFunc: func(o any) { events = append(events, "delete "+o.(*v1.Service).Name) },
	})
	expect := func(want ...string) {
		t.Helper()
		if slices.Sort(events); !slices.Equal(events, want) {
			t.Errorf("events %q, want %q", events, want)
		}
		events = nil
	}
	// stream is the reflector's own store while a list arrives.
	stream := func(names ...string) cache.Store {
		s := cache.NewStore(cache.DeletionHandlingMetaNamespaceKeyFunc, cache.WithTransformer(m.Transformer()))
		for _, name := range names {
			if err := s.Add(&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}); err != nil {
				t.Fatal(err)
			}
		}
		return s
	}
	s := stream("a", "b")
	expect("add a", "add b")
	for _, kept := range s.List() {
		if size := reflect.TypeOf(kept).Size(); size > 4*8 {
			t.Errorf("%T of %d bytes is kept", kept, size)
		}
	}
	if m.HasSynced() {
		t.Error("the mirror has synced before the end of the list")
	}
	s = stream("a", "c") // b is gone before the first list could end
	expect("add a", "add c")
	if err := m.Replace(s.List(), "7"); err != nil {
		t.Fatal(err)
	}
	expect("delete b")
	if !m.HasSynced() {
		t.Error("the mirror has not synced at the end of the list")
	}
	if err := m.Replace([]any{&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "d"}}}, "8"); err != nil {
		t.Fatal(err)
	}
	expect("add d", "delete a", "delete c")
	if err := m.Replace(stream("d").List(), "9"); err != nil {
		t.Fatal(err)
	}
	expect("add d")
}
