// Package persist is a persistent hash map: versions share structure, so that keeping an old
// version costs nothing and a new one costs what changed.
//
// It is a hash array mapped trie, 32 ways wide (Bagwell, "Ideal Hash Trees", 2001), in the
// compressed form of Steindorfer and Vinju (CHAMP, 2015).
package persist

import (
	"hash/maphash"
	"iter"
)

// Map is one immutable version. Several goroutines may read it, also while an Editor makes
// later versions. Make the first version with New.
type Map[K comparable, V any] struct {
	root   *node[K, V]
	size   int
	hash   func(K) uint64
	origin *token // the same for all versions that come from one call of New
}

// New returns the empty map.
func New[K comparable, V any]() Map[K, V] {
	seed := maphash.MakeSeed()
	return newWithHash[K, V](func(k K) uint64 { return maphash.Comparable(seed, k) })
}

func newWithHash[K comparable, V any](hash func(K) uint64) Map[K, V] {
	return Map[K, V]{root: &node[K, V]{}, hash: hash, origin: new(token)}
}

// Len is the number of keys.
func (m Map[K, V]) Len() int { return m.size }

// Get returns the value of key. ok is false if there is none.
func (m Map[K, V]) Get(key K) (value V, ok bool) {
	n, h := m.root, m.hash(key)
	for shift := uint(0); ; shift += bitsPerLevel {
		if shift > lastShift {
			return n.getColliding(key)
		}
		bit := bitOf(h, shift)
		if n.kidMap&bit != 0 {
			n = n.kids[index(n.kidMap, bit)]
			continue
		}
		if n.leafMap&bit == 0 {
			return value, false
		}
		if l := &n.leaves[index(n.leafMap, bit)]; l.key == key {
			return l.value, true
		}
		return value, false
	}
}

// All yields each key once, in no particular order.
func (m Map[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) { m.root.each(yield) }
}

// Edit starts a batch of changes. It does not change m.
func (m Map[K, V]) Edit() *Editor[K, V] {
	return &Editor[K, V]{version: m, owner: new(token)}
}
