package iptables

import (
	"bytes"
	"maps"
	"slices"
	"strings"
)

// script is the input of iptables-restore under construction.
type script struct {
	b bytes.Buffer
	// writes counts the rules and chains that are written or deleted.
	writes, tables int
	rules          map[string]int // written, by table
	// chains are those of ours that are written or deleted, and those of the kernel whose
	// jumps to ours are.
	chains map[chainID]bool
}

func newScript() *script { return &script{rules: map[string]int{}, chains: map[chainID]bool{}} }

// chainID names a chain of a table.
type chainID struct{ table, chain string }

// tablePart is the part of a script about one table.
type tablePart struct {
	// chains are written anew, with these rules; gone are deleted.
	chains ruleset
	gone   []string
	// inserts and deletes are complete commands about rules of built-in chains.
	deletes, inserts []string
}

func (p *tablePart) empty() bool {
	return len(p.chains)+len(p.gone)+len(p.deletes)+len(p.inserts) == 0
}

// add writes a table. The order matters: chains first, so that rules can jump to
// them; then what jumps to them; and at last what nobody jumps to any more goes.
func (s *script) add(table string, p *tablePart) {
	if p.empty() {
		return
	}
	s.tables++
	line := func(parts ...string) {
		for _, part := range parts {
			s.b.WriteString(part)
		}
		s.b.WriteByte('\n')
	}
	line("*", table)
	chains := slices.Sorted(maps.Keys(p.chains))
	for _, chain := range slices.Concat(chains, p.gone) {
		line(":", chain, " - [0:0]")
		s.chains[chainID{table, chain}] = true
		s.writes++
	}
	for _, chain := range chains {
		for _, r := range p.chains[chain] {
			line("-A ", chain, " ", string(r))
		}
		s.writes += len(p.chains[chain])
		s.rules[table] += len(p.chains[chain])
	}
	for _, command := range slices.Concat(p.deletes, p.inserts) {
		line(command)
		s.chains[chainID{table, strings.Fields(command)[1]}] = true // behind -D or -I
		s.writes++
	}
	for _, chain := range p.gone {
		line("-X ", chain)
	}
	line("COMMIT")
}

// change is what brings a table from what it has to what it must be.
type change struct {
	// first is what must be there before anything else goes, last the rest.
	first, last tablePart
}

// changeOf compares chains. Rules that go stay to the last, behind the new ones, if
// keep says so: a refusal must outlast the moment in which nobody translates.
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
	known := make(map[rule]bool, len(others))
	for _, r := range others {
		known[r] = true
	}
	return slices.DeleteFunc(slices.Clone(rules), func(r rule) bool { return known[r] })
}

// compose makes a script: refusals, translations, and then the refusals that are
// not needed any more.
func compose(nat, filter *change) *script {
	s := newScript()
	s.add(tableFilter, &filter.first)
	s.add(tableNAT, &nat.first)
	s.add(tableFilter, &filter.last)
	return s
}
