// Package sorted is an immutable sorted list in chunks: versions share the chunks that are equal,
// so that a new version of a long list costs what has changed.
package sorted

import (
	"slices"
	"sync/atomic"
)

// Two neighbours have more than half of most items together, so the number of chunks is in
// proportion to the items, also after many changes.
const most = 128 // items of a chunk

// List is one version. No two items are equal. Several goroutines may read it. The zero List is
// empty.
type List[T any] struct {
	flat   []T
	chunks *chunks[T] // nil: flat has all items
}

type chunks[T any] struct {
	list []*Chunk[T] // none is empty
	size int
	// whole is the copy that Slice has made.
	whole atomic.Pointer[[]T]
}

// Chunk is some neighbouring items. Versions have the same Chunk for the same items.
type Chunk[T any] struct{ items []T }

// Of returns the list of these items, which are sorted and may not change any more.
func Of[T any](items []T) List[T] {
	if len(items) == 0 {
		return List[T]{}
	}
	if len(items) <= most {
		return List[T]{flat: slices.Clip(items)}
	}
	var b builder[T]
	b.add(items)
	return b.list()
}

// Len returns the number of items.
func (l *List[T]) Len() int {
	if l.chunks != nil {
		return l.chunks.size
	}
	return len(l.flat)
}

// Slice returns all items, which must not be changed. The first call for a long list copies it.
func (l *List[T]) Slice() []T {
	if l.chunks == nil {
		return slices.Clip(l.flat)
	}
	if whole := l.chunks.whole.Load(); whole != nil {
		return *whole
	}
	whole := make([]T, 0, l.chunks.size)
	for _, c := range l.chunks.list {
		whole = append(whole, c.items...)
	}
	l.chunks.whole.Store(&whole)
	return whole
}

// All yields the items, which must not be changed.
func (l *List[T]) All(yield func(*T) bool) {
	for part := range l.Parts {
		for i := range part {
			if !yield(&part[i]) {
				return
			}
		}
	}
}

// Parts yields the items, some at a time.
func (l *List[T]) Parts(yield func([]T) bool) {
	if l.chunks == nil {
		if len(l.flat) > 0 {
			yield(l.flat)
		}
		return
	}
	for _, c := range l.chunks.list {
		if !yield(c.items) {
			return
		}
	}
}

// Find returns the first item that is not below a place, or nil. below says which items are.
func (l *List[T]) Find(below func(*T) bool) *T {
	items := l.flat
	if l.chunks != nil {
		list := l.chunks.list
		i := first(len(list), func(i int) bool { return !below(&list[i].items[len(list[i].items)-1]) })
		if i == len(list) {
			return nil
		}
		items = list[i].items
	}
	if i := first(len(items), func(i int) bool { return !below(&items[i]) }); i < len(items) {
		return &items[i]
	}
	return nil
}

// first returns the lowest index for which is holds, if it holds for all after it; n if for none.
func first(n int, is func(int) bool) int {
	low, high := 0, n
	for low < high {
		middle := int(uint(low+high) >> 1)
		if is(middle) {
			high = middle
		} else {
			low = middle + 1
		}
	}
	return low
}

// Same reports whether two lists are known to be equal, without a look at their items.
func (l *List[T]) Same(o *List[T]) bool {
	if l.chunks != nil || o.chunks != nil {
		return l.chunks == o.chunks
	}
	return len(l.flat) == len(o.flat) && (len(l.flat) == 0 || &l.flat[0] == &o.flat[0])
}
