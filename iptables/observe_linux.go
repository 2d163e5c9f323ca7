package iptables

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"
)

// kernel reads, writes and watches tables; the iptables programs implement it.
type kernel interface {
	save(ctx context.Context, table string) ([]byte, error)
	restore(ctx context.Context, input []byte) error
	watcher(owned func(chain string) bool) (watcher, error)
}

// timedKernel adds the run time of the programs to spent.
type timedKernel struct {
	kernel

	spent *time.Duration
}

func (k *timedKernel) save(ctx context.Context, table string) ([]byte, error) {
	began := time.Now()
	defer func() { *k.spent += time.Since(began) }()
	return k.kernel.save(ctx, table)
}

func (k *timedKernel) restore(ctx context.Context, input []byte) error {
	began := time.Now()
	defer func() { *k.spent += time.Since(began) }()
	return k.kernel.restore(ctx, input)
}

// observe reads a table.
func observe(ctx context.Context, k kernel, table string, names chainNames) (observed, error) {
	text, err := k.save(ctx, table)
	if err != nil {
		return observed{}, err
	}
	return parse(text, names.owns)
}

// Dump is for proxier.Abilities.
func (e *engine) Dump(ctx context.Context, w io.Writer) error {
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

// text prints the state of a table.
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
