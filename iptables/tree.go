package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/chainname"
)

// The bits of an address.
const v4Bits, v6Bits = 32, 128

// tree finds the rules for a packet's destination in few steps. A leaf is a chain with at
// most leafSize destinations. An inner chain selects a child by one digit of the key, that
// is four bits: of the address from its end, because consecutive addresses differ there;
// then the protocol; then of the port from its beginning. Digits that all keys of a chain
// share are skipped.
//
// Adding or removing a key rewrites its leaf. A tree depends on its keys only, not on the
// order of changes.
type tree struct {
	root    *node
	prefix  string // of the names of chains
	keyBits int    // length of an address; 0 for a tree of ports
	changed map[string]*node
}

// leafSize is how many destinations a leaf holds before it is split.
const leafSize = 16

// node is one chain.
type node struct {
	chain        string
	destinations []destination // of a leaf; sorted by key
	children     [16]*node     // of an inner node
	depth        int           // the digit that selects a child; -1 for a leaf
	count        int           // keys below
}

// destination is a key with the rules of the service port that owns it.
type destination struct {
	key   desired.Key
	owner changetracker.ServicePortName
	rules []rule
}

// newTree returns a tree whose root is a chain. The names of the other chains begin with
// prefix.
func newTree(chain, prefix string, keyBits int) *tree {
	t := &tree{root: &node{chain: chain, depth: -1}, prefix: prefix, keyBits: keyBits, changed: map[string]*node{}}
	t.changed[chain] = t.root
	return t
}

// put sets the rules of a key; a key without rules is removed.
func (t *tree) put(l destination) {
	if len(l.rules) == 0 {
		t.remove(t.root, l.key)
		return
	}
	t.insert(t.root, l)
}

// owner returns the service port that owns a key.
func (t *tree) owner(key desired.Key) (owner changetracker.ServicePortName, ok bool) {
	n := t.root
	for n != nil && n.depth >= 0 {
		n = n.children[t.digit(key, n.depth)]
	}
	if n == nil {
		return owner, false
	}
	i, found := n.search(key)
	if !found {
		return owner, false
	}
	return n.destinations[i].owner, true
}

func (n *node) search(key desired.Key) (i int, found bool) {
	return slices.BinarySearchFunc(n.destinations, key, func(l destination, key desired.Key) int { return l.key.Compare(key) })
}

// all yields all chains.
func (t *tree) all(yield func(*node)) {
	var walk func(*node)
	walk = func(n *node) {
		yield(n)
		for _, child := range n.children {
			if child != nil {
				walk(child)
			}
		}
	}
	walk(t.root)
}

// takeChanged returns the chains that changed since the last call; nil was deleted.
func (t *tree) takeChanged() map[string]*node {
	changed := t.changed
	t.changed = map[string]*node{}
	return changed
}

func (t *tree) insert(n *node, l destination) (added bool) {
	if n.depth < 0 {
		return t.insertLeaf(n, l)
	}
	if t.firstDifference(l.key, n.first().key) < n.depth {
		t.rebuild(n, append(n.gather(nil), l))
		return true
	}
	digit := t.digit(l.key, n.depth)
	child := n.children[digit]
	if child == nil {
		child = &node{chain: t.name(l.key, n.depth), depth: -1}
		n.children[digit] = child
		t.changed[n.chain] = n
	}
	if added = t.insert(child, l); added {
		n.count++
	}
	return added
}

func (t *tree) insertLeaf(n *node, l destination) (added bool) {
	i, found := n.search(l.key)
	if found && slices.Equal(n.destinations[i].rules, l.rules) {
		n.destinations[i] = l
		return false
	}
	t.changed[n.chain] = n
	if found {
		n.destinations[i] = l
		return false
	}
	n.destinations = slices.Insert(n.destinations, i, l)
	n.count = len(n.destinations)
	if n.count > leafSize {
		t.split(n)
	}
	return true
}

// split turns a leaf that is too large into an inner node.
func (t *tree) split(n *node) {
	all := n.destinations
	n.destinations, n.depth = nil, t.digits()
	for i := range all[1:] {
		n.depth = min(n.depth, t.firstDifference(all[0].key, all[i+1].key))
	}
	for _, l := range all {
		digit := t.digit(l.key, n.depth)
		if n.children[digit] == nil {
			n.children[digit] = &node{chain: t.name(l.key, n.depth), depth: -1}
		}
		n.children[digit].destinations = append(n.children[digit].destinations, l)
	}
	t.changed[n.chain] = n
	for _, child := range n.children {
		if child == nil {
			continue
		}
		child.count = len(child.destinations)
		t.changed[child.chain] = child
		if child.count > leafSize {
			t.split(child)
		}
	}
}

func (t *tree) remove(n *node, key desired.Key) (removed bool) {
	if n.depth < 0 {
		i, found := n.search(key)
		if found {
			n.destinations = slices.Delete(n.destinations, i, i+1)
			n.count = len(n.destinations)
			t.changed[n.chain] = n
		}
		return found
	}
	digit := t.digit(key, n.depth)
	child := n.children[digit]
	if child == nil || !t.remove(child, key) {
		return false
	}
	n.count--
	if child.count == 0 {
		n.children[digit] = nil
		t.changed[child.chain], t.changed[n.chain] = nil, n
	}
	if n.count <= leafSize || n.onlyChild() {
		t.rebuild(n, n.gather(nil))
	}
	return true
}

// rebuild replaces everything below a node.
func (t *tree) rebuild(n *node, all []destination) {
	t.drop(n)
	slices.SortFunc(all, func(a, b destination) int { return a.key.Compare(b.key) })
	n.destinations, n.children, n.depth, n.count = all, [16]*node{}, -1, len(all)
	t.changed[n.chain] = n
	if n.count > leafSize {
		t.split(n)
	}
}

// drop records the chains below a node as deleted.
func (t *tree) drop(n *node) {
	for _, child := range n.children {
		if child != nil {
			t.changed[child.chain] = nil
			t.drop(child)
		}
	}
}

func (n *node) onlyChild() bool {
	children := 0
	for _, child := range n.children {
		if child != nil {
			children++
		}
	}
	return children == 1
}

func (n *node) gather(into []destination) []destination {
	into = append(into, n.destinations...)
	for _, child := range n.children {
		if child != nil {
			into = child.gather(into)
		}
	}
	return into
}

// first returns any destination below.
func (n *node) first() *destination {
	if n.depth < 0 {
		return &n.destinations[0]
	}
	for _, child := range n.children {
		if child != nil {
			return child.first()
		}
	}
	return nil
}

func (t *tree) addrDigits() int { return t.keyBits / chainname.DigitBits }

func (t *tree) digits() int { return t.addrDigits() + 1 + chainname.PortDigits }

func (t *tree) digit(key desired.Key, depth int) int {
	if depth < t.addrDigits() {
		b := key.VIP.AsSlice()
		b = b[len(b)-1-depth/2:]
		return int(b[0]>>(chainname.DigitBits*(depth%2))) & 15
	}
	if depth == t.addrDigits() {
		return slices.Index([]desired.Protocol{0, desired.TCP, desired.UDP, desired.SCTP}, key.Protocol)
	}
	port := depth - t.addrDigits() - 1
	return int(key.Port>>(chainname.DigitBits*(chainname.PortDigits-1-port))) & 15
}

// firstDifference returns the first digit in which two keys differ.
func (t *tree) firstDifference(a, b desired.Key) int {
	for depth := range t.digits() {
		if t.digit(a, depth) != t.digit(b, depth) {
			return depth
		}
	}
	return t.digits()
}

// name returns the chain for keys that share the digits of key up to depth.
func (t *tree) name(key desired.Key, depth int) string {
	var addr, rest []byte
	for d := range depth + 1 {
		c := "0123456789ABCDEF"[t.digit(key, d)]
		if d < t.addrDigits() {
			addr = append(addr, c)
		} else {
			rest = append(rest, c)
		}
	}
	slices.Reverse(addr) // so that it reads like the end of the address
	path := strings.Trim(string(addr)+"-"+string(rest), "-")
	if room := chainname.MaxName - len(t.prefix); len(path) > room {
		path = hashPrefix(path, room)
	}
	return t.prefix + path
}

// rules returns the rules of a node's chain.
func (t *tree) rules(n *node) []rule {
	if n.depth < 0 {
		var all []rule
		for i := range n.destinations {
			all = append(all, n.destinations[i].rules...)
		}
		return all
	}
	var all []rule
	for _, child := range n.children {
		if child != nil {
			all = append(all, t.match(child.first().key, n.depth).jump(child.chain))
		}
	}
	return all
}

// match matches packets whose destination shares the digits of key up to depth.
func (t *tree) match(key desired.Key, depth int) *ruleText {
	r := newRule()
	if depth < t.addrDigits() {
		value, mask := make([]byte, t.keyBits/8), make([]byte, t.keyBits/8)
		b := key.VIP.AsSlice()
		for d := range depth + 1 {
			i := len(b) - 1 - d/2
			mask[i] |= 15 << (chainname.DigitBits * (d % 2))
			value[i] = b[i] & mask[i]
		}
		return r.add("-d %s", maskedText(value, mask)).comment("addresses that end in %s", strings.TrimPrefix(t.name(key, depth), t.prefix))
	}
	if t.keyBits > 0 {
		r.toAddr(key.VIP)
	}
	r.protocol(key.Protocol)
	if depth == t.addrDigits() {
		return r
	}
	bits := chainname.DigitBits * (t.digits() - 1 - depth)
	low := key.Port >> bits << bits
	high := low | uint16(1<<bits-1)
	if low == high {
		return r.port(key.Protocol, low)
	}
	return r.add("-m %s --dport %d:%d", protocolText(key.Protocol), low, high)
}

// maskedText formats an address and a mask as iptables-save does.
func maskedText(value, mask []byte) string {
	v, _ := netip.AddrFromSlice(value)
	m, _ := netip.AddrFromSlice(mask)
	if !slices.ContainsFunc(mask, func(b byte) bool { return b != 0xff }) {
		return addrText(v)
	}
	return fmt.Sprintf("%s/%s", v6Text(v), v6Text(m))
}
