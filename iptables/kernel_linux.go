package iptables

import (
	"context"
	"time"
)

// kernel reads and writes tables; the iptables programs implement it.
type kernel interface {
	save(ctx context.Context, table string) ([]byte, error)
	restore(ctx context.Context, input []byte) error
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
