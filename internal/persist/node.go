package persist

import (
	"math/bits"
	"slices"
)

const (
	bitsPerLevel = 5
	// lastShift is the last level that uses bits of a 64-bit hash. Keys with equal hashes share
	// one node below it, which is searched linearly.
	lastShift = 60
)

// token marks the nodes that an Editor made and may change in place. It has a size, because
// pointers to distinct empty values may be equal.
type token struct{ _ byte }

type leaf[K comparable, V any] struct {
	key   K
	value V
}

// node is one level of the trie. A slot (five bits of the hash) is empty, a leaf or a subtree,
// as the bitmaps say. leaves and kids are packed in the order of their slots. Every node
// except the root has at least two keys, so the shape depends only on the content and not on
// its history. Below lastShift both bitmaps are unused.
type node[K comparable, V any] struct {
	owner           *token
	leafMap, kidMap uint32
	leaves          []leaf[K, V]
	kids            []*node[K, V]
}

func bitOf(hash uint64, shift uint) uint32 {
	return 1 << (hash >> shift & (1<<bitsPerLevel - 1))
}

// index returns the position of a slot in a packed list.
func index(bitmap, bit uint32) int { return bits.OnesCount32(bitmap & (bit - 1)) }

func (n *node[K, V]) colliding(key K) int {
	return slices.IndexFunc(n.leaves, func(l leaf[K, V]) bool { return l.key == key })
}

func (n *node[K, V]) getColliding(key K) (value V, ok bool) {
	if i := n.colliding(key); i >= 0 {
		return n.leaves[i].value, true
	}
	return value, false
}

func (n *node[K, V]) each(yield func(K, V) bool) bool {
	for i := range n.leaves {
		if !yield(n.leaves[i].key, n.leaves[i].value) {
			return false
		}
	}
	for _, kid := range n.kids {
		if !kid.each(yield) {
			return false
		}
	}
	return true
}

// lone reports whether the node has one key only, so that its parent must hold it as a leaf.
func (n *node[K, V]) lone() bool { return len(n.leaves) == 1 && len(n.kids) == 0 }
