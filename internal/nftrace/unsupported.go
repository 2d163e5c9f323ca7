//go:build !linux

package nftrace

import (
	"context"
	"errors"
	"fmt"
)

// Trace returns an error that wraps errors.ErrUnsupported: only Linux has nf_tables.
func Trace(context.Context, Options) (TraceResult, error) {
	return TraceResult{}, fmt.Errorf("trace packets: %w: use Linux", errors.ErrUnsupported)
}
