package iptables

import (
	"bytes"
	"maps"
	"slices"
	"strings"
)

// script builds the input of iptables-restore.
type script struct {
	b bytes.Buffer
	// writes counts the rules and chains that are written or deleted.
	writes, tables int
	rules          map[string]int // written, by table
	// chains are the chains of the instance that are written or deleted, and the built-in
	// chains whose jumps are.
	chains map[chainID]bool
}

func newScript() *script { return &script{rules: map[string]int{}, chains: map[chainID]bool{}} }

// add writes a table. The order matters: first the chains, so that rules can jump to
// them; then the jumps; last the deletions of chains that are no longer in use.
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
		s.chains[chainID{table, strings.Fields(command)[1]}] = true // after -D or -I
		s.writes++
	}
	for _, chain := range p.gone {
		line("-X ", chain)
	}
	line("COMMIT")
}

// compose writes a script: new refusals, then translations, then the deletion of old
// refusals.
func compose(nat, filter *change) *script {
	s := newScript()
	s.add(tableFilter, &filter.first)
	s.add(tableNAT, &nat.first)
	s.add(tableFilter, &filter.last)
	return s
}
