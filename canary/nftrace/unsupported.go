//go:build !linux

package nftrace

import (
	"context"

	"github.com/serviceplane/serviceplane/canary"
)

// Explain returns a function that knows nothing: only Linux has nf_tables.
func Explain(string) func(context.Context, canary.Probe, func(context.Context) error) string {
	return func(context.Context, canary.Probe, func(context.Context) error) string { return "" }
}
