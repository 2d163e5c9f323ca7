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

// Cleaner works on Linux only.
type Cleaner struct {
	options Options
}

// New returns a Cleaner whose Clean fails.
func New(o Options) *Cleaner { return &Cleaner{options: o} }

// Tracks is for proxier.Conntrack.
func (c *Cleaner) Tracks(p desired.Protocol) bool { return c.options.tracks(p) }

// Conntrack returns its functions.
func (c *Cleaner) Conntrack() *proxier.Conntrack {
	return &proxier.Conntrack{Tracks: c.Tracks, Clean: c.Clean}
}

// ReportConnections returns proxier.ErrNotSupported.
func ReportConnections(context.Context, string, func(endpoint netip.AddrPort, protocol v1.Protocol, err error)) error {
	return fmt.Errorf("watch connections on %s: %w", runtime.GOOS, proxier.ErrNotSupported)
}

// Clean returns proxier.ErrNotSupported.
func (c *Cleaner) Clean(context.Context, v1.IPFamily, desired.FlowCheck) (deleted int, err error) {
	return 0, fmt.Errorf("delete stale flows on %s: %w", runtime.GOOS, proxier.ErrNotSupported)
}
