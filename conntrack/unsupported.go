//go:build !linux

package conntrack

import (
	"context"
	"fmt"
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

// Tracks implements proxier.Conntrack.
func (c *Cleaner) Tracks(p desired.Protocol) bool { return c.options.tracks(p) }

// Clean returns proxier.ErrNotSupported.
func (c *Cleaner) Clean(context.Context, v1.IPFamily, desired.FlowCheck) (deleted int, err error) {
	return 0, fmt.Errorf("delete stale flows on %s: %w", runtime.GOOS, proxier.ErrNotSupported)
}
