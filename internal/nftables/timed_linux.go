package nftables

import (
	"context"
	"time"

	"github.com/serviceplane/serviceplane/internal/nft"
)

// timedKernel measures the time of the kernel's calls.
type timedKernel struct {
	kernel

	waited *time.Duration
}

func (k *timedKernel) Commit(ctx context.Context, w *nft.Batch) error {
	began := time.Now()
	defer func() { *k.waited += time.Since(began) }()
	return k.kernel.Commit(ctx, w)
}

func (k *timedKernel) Dump(ctx context.Context, w *nft.Batch, reset func(), each func(attrs []byte)) error {
	began := time.Now()
	defer func() { *k.waited += time.Since(began) }()
	return k.kernel.Dump(ctx, w, reset, each)
}

func (k *timedKernel) Query(ctx context.Context, w *nft.Batch, each func(message int, attrs []byte)) error {
	began := time.Now()
	defer func() { *k.waited += time.Since(began) }()
	return k.kernel.Query(ctx, w, each)
}
