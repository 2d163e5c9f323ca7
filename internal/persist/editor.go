package persist

import "slices"

// Editor makes a new version from an old one. It changes nodes that it has copied once in
// place, so a batch allocates far less than as many single changes. It is for one goroutine.
type Editor[K comparable, V any] struct {
	version Map[K, V]
	owner   *token
}

// Map returns the version with all changes so far. Later changes of the Editor do not affect
// it.
func (e *Editor[K, V]) Map() Map[K, V] {
	e.owner = new(token) // the nodes are shared from now on
	return e.version
}

// Get is Map.Get with the changes so far.
func (e *Editor[K, V]) Get(key K) (value V, ok bool) { return e.version.Get(key) }

// Set adds key or replaces its value.
func (e *Editor[K, V]) Set(key K, value V) {
	l := leaf[K, V]{key: key, value: value}
	root, added := e.set(e.version.root, 0, e.version.hash(key), l)
	e.version.root = root
	if added {
		e.version.size++
	}
}

// Delete removes key and reports whether it existed.
func (e *Editor[K, V]) Delete(key K) (was bool) {
	if _, was = e.version.Get(key); !was { // so that a miss copies nothing
		return false
	}
	e.version.root = e.remove(e.version.root, 0, e.version.hash(key), key)
	e.version.size--
	return true
}

// own returns n, or a copy of it that the Editor may change.
func (e *Editor[K, V]) own(n *node[K, V]) *node[K, V] {
	if n.owner == e.owner {
		return n
	}
	return &node[K, V]{
		owner: e.owner, leafMap: n.leafMap, kidMap: n.kidMap,
		leaves: slices.Clone(n.leaves), kids: slices.Clone(n.kids),
	}
}

func (e *Editor[K, V]) set(n *node[K, V], shift uint, hash uint64, l leaf[K, V]) (_ *node[K, V], added bool) {
	n = e.own(n)
	if shift > lastShift {
		return n, n.setColliding(l)
	}
	bit := bitOf(hash, shift)
	if n.kidMap&bit != 0 {
		i := index(n.kidMap, bit)
		n.kids[i], added = e.set(n.kids[i], shift+bitsPerLevel, hash, l)
		return n, added
	}
	i := index(n.leafMap, bit)
	if n.leafMap&bit == 0 {
		n.leafMap |= bit
		n.leaves = slices.Insert(n.leaves, i, l)
		return n, true
	}
	if n.leaves[i].key == l.key {
		n.leaves[i] = l
		return n, false
	}
	kid := &node[K, V]{owner: e.owner}
	old := n.leaves[i]
	kid, _ = e.set(kid, shift+bitsPerLevel, e.version.hash(old.key), old)
	kid, _ = e.set(kid, shift+bitsPerLevel, hash, l)
	n.leafToKid(bit, kid)
	return n, true
}

func (n *node[K, V]) setColliding(l leaf[K, V]) (added bool) {
	if i := n.colliding(l.key); i >= 0 {
		n.leaves[i] = l
		return false
	}
	n.leaves = append(n.leaves, l)
	return true
}

// remove removes a key that exists.
func (e *Editor[K, V]) remove(n *node[K, V], shift uint, hash uint64, key K) *node[K, V] {
	n = e.own(n)
	if shift > lastShift {
		i := n.colliding(key)
		n.leaves = slices.Delete(n.leaves, i, i+1)
		return n
	}
	bit := bitOf(hash, shift)
	if n.leafMap&bit != 0 {
		i := index(n.leafMap, bit)
		n.leafMap &^= bit
		n.leaves = slices.Delete(n.leaves, i, i+1)
		return n
	}
	i := index(n.kidMap, bit)
	kid := e.remove(n.kids[i], shift+bitsPerLevel, hash, key)
	if kid.lone() {
		n.kidToLeaf(bit, kid.leaves[0])
		return n
	}
	n.kids[i] = kid
	return n
}

func (n *node[K, V]) leafToKid(bit uint32, kid *node[K, V]) {
	i := index(n.leafMap, bit)
	n.leafMap &^= bit
	n.leaves = slices.Delete(n.leaves, i, i+1)
	n.kidMap |= bit
	n.kids = slices.Insert(n.kids, index(n.kidMap, bit), kid)
}

func (n *node[K, V]) kidToLeaf(bit uint32, l leaf[K, V]) {
	i := index(n.kidMap, bit)
	n.kidMap &^= bit
	n.kids = slices.Delete(n.kids, i, i+1)
	n.leafMap |= bit
	n.leaves = slices.Insert(n.leaves, index(n.leafMap, bit), l)
}
