package persist

import "iter"

// Changed yields each key whose value differs between two versions, or that only one of them
// has, in no particular order. It skips what the versions share, so that it costs about what
// has changed. For versions that come from different calls of New it yields all keys, some
// of them twice.
func (m Map[K, V]) Changed(since Map[K, V], same func(a, b V) bool) iter.Seq[K] {
	return func(yield func(K) bool) {
		if m.origin != since.origin {
			all := func(key K, _ V) bool { return yield(key) }
			_ = m.root.each(all) && since.root.each(all)
			return
		}
		c := comparison[K, V]{hash: m.hash, same: same, yield: yield}
		c.nodes(m.root, since.root, 0)
	}
}

// comparison finds the keys that differ. Its methods return false if yield did.
type comparison[K comparable, V any] struct {
	hash  func(K) uint64
	same  func(a, b V) bool
	yield func(K) bool
}

// nodes compares two nodes of the same place.
func (c *comparison[K, V]) nodes(a, b *node[K, V], shift uint) bool {
	return a == b || c.leaves(a, b, shift) && c.missing(b, a, shift) && c.kids(a, b, shift)
}

// leaves compares the leaves of a with those of b.
func (c *comparison[K, V]) leaves(a, b *node[K, V], shift uint) bool {
	for i := range a.leaves {
		l := &a.leaves[i]
		other, deeper := b.find(l.key, c.hash(l.key), shift)
		if !deeper && (other == nil || !c.same(l.value, other.value)) && !c.yield(l.key) {
			return false
		}
	}
	return true
}

// missing yields the leaves of a that b lacks.
func (c *comparison[K, V]) missing(a, b *node[K, V], shift uint) bool {
	for i := range a.leaves {
		l := &a.leaves[i]
		if other, deeper := b.find(l.key, c.hash(l.key), shift); !deeper && other == nil && !c.yield(l.key) {
			return false
		}
	}
	return true
}

// kids compares the subtrees, also with a leaf in the same slot of the other node.
func (c *comparison[K, V]) kids(a, b *node[K, V], shift uint) bool {
	for slots := a.kidMap | b.kidMap; slots != 0; slots &= slots - 1 {
		bit := slots & -slots
		inA, inB := a.kid(bit), b.kid(bit)
		var more bool
		switch {
		case inB == nil:
			more = c.tree(inA, b.leaf(bit))
		case inA == nil:
			more = c.tree(inB, a.leaf(bit))
		default:
			more = c.nodes(inA, inB, shift+bitsPerLevel)
		}
		if !more {
			return false
		}
	}
	return true
}

// tree compares a subtree with the only leaf of the other map in its place, or nil.
func (c *comparison[K, V]) tree(n *node[K, V], other *leaf[K, V]) bool {
	found := other == nil
	return n.each(func(key K, value V) bool {
		if other != nil && key == other.key {
			found = true
			return c.same(value, other.value) || c.yield(key)
		}
		return c.yield(key)
	}) && (found || c.yield(other.key))
}

// find returns the leaf of a key in a node; deeper means that a subtree has the key, if any.
func (n *node[K, V]) find(key K, hash uint64, shift uint) (l *leaf[K, V], deeper bool) {
	if shift > lastShift {
		if i := n.colliding(key); i >= 0 {
			return &n.leaves[i], false
		}
		return nil, false
	}
	bit := bitOf(hash, shift)
	if l = n.leaf(bit); l != nil && l.key != key {
		l = nil
	}
	return l, n.kidMap&bit != 0
}

func (n *node[K, V]) kid(bit uint32) *node[K, V] {
	if n.kidMap&bit == 0 {
		return nil
	}
	return n.kids[index(n.kidMap, bit)]
}

func (n *node[K, V]) leaf(bit uint32) *leaf[K, V] {
	if n.leafMap&bit == 0 {
		return nil
	}
	return &n.leaves[index(n.leafMap, bit)]
}
