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
	leaf, at, found := t.find(l.key)
	switch isRemoved := len(l.rules) == 0; {
	case found && isRemoved:
		t.remove(t.root, l.key)
	case found:
		if !slices.Equal(leaf.destinations[at].rules, l.rules) {
			t.changed[leaf.chain] = leaf
		}
		leaf.destinations[at] = l
	case !isRemoved:
		t.insert(t.root, l)
	}
}

// find returns the leaf of a key, and its place there.
func (t *tree) find(key desired.Key) (leaf *node, at int, found bool) {
	for leaf = t.root; leaf.depth >= 0; {
		if leaf = leaf.children[t.digit(key, leaf.depth)]; leaf == nil {
			return nil, 0, false
		}
	}
	at, found = search(leaf.destinations, key)
	return leaf, at, found
}

// search finds a key among destinations that are sorted.
func search(sorted []destination, key desired.Key) (at int, found bool) {
	return slices.BinarySearchFunc(sorted, key, func(l destination, key desired.Key) int { return l.key.Compare(key) })
}

// takeChanged returns the chains that changed since the last call; nil was deleted.
func (t *tree) takeChanged() map[string]*node {
	changed := t.changed
	t.changed = map[string]*node{}
	return changed
}

// takeAll returns all chains, and forgets what changed.
func (t *tree) takeAll() map[string]*node {
	all := map[string]*node{}
	t.root.walk(func(n *node) { all[n.chain] = n })
	clear(t.changed)
	return all
}

// walk calls f with a node and all below.
func (n *node) walk(f func(*node)) {
	f(n)
	for _, child := range n.children {
		if child != nil {
			child.walk(f)
		}
	}
}

// insert adds a key that is not there.
func (t *tree) insert(n *node, l destination) {
	switch {
	case n.depth < 0:
		at, _ := search(n.destinations, l.key)
		t.fill(n, slices.Insert(n.destinations, at, l))
	case t.firstDifference(l.key, n.first().key) < n.depth:
		t.rebuild(n, l)
	default:
		n.count++
		digit := t.digit(l.key, n.depth)
		if n.children[digit] == nil {
			n.children[digit] = &node{chain: t.name(l.key, n.depth), depth: -1}
			t.changed[n.chain] = n
		}
		t.insert(n.children[digit], l)
	}
}

// remove removes a key that is there.
func (t *tree) remove(n *node, key desired.Key) {
	if n.depth < 0 {
		at, _ := search(n.destinations, key)
		t.fill(n, slices.Delete(n.destinations, at, at+1))
		return
	}
	n.count--
	child := n.children[t.digit(key, n.depth)]
	t.remove(child, key)
	if child.count == 0 {
		n.children[t.digit(key, n.depth)] = nil
		t.changed[child.chain], t.changed[n.chain] = nil, n
	}
	if n.count <= leafSize || n.firstChild().count == n.count { // the only child
		t.rebuild(n)
	}
}

// rebuild replaces everything below a node, and adds destinations.
func (t *tree) rebuild(n *node, all ...destination) {
	n.walk(func(below *node) {
		all = append(all, below.destinations...)
		t.changed[below.chain] = nil
	})
	slices.SortFunc(all, func(a, b destination) int { return a.key.Compare(b.key) })
	t.fill(n, all)
}

// fill gives a node its destinations. If they are too many for a leaf, it divides them.
func (t *tree) fill(n *node, all []destination) {
	n.destinations, n.children, n.depth, n.count = all, [16]*node{}, -1, len(all)
	t.changed[n.chain] = n
	if len(all) <= leafSize {
		return
	}
	n.destinations, n.depth = nil, t.digits()
	for i := range all[1:] {
		n.depth = min(n.depth, t.firstDifference(all[0].key, all[i+1].key))
	}
	var parts [16][]destination
	for _, l := range all {
		digit := t.digit(l.key, n.depth)
		parts[digit] = append(parts[digit], l)
	}
	for digit, part := range parts {
		if len(part) > 0 {
			n.children[digit] = &node{chain: t.name(part[0].key, n.depth)}
			t.fill(n.children[digit], part)
		}
	}
}

// first returns any destination below.
func (n *node) first() *destination {
	for n.depth >= 0 {
		n = n.firstChild()
	}
	return &n.destinations[0]
}

// firstChild returns the child with the smallest digit.
func (n *node) firstChild() *node {
	return n.children[slices.IndexFunc(n.children[:], func(child *node) bool { return child != nil })]
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
	var all []rule
	for i := range n.destinations {
		all = append(all, n.destinations[i].rules...)
	}
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
