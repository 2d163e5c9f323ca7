package nftables

import (
	"context"
	"time"
)

// timedKernel measures the time of the kernel's calls.
type timedKernel struct {
	kernel

	waited *time.Duration
}

func (k *timedKernel) commit(ctx context.Context, w *wire) error {
	began := time.Now()
	defer func() { *k.waited += time.Since(began) }()
	return k.kernel.commit(ctx, w)
}

func (k *timedKernel) dump(ctx context.Context, w *wire, reset func(), each func(attrs []byte)) error {
	began := time.Now()
	defer func() { *k.waited += time.Since(began) }()
	return k.kernel.dump(ctx, w, reset, each)
}

func (k *timedKernel) query(ctx context.Context, w *wire, each func(message int, attrs []byte)) error {
	began := time.Now()
	defer func() { *k.waited += time.Since(began) }()
	return k.kernel.query(ctx, w, each)
}
