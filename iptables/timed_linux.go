package iptables

import (
	"context"
	"time"
)

// timedKernel adds up how long the programs take.
type timedKernel struct {
	kernel

	waited *time.Duration
}

func (k *timedKernel) save(ctx context.Context, table string) ([]byte, error) {
	began := time.Now()
	defer func() { *k.waited += time.Since(began) }()
	return k.kernel.save(ctx, table)
}

func (k *timedKernel) restore(ctx context.Context, input []byte) error {
	began := time.Now()
	defer func() { *k.waited += time.Since(began) }()
	return k.kernel.restore(ctx, input)
}
