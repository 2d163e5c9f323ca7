package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// tree finds the rules for a packet's destination in few steps. Its leaves are
// chains of at most leafKeys destinations. An inner chain tells its children apart
// by four bits: of the address, from its end, because addresses that are handed out
// in a row differ there; then the protocol; then the port, from its beginning.
// Levels that would not tell anything apart are left out.
//
// A key costs the rewriting of its leaf. A tree depends on what is in it, and not on
// how it came to be, but for the height of parts that were larger once.
type tree struct {
	root    *node
	prefix  string // of the names of chains
	keyBits int    // of an address; 0 for a tree of ports
	changed map[string]*node
}

// leafKeys is how many destinations a chain lists before it is divided.
const leafKeys = 16

// node is one chain.
type node struct {
	chain    string
	leaves   []leaf    // sorted; of a leaf
	children [16]*node // of an inner node
	depth    int       // what the children differ in; -1 for a leaf
	count    int       // of keys below
}

// leaf is what is done for one destination.
type leaf struct {
	key   desired.Key
	owner changetracker.ServicePortName
	rules []rule
}

// newTree returns a tree behind a chain. The chains below it have names that begin
// with prefix.
func newTree(chain, prefix string, keyBits int) *tree {
	t := &tree{root: &node{chain: chain, depth: -1}, prefix: prefix, keyBits: keyBits, changed: map[string]*node{}}
	t.changed[chain] = t.root
	return t
}

// put sets the rules of a key; without rules the key goes.
func (t *tree) put(l leaf) {
	if len(l.rules) == 0 {
		t.remove(t.root, l.key)
		return
	}
	t.insert(t.root, l)
}

// owner is whose rules a key has, if it has any.
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
	return n.leaves[i].owner, true
}

func (n *node) search(key desired.Key) (i int, found bool) {
	return slices.BinarySearchFunc(n.leaves, key, func(l leaf, key desired.Key) int { return l.key.Compare(key) })
}

// all yields every chain of the tree.
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

// take returns the chains that changed since the last call; nil stands for one that
// is gone.
func (t *tree) take() map[string]*node {
	changed := t.changed
	t.changed = map[string]*node{}
	return changed
}

func (t *tree) insert(n *node, l leaf) (added bool) {
	if n.depth < 0 {
		return t.insertLeaf(n, l)
	}
	if t.differ(l.key, n.first().key) < n.depth {
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

func (t *tree) insertLeaf(n *node, l leaf) (added bool) {
	i, found := n.search(l.key)
	if found && slices.Equal(n.leaves[i].rules, l.rules) {
		n.leaves[i] = l
		return false
	}
	t.changed[n.chain] = n
	if found {
		n.leaves[i] = l
		return false
	}
	n.leaves = slices.Insert(n.leaves, i, l)
	n.count = len(n.leaves)
	if n.count > leafKeys {
		t.split(n)
	}
	return true
}

// split makes a leaf that has become too large an inner node.
func (t *tree) split(n *node) {
	all := n.leaves
	n.leaves, n.depth = nil, t.digits()
	for i := range all[1:] {
		n.depth = min(n.depth, t.differ(all[0].key, all[i+1].key))
	}
	for _, l := range all {
		digit := t.digit(l.key, n.depth)
		if n.children[digit] == nil {
			n.children[digit] = &node{chain: t.name(l.key, n.depth), depth: -1}
		}
		n.children[digit].leaves = append(n.children[digit].leaves, l)
	}
	t.changed[n.chain] = n
	for _, child := range n.children {
		if child == nil {
			continue
		}
		child.count = len(child.leaves)
		t.changed[child.chain] = child
		if child.count > leafKeys {
			t.split(child)
		}
	}
}

func (t *tree) remove(n *node, key desired.Key) (removed bool) {
	if n.depth < 0 {
		i, found := n.search(key)
		if found {
			n.leaves = slices.Delete(n.leaves, i, i+1)
			n.count = len(n.leaves)
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
	if n.count <= leafKeys || n.onlyChild() {
		t.rebuild(n, n.gather(nil))
	}
	return true
}

// rebuild makes the part below a node anew.
func (t *tree) rebuild(n *node, all []leaf) {
	t.drop(n)
	slices.SortFunc(all, func(a, b leaf) int { return a.key.Compare(b.key) })
	n.leaves, n.children, n.depth, n.count = all, [16]*node{}, -1, len(all)
	t.changed[n.chain] = n
	if n.count > leafKeys {
		t.split(n)
	}
}

// drop notes that the chains below a node are gone.
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

func (n *node) gather(into []leaf) []leaf {
	into = append(into, n.leaves...)
	for _, child := range n.children {
		if child != nil {
			into = child.gather(into)
		}
	}
	return into
}

// first is any of the leaves below.
func (n *node) first() *leaf {
	if n.depth < 0 {
		return &n.leaves[0]
	}
	for _, child := range n.children {
		if child != nil {
			return child.first()
		}
	}
	return nil
}

// The digits of a key: four bits each of its address, from the end, then one for
// the protocol, then the port, from its beginning.
const (
	digitBits  = 4
	portDigits = 16 / digitBits
)

func (t *tree) addrDigits() int { return t.keyBits / digitBits }

func (t *tree) digits() int { return t.addrDigits() + 1 + portDigits }

func (t *tree) digit(key desired.Key, depth int) int {
	if depth < t.addrDigits() {
		b := key.VIP.AsSlice()
		b = b[len(b)-1-depth/2:]
		return int(b[0]>>(digitBits*(depth%2))) & 15
	}
	if depth == t.addrDigits() {
		return slices.Index([]desired.Protocol{0, desired.TCP, desired.UDP, desired.SCTP}, key.Protocol)
	}
	port := depth - t.addrDigits() - 1
	return int(key.Port>>(digitBits*(portDigits-1-port))) & 15
}

// differ is the first digit that two keys differ in.
func (t *tree) differ(a, b desired.Key) int {
	for depth := range t.digits() {
		if t.digit(a, depth) != t.digit(b, depth) {
			return depth
		}
	}
	return t.digits()
}

// name is that of the chain for keys that agree with the given one up to a depth.
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
	slices.Reverse(addr) // to read like the end of the address
	path := strings.Trim(string(addr)+"-"+string(rest), "-")
	if room := maxChainName - len(t.prefix); len(path) > room {
		path = hashed(path, room)
	}
	return t.prefix + path
}

// rules are those of a node's chain.
func (t *tree) rules(n *node) []rule {
	if n.depth < 0 {
		var all []rule
		for i := range n.leaves {
			all = append(all, n.leaves[i].rules...)
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

// match matches the packets whose destination agrees with a key up to a depth.
func (t *tree) match(key desired.Key, depth int) *ruleText {
	r := newRule()
	if depth < t.addrDigits() {
		value, mask := make([]byte, t.keyBits/8), make([]byte, t.keyBits/8)
		b := key.VIP.AsSlice()
		for d := range depth + 1 {
			i := len(b) - 1 - d/2
			mask[i] |= 15 << (digitBits * (d % 2))
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
	bits := digitBits * (t.digits() - 1 - depth)
	low := key.Port >> bits << bits
	high := low | uint16(1<<bits-1)
	if low == high {
		return r.port(key.Protocol, low)
	}
	return r.add("-m %s --dport %d:%d", protocolText(key.Protocol), low, high)
}

// maskedText is how iptables-save prints an address with a mask that is no prefix.
func maskedText(value, mask []byte) string {
	v, _ := netip.AddrFromSlice(value)
	m, _ := netip.AddrFromSlice(mask)
	if !slices.ContainsFunc(mask, func(b byte) bool { return b != 0xff }) {
		return addrText(v)
	}
	return fmt.Sprintf("%s/%s", v6Text(v), v6Text(m))
}
