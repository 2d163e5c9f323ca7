//go:build !linux

package nftables

import (
	"fmt"
	"runtime"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// New returns proxier.ErrNotSupported: nf_tables is a part of Linux.
func New(Config, proxier.Deps) (*proxier.Proxier, error) {
	return nil, errNotLinux()
}

// NewEngine returns proxier.ErrNotSupported: nf_tables is a part of Linux.
func NewEngine(Config, v1.IPFamily, proxier.Deps) (proxier.Engine, error) {
	return nil, errNotLinux()
}

func errNotLinux() error {
	return fmt.Errorf("nftables on %s: %w", runtime.GOOS, proxier.ErrNotSupported)
}
