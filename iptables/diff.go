package iptables

import (
	"slices"
	"strings"
)

// tablePart is the part of a script about one table.
type tablePart struct {
	// chains are flushed and get these rules; gone are deleted.
	chains ruleset
	gone   []string
	// deletes and inserts are complete commands about rules of built-in chains.
	deletes, inserts []string
}

func (p *tablePart) empty() bool {
	return len(p.chains)+len(p.gone)+len(p.deletes)+len(p.inserts) == 0
}

// change turns what a table holds into what it must hold, in two steps: between them,
// the other table is written.
type change struct{ first, last tablePart }

// changeOf compares chains. With keep, old rules are deleted in the last step only, and
// follow the new ones until then: a refusal must stay until packets are translated.
func changeOf(have, want ruleset, keep bool) *change {
	c := &change{first: tablePart{chains: ruleset{}}, last: tablePart{chains: ruleset{}}}
	for chain, rules := range want {
		had, exists := have[chain]
		switch {
		case rules == nil && exists:
			c.last.gone = append(c.last.gone, chain)
		case rules == nil || exists && slices.Equal(had, rules):
		default:
			c.first.chains[chain] = rules
			if old := without(had, rules); keep && len(old) > 0 {
				c.first.chains[chain] = slices.Concat(rules, old)
				c.last.chains[chain] = rules
			}
		}
	}
	slices.Sort(c.last.gone)
	if !keep {
		c.first.gone, c.last.gone = c.last.gone, nil
	}
	return c
}

// without returns the rules that are not among others.
func without(rules, others []rule) []rule {
	if len(rules) == 0 {
		return nil
	}
	excluded := make(map[rule]bool, len(others))
	for _, r := range others {
		excluded[r] = true
	}
	return slices.DeleteFunc(slices.Clone(rules), func(r rule) bool { return excluded[r] })
}

// repairJumps returns the commands that repair the jumps of a table. Missing jumps are
// inserted first in their chains. Jumps from built-in chains to chains of the instance
// that are duplicate, different or obsolete are deleted.
func repairJumps(table string, want []jump, have []foreignJump) (deletes, inserts []string) {
	isWanted := func(h foreignJump) bool {
		return slices.ContainsFunc(want, func(w jump) bool { return w.table == table && w.matches(h) })
	}
	for i, h := range have {
		if !slices.Contains(builtInChains, h.chain) {
			continue
		}
		isDuplicate := slices.ContainsFunc(have[:i], func(o foreignJump) bool { return o.chain == h.chain && o.rule == h.rule })
		if !isWanted(h) || isDuplicate {
			deletes = append(deletes, "-D "+h.chain+" "+string(h.rule))
		}
	}
	for _, w := range want {
		if w.table == table && !slices.ContainsFunc(have, w.matches) {
			inserts = append(inserts, "-I "+w.chain+" 1 "+string(w.rule))
		}
	}
	return deletes, inserts
}

// matches ignores the comment, which differs between versions and from kube-proxy's.
func (j jump) matches(h foreignJump) bool {
	return j.chain == h.chain && j.to == h.to && j.rule.withoutComment() == h.rule.withoutComment()
}

// discard adds the chains to want that must be deleted, or flushed if another program
// uses them.
func (o *observed) discard(want ruleset) {
	referenced := o.referenced()
	for chain := range o.chains {
		if _, ok := want[chain]; ok {
			continue
		}
		want[chain] = nil
		if referenced[chain] {
			want[chain] = []rule{}
		}
	}
}

// jumpsAfter adds the jumps from built-in chains that exist after a write.
func (o *observed) jumpsAfter(table string, write *tablePart, into map[chainID][]rule) {
	gone := slices.Clone(write.deletes)
	for _, j := range o.jumps {
		id := chainID{table, j.chain}
		if i := slices.Index(gone, "-D "+j.chain+" "+string(j.rule)); i >= 0 {
			gone = slices.Delete(gone, i, i+1)
		} else if slices.Contains(builtInChains, j.chain) {
			into[id] = append(into[id], j.rule)
		}
	}
	for _, command := range write.inserts {
		fields := strings.SplitN(command, " ", 4) // -I chain 1 rule
		id := chainID{table, fields[1]}
		into[id] = slices.Insert(into[id], 0, rule(fields[3]))
	}
}
