package iptables

import "slices"

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

// without returns rules without others, one for one.
func without(rules, others []rule) []rule {
	if len(rules) == 0 {
		return nil
	}
	left := make(map[rule]int, len(others))
	for _, r := range others {
		left[r]++
	}
	return slices.DeleteFunc(slices.Clone(rules), func(r rule) bool {
		left[r]--
		return left[r] >= 0
	})
}

// repairJumps returns the commands that repair the jumps of a table, and the jumps that built-in
// chains have then. Missing jumps are inserted first in their chains. Jumps from built-in chains to
// chains of the instance that are duplicate, different or obsolete are deleted.
func repairJumps(want, have []jump) (deletes, inserts []string, after ruleset) {
	after = ruleset{}
	for i, h := range have {
		switch {
		case !slices.Contains(builtInChains, h.chain):
		case slices.ContainsFunc(want, h.matches) && !slices.Contains(have[i+1:], h): // -D deletes the first
			after[h.chain] = append(after[h.chain], h.rule)
		default:
			deletes = append(deletes, "-D "+h.chain+" "+string(h.rule))
		}
	}
	for _, w := range want {
		if !slices.ContainsFunc(have, w.matches) {
			inserts = append(inserts, "-I "+w.chain+" 1 "+string(w.rule))
			after[w.chain] = slices.Insert(after[w.chain], 0, w.rule)
		}
	}
	return deletes, inserts, after
}

// matches ignores the comment, which differs between versions and from kube-proxy's.
func (j jump) matches(o jump) bool {
	return j.chain == o.chain && j.to == o.to && j.rule.withoutComment() == o.rule.withoutComment()
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
