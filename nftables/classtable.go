package nftables

import (
	"cmp"
	"slices"
	"strings"
)

// classTable knows which forwarding classes exist and under which number. Their
// number is bounded by the number of distinct endpoint counts, not of Services.
type classTable struct {
	ids    map[forwarding]uint32
	chains map[string]bool // that exist, or will with the transaction at hand
	last   uint32
}

func newClassTable() *classTable {
	return &classTable{ids: map[forwarding]uint32{}, chains: map[string]bool{}, last: firstForwarding - 1}
}

// adopt takes over a class that exists in the kernel. Of two numbers of one class
// the first one counts.
func (c *classTable) adopt(f forwarding, id uint32) {
	if _, ok := c.ids[f]; !ok {
		c.ids[f] = id
	}
	c.last = max(c.last, id)
}

// sorted lists all classes in order of number.
func (c *classTable) sorted() []newClass {
	list := make([]newClass, 0, len(c.ids))
	for f, id := range c.ids {
		list = append(list, newClass{id: id, forwarding: f})
	}
	slices.SortFunc(list, func(a, b newClass) int { return cmp.Compare(a.id, b.id) })
	return list
}

// class returns the number of a class. A new one is noted in the transaction.
func (c *classTable) class(f forwarding, t *transaction) uint32 {
	if id, ok := c.ids[f]; ok {
		return id
	}
	c.last++
	c.ids[f] = c.last
	t.classes = append(t.classes, newClass{id: c.last, forwarding: f})
	return c.last
}

// unused returns the classes that no frontend of any service port has.
func (c *classTable) unused(inUse map[uint32]bool) []newClass {
	var free []newClass
	for f, id := range c.ids {
		if !inUse[id] {
			free = append(free, newClass{id: id, forwarding: f})
		}
	}
	return free
}

// remove forgets a class whose chain is deleted.
func (c *classTable) remove(f forwarding) {
	delete(c.ids, f)
	delete(c.chains, f.chain())
}

// orphanedAffinityChains are the shared chains that no class leads to any more.
func (c *classTable) orphanedAffinityChains() []string {
	needed := map[string]bool{}
	for f := range c.ids {
		find, pick := affinityChains(f)
		needed[find], needed[pick] = true, true
	}
	var orphans []string
	for chain := range c.chains {
		if strings.HasPrefix(chain, affinityPrefix) && !needed[chain] {
			orphans = append(orphans, chain)
		}
	}
	return orphans
}

// affinityPrefix begins the names of the chains that classes with the same
// affinity timeout share.
const affinityPrefix = "affinity-"

// affinityChains are the names of those chains: find differs by scope too.
func affinityChains(f forwarding) (find, pick string) {
	s := seconds(f.affinity)
	return affinityPrefix + strings.ToLower(f.scope.String()) + "-" + s, affinityPrefix + "pick-" + s
}
