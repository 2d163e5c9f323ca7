package informer

import (
	"fmt"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/client-go/tools/cache"
)

// events are the callbacks for objects of one type.
type events[T any] struct {
	add    func(T)
	update func(before, after T)
	remove func(T)
}

// handle turns callbacks into a handler of client-go's. Objects of another type,
// which only a bug elsewhere can bring, are named in the log and dropped.
func handle[T any](b *binding, e events[T]) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(object any) {
			if o, ok := as[T](b, object); ok {
				b.deliver(func() { e.add(o) })
			}
		},
		UpdateFunc: func(before, after any) {
			o, ok := as[T](b, before)
			n, ok2 := as[T](b, after)
			if ok && ok2 {
				b.deliver(func() { e.update(o, n) })
			}
		},
		DeleteFunc: func(object any) {
			if o, ok := as[T](b, unwrap(object)); ok {
				b.deliver(func() { e.remove(o) })
			}
		},
	}
}

func as[T any](b *binding, object any) (T, bool) {
	o, ok := object.(T)
	if !ok {
		b.log.Error("event with an object of an unexpected type",
			zap.String("type", fmt.Sprintf("%T", object)), zap.String("want", fmt.Sprintf("%T", o)))
	}
	return o, ok
}

// unwrap returns the object that was known last of one whose deletion was missed.
func unwrap(object any) any {
	if tombstone, ok := object.(cache.DeletedFinalStateUnknown); ok {
		return tombstone.Obj
	}
	return object
}

// notHeadless lets the slices through that do not belong to a headless Service. A
// slice that gains the label counts as deleted. Objects of other types pass, to be
// reported.
func notHeadless(object any) bool {
	slice, ok := unwrap(object).(*discovery.EndpointSlice)
	if !ok {
		return true
	}
	_, headless := slice.Labels[v1.IsHeadlessService]
	return !headless
}
