//go:build !linux

package ipvs

import (
	"context"
	"fmt"
	"runtime"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// NewEngine returns proxier.ErrNotSupported.
func NewEngine(Config, v1.IPFamily, proxier.Deps) (proxier.Engine, error) {
	return nil, fmt.Errorf("ipvs on %s: %w", runtime.GOOS, proxier.ErrNotSupported)
}

// New returns proxier.ErrNotSupported.
func New(Config, proxier.Deps) (*proxier.Proxier, error) {
	return nil, fmt.Errorf("ipvs on %s: %w", runtime.GOOS, proxier.ErrNotSupported)
}

// Leaving needs Linux. On other systems there is none.
type Leaving struct{}

// NewLeaving returns proxier.ErrNotSupported.
func NewLeaving(Config, proxier.Deps) (*Leaving, error) {
	return nil, fmt.Errorf("ipvs on %s: %w", runtime.GOOS, proxier.ErrNotSupported)
}

// Run returns proxier.ErrNotSupported.
func (*Leaving) Run(context.Context) error { return proxier.ErrNotSupported }

// Connections returns 0.
func (*Leaving) Connections() int { return 0 }
