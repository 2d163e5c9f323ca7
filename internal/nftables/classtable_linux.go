package nftables

import (
	"maps"
	"slices"
)

// classTable holds the classes that have a chain, and the number of frontends and service
// ports that need each. At most spareClasses of them are unused.
type classTable struct {
	users  map[class]int
	unused int // classes without users
	limits limitCounts
}

func newClassTable() *classTable { return &classTable{users: map[class]int{}} }

// adopt takes over a class whose chain exists in the kernel.
func (t *classTable) adopt(c class) {
	if _, ok := t.users[c]; !ok {
		t.users[c] = 0
		t.change(c, 1)
	}
}

// change changes the number of unused classes.
func (t *classTable) change(c class, n int) {
	if t.unused += n; c.isLimit() {
		t.limits.unused += n
	}
}

// exist adds a class to the transaction if it has no chain yet.
func (t *classTable) exist(c class, tx *transaction) uint32 {
	if _, ok := t.users[c]; !ok {
		t.adopt(c)
		tx.classes = append(tx.classes, c)
	}
	return uint32(c)
}

// count changes the number of users of a class by n.
func (t *classTable) count(c class, n int) {
	before := t.users[c]
	t.users[c] = before + n
	t.limits.count(c, before, before+n)
	switch {
	case before == 0 && n > 0:
		t.change(c, -1)
	case before > 0 && before+n == 0:
		t.change(c, 1)
	}
}

// sorted lists all classes in order of number.
func (t *classTable) sorted() []class { return slices.Sorted(maps.Keys(t.users)) }

// takeUnused removes the classes without users if they are too many: all, or those of limits. It returns them.
func (t *classTable) takeUnused() (unused []class) {
	all := t.unused > spareClasses
	if !all && t.limits.unused <= spareLimits {
		return nil
	}
	for c, n := range t.users {
		if n == 0 && (all || c.isLimit()) {
			unused = append(unused, c)
			t.change(c, -1)
			delete(t.users, c)
		}
	}
	return unused
}

// classes yields the classes that a service port needs, each once per use.
func (p *placed) classes(yield func(class) bool) {
	for i := range p.frontends {
		f := &p.frontends[i]
		for _, value := range [...]uint32{f.entry, f.limit, f.firewalled, f.outside, f.inside} {
			if c := class(value); c.isCounted() && !yield(c) {
				return
			}
		}
	}
	for _, c := range [...]class{p.timeout, p.draws[0], p.draws[1]} {
		if c != 0 && !yield(c) {
			return
		}
	}
}
