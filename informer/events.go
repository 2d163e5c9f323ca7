package informer

import (
	"fmt"
	"sync"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/client-go/tools/cache"
)

// delivery passes events on until it is stopped.
type delivery struct {
	log *zap.Logger

	mu      sync.RWMutex // held for reading while an event is delivered
	stopped bool         // guarded by mu
}

func (d *delivery) deliver(event func()) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if !d.stopped {
		event()
	}
}

// stop waits for the events that are being delivered, and drops all later ones.
func (d *delivery) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stopped = true
}

// events are the callbacks for objects of one type.
type events[T any] struct {
	add    func(T)
	update func(before, after T)
	remove func(T)
}

// handle converts callbacks into a handler of client-go. It drops objects of another
// type, which only a bug can cause, and logs them.
func handle[T any](d *delivery, e events[T]) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(object any) {
			if o, ok := as[T](d, object); ok {
				d.deliver(func() { e.add(o) })
			}
		},
		UpdateFunc: func(before, after any) {
			o, ok := as[T](d, before)
			n, ok2 := as[T](d, after)
			if ok && ok2 {
				d.deliver(func() { e.update(o, n) })
			}
		},
		DeleteFunc: func(object any) {
			if o, ok := as[T](d, unwrap(object)); ok {
				d.deliver(func() { e.remove(o) })
			}
		},
	}
}

func as[T any](d *delivery, object any) (T, bool) {
	o, ok := object.(T)
	if !ok {
		d.log.Error("event is ignored: its object has an unexpected type",
			zap.String("type", fmt.Sprintf("%T", object)), zap.String("want", fmt.Sprintf("%T", o)))
	}
	return o, ok
}

// unwrap returns the object, or its last known state if its deletion was missed.
func unwrap(object any) any {
	if tombstone, ok := object.(cache.DeletedFinalStateUnknown); ok {
		return tombstone.Obj
	}
	return object
}

// notHeadless is a filter that accepts the slices of Services that are not headless. A
// slice that gains the label counts as deleted. Objects of other types pass, so that
// handle logs them.
func notHeadless(object any) bool {
	slice, ok := unwrap(object).(*discovery.EndpointSlice)
	if !ok {
		return true
	}
	_, headless := slice.Labels[v1.IsHeadlessService]
	return !headless
}
