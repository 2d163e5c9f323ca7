//go:build !linux

package conntrack

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// New returns functions of which Clean fails with proxier.ErrNotSupported.
func New(o Options) *proxier.Conntrack {
	return &proxier.Conntrack{Tracks: o.tracks, Clean: func(context.Context, v1.IPFamily, desired.FlowCheck) (deleted int, err error) {
		return 0, fmt.Errorf("delete stale flows on %s: %w", runtime.GOOS, proxier.ErrNotSupported)
	}}
}

// OpenConnections returns a function that returns proxier.ErrNotSupported.
func OpenConnections(string) func(context.Context, v1.IPFamily, func(id uint64, protocol v1.Protocol, server netip.AddrPort)) error {
	return func(context.Context, v1.IPFamily, func(id uint64, protocol v1.Protocol, server netip.AddrPort)) error {
		return fmt.Errorf("list connections on %s: %w", runtime.GOOS, proxier.ErrNotSupported)
	}
}

// ReportConnections returns proxier.ErrNotSupported.
func ReportConnections(context.Context, string, func(endpoint netip.AddrPort, protocol v1.Protocol, err error)) error {
	return fmt.Errorf("watch connections on %s: %w", runtime.GOOS, proxier.ErrNotSupported)
}
