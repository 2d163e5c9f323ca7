package sorted

// Walk visits the items of two lists in order, with nil for the list that does not have the item.
// It skips the chunks that the lists share, whose items are the same.
func Walk[T any](a, b *List[T], compare func(x, y *T) int, visit func(x, y *T)) {
	x, y := cursorOf(a), cursorOf(b)
	for {
		if x.at == 0 && y.at == 0 && len(x.chunks) > 0 && len(y.chunks) > 0 && x.chunks[0] == y.chunks[0] {
			x.skip()
			y.skip()
			continue
		}
		p, q := x.item(), y.item()
		if p == nil && q == nil {
			return
		}
		if p != nil && q != nil {
			if c := compare(p, q); c < 0 {
				q = nil
			} else if c > 0 {
				p = nil
			}
		}
		visit(p, q)
		if p != nil {
			x.next()
		}
		if q != nil {
			y.next()
		}
	}
}

// cursor is a place in a list.
type cursor[T any] struct {
	chunks []*Chunk[T] // from the current one on; none if the list has none
	items  []T         // of the current chunk
	at     int
}

func cursorOf[T any](l *List[T]) cursor[T] {
	if l.chunks == nil {
		return cursor[T]{items: l.flat}
	}
	return cursor[T]{chunks: l.chunks.list, items: l.chunks.list[0].items}
}

func (c *cursor[T]) item() *T {
	if c.at == len(c.items) {
		return nil
	}
	return &c.items[c.at]
}

func (c *cursor[T]) next() {
	if c.at++; c.at == len(c.items) && len(c.chunks) > 0 {
		c.skip()
	}
}

func (c *cursor[T]) skip() {
	c.at, c.items = 0, nil
	if c.chunks = c.chunks[1:]; len(c.chunks) > 0 {
		c.items = c.chunks[0].items
	}
}
