package informer

import (
	"context"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// named is an object of the API with a name.
type named interface {
	runtime.Object
	metav1.Object
}

// mirror delivers what a reflector of client-go hears, at once and in its order. An informer
// would store every object; a mirror stores names only, to notice missed deletions. It is the
// cache.Queue of a controller whose queue is always empty.
type mirror struct {
	from     cache.ListerWatcher
	nameless func() named                   // makes an object of the mirror's type
	handler  cache.ResourceEventHandler     // nil: none
	some     func(context.Context) []string // names of a few objects that there are, for a hint; nil: none
	heard    func(version string)           // called when everything up to the version is delivered; nil: no one asks
	known    map[types.NamespacedName]struct{}
	listed   chan struct{} // closed when the first list is delivered
	once     sync.Once
	refused  chan struct{} // closed when the API server has said that there is nothing to list
	refuse   sync.Once
	closed   chan struct{}
}

var (
	_ cache.Queue                  = (*mirror)(nil)
	_ cache.ResourceVersionUpdater = (*mirror)(nil)
	_ cache.TransformingStore      = (*mirror)(nil)
)

func newMirror(from cache.ListerWatcher, nameless func() named) *mirror {
	return &mirror{
		from: from, nameless: nameless,
		known:  map[types.NamespacedName]struct{}{},
		listed: make(chan struct{}), refused: make(chan struct{}), closed: make(chan struct{}),
	}
}

// run lists and watches until ctx ends.
func (m *mirror) run(ctx context.Context, failures *watchErrors, o *outage) {
	cache.New(&cache.Config{
		Queue: m, ListerWatcher: o.source(m.from, func(err error) { failures.handle(ctx, nil, err) }), ObjectType: m.nameless(),
		WatchErrorHandlerWithContext: func(ctx context.Context, from *cache.Reflector, err error) {
			failures.handle(ctx, from, err)
			if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
				m.refuse.Do(func() { close(m.refused) })
			}
		},
	}).RunWithContext(ctx)
}

// AddEventHandler sets the only handler, before run.
func (m *mirror) AddEventHandler(handler cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	m.handler = handler
	return m, nil
}

// RemoveEventHandler does nothing: the delivery is stopped, and run ends.
func (m *mirror) RemoveEventHandler(cache.ResourceEventHandlerRegistration) error { return nil }

// Add delivers an object, which may be known.
func (m *mirror) Add(object any) error { return m.Update(object) }

// Update delivers an object, which may be new.
func (m *mirror) Update(object any) error {
	if o, ok := object.(named); ok {
		m.known[nameOf(o)] = struct{}{}
	}
	m.handler.OnAdd(object, false)
	return nil
}

// Transformer delivers the objects of a list that arrives as a stream, one by one. The reflector
// keeps only their names until the end of the list, for Replace.
func (m *mirror) Transformer() cache.TransformFunc {
	return func(object any) (any, error) {
		o, ok := object.(named)
		if !ok {
			return object, nil
		}
		return delivered(nameOf(o)), m.Update(object)
	}
}

// delivered is the name of an object that is delivered.
type delivered types.NamespacedName

// Delete delivers the last state of an object.
func (m *mirror) Delete(object any) error {
	if o, ok := object.(named); ok {
		delete(m.known, nameOf(o))
	}
	m.handler.OnDelete(object)
	return nil
}

// Replace delivers a list and the deletions that were missed. The objects of a list are in no
// order of versions, so that the version counts at the end.
func (m *mirror) Replace(list []any, version string) error {
	missing := m.known
	m.known = make(map[types.NamespacedName]struct{}, len(list))
	for i, object := range list {
		list[i] = nil // what is delivered is not needed any more
		switch o := object.(type) {
		case delivered:
			delete(missing, types.NamespacedName(o))
			m.known[types.NamespacedName(o)] = struct{}{}
			continue
		case named:
			delete(missing, nameOf(o))
		}
		_ = m.Update(object)
	}
	for name := range missing {
		gone := m.nameless()
		gone.SetNamespace(name.Namespace)
		gone.SetName(name.Name)
		m.handler.OnDelete(gone)
	}
	m.once.Do(func() { close(m.listed) })
	m.UpdateResourceVersion(version)
	return nil
}

// UpdateResourceVersion is called after an event of a watch, with its version.
func (m *mirror) UpdateResourceVersion(version string) {
	if m.heard != nil && version != "" {
		m.heard(version)
	}
}

// Resync does nothing: nothing is stored that could be delivered again.
func (*mirror) Resync() error { return nil }

// Pop waits for the end: the queue is always empty.
func (m *mirror) Pop(cache.PopProcessFunc) (any, error) {
	<-m.closed
	return nil, cache.ErrFIFOClosed
}

// Close ends Pop.
func (m *mirror) Close() { close(m.closed) }

// HasSynced reports whether the first list was delivered.
func (m *mirror) HasSynced() bool {
	select {
	case <-m.listed:
		return true
	default:
		return false
	}
}

// HasSyncedChecker is done when the first list is delivered.
func (m *mirror) HasSyncedChecker() cache.DoneChecker { return m }

// Name is the type of the objects.
func (m *mirror) Name() string { return m.nameless().GetObjectKind().GroupVersionKind().Kind }

// Done is closed when the first list is delivered.
func (m *mirror) Done() <-chan struct{} { return m.listed }

func nameOf(o named) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}
