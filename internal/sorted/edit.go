package sorted

import "slices"

// Edit puts an item into a list, in the place of an equal one, or removes it.
type Edit[T any] struct {
	Item   T
	Remove bool
}

// With returns the list after edits, which are sorted and name no item twice.
func (l *List[T]) With(edits []Edit[T], compare func(a, b *T) int) List[T] {
	if len(edits) == 0 {
		return *l
	}
	if l.chunks == nil {
		return Of(merge(l.flat, edits, compare))
	}
	var b builder[T]
	list := l.chunks.list
	b.chunks = make([]*Chunk[T], 0, len(list)+2)
	for len(edits) > 0 {
		// The chunk of the first edit is the last one that does not begin after it.
		i := first(len(list), func(i int) bool { return compare(&list[i].items[0], &edits[0].Item) > 0 })
		if i = max(i-1, 0); len(list) == 0 {
			b.add(merge(nil, edits, compare))
			break
		}
		b.keep(list[:i])
		n := len(edits)
		if i+1 < len(list) {
			n = first(n, func(j int) bool { return compare(&edits[j].Item, &list[i+1].items[0]) >= 0 })
		}
		b.add(merge(list[i].items, edits[:n], compare))
		list, edits = list[i+1:], edits[n:]
	}
	b.keep(list)
	return b.list()
}

// merge returns items after edits, as a slice of its own.
func merge[T any](items []T, edits []Edit[T], compare func(a, b *T) int) []T {
	merged := make([]T, 0, len(items)+len(edits))
	for i := range edits {
		e := &edits[i]
		n := first(len(items), func(j int) bool { return compare(&items[j], &e.Item) >= 0 })
		merged = append(merged, items[:n]...)
		if items = items[n:]; len(items) > 0 && compare(&items[0], &e.Item) == 0 {
			items = items[1:]
		}
		if !e.Remove {
			merged = append(merged, e.Item)
		}
	}
	return append(merged, items...)
}

// builder makes a list of chunks, from the first to the last.
type builder[T any] struct {
	chunks []*Chunk[T]
	// fresh says that the last chunk is new, and may be too small for its next neighbour.
	fresh bool
}

// keep adds chunks of another version.
func (b *builder[T]) keep(list []*Chunk[T]) {
	if len(list) > 0 && b.fresh && b.joins(list[0].items) {
		list = list[1:]
	}
	if len(list) > 0 {
		b.chunks, b.fresh = append(b.chunks, list...), false
	}
}

// add adds items that are new.
func (b *builder[T]) add(items []T) {
	if len(items) == 0 {
		// The neighbours of what was removed were not neighbours before.
		b.fresh = len(b.chunks) > 0
		return
	}
	if b.joins(items) {
		return
	}
	parts := (len(items) + most - 1) / most
	for ; parts > 0; parts-- {
		n := len(items) / parts
		b.chunks = append(b.chunks, &Chunk[T]{items: slices.Clip(items[:n])})
		items = items[n:]
	}
	b.fresh = true
}

// joins adds items to the last chunk if both are small.
func (b *builder[T]) joins(items []T) bool {
	last := len(b.chunks) - 1
	if last < 0 || len(b.chunks[last].items)+len(items) > most/2 {
		return false
	}
	b.chunks[last], b.fresh = &Chunk[T]{items: slices.Concat(b.chunks[last].items, items)}, true
	return true
}

func (b *builder[T]) list() List[T] {
	size := 0
	for _, c := range b.chunks {
		size += len(c.items)
	}
	if size > most {
		return List[T]{chunks: &chunks[T]{list: b.chunks, size: size}}
	}
	var l List[T]
	for _, c := range b.chunks {
		l.flat = append(l.flat, c.items...)
	}
	l.flat = slices.Clip(l.flat)
	return l
}
