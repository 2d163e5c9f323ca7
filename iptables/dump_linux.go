package iptables

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
)

// Dump implements proxier.Dumper: it prints the instance's chains, and what leads to
// them, as iptables-save does.
func (e *Engine) Dump(ctx context.Context, w io.Writer) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.connect(ctx); err != nil {
		return err
	}
	for _, table := range []string{tableFilter, tableNAT} {
		o, err := observe(ctx, e.kernel, table, e.config.chains())
		if err != nil {
			return err
		}
		if _, err := io.WriteString(w, o.text(table)); err != nil {
			return fmt.Errorf("write dump: %w", err)
		}
	}
	return nil
}

// text prints what was observed of a table.
func (o *observed) text(table string) string {
	s := newScript()
	p := &tablePart{chains: maps.Clone(o.chains)}
	for _, j := range o.jumps {
		p.inserts = append(p.inserts, "-A "+j.chain+" "+string(j.rule))
	}
	slices.Sort(p.inserts)
	s.add(table, p)
	return s.b.String()
}
