//go:build !linux

package ebpf

import (
	"fmt"
	"runtime"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// New returns proxier.ErrNotSupported: BPF is a part of Linux.
func New(Config, proxier.Deps) (*proxier.Proxier, error) { return nil, errNotLinux() }

// Engine needs Linux: there is none here.
type Engine struct{ proxier.Engine }

// NewEngine returns proxier.ErrNotSupported: BPF is a part of Linux.
func NewEngine(Config, v1.IPFamily, proxier.Deps) (*Engine, error) { return nil, errNotLinux() }

// RemoveSockets returns proxier.ErrNotSupported: BPF is a part of Linux.
func RemoveSockets(Config) error { return errNotLinux() }

// ForwardCounts is zero.
func (e *Engine) ForwardCounts() (packets, toPeer uint64, err error) { return 0, 0, errNotLinux() }

// SocketCounts is zero.
func (e *Engine) SocketCounts() (connection.SocketCounts, error) {
	return connection.SocketCounts{}, errNotLinux()
}

// Add returns proxier.ErrNotSupported.
func (n *Namespaces) Add(string) error { return errNotLinux() }

// Remove returns proxier.ErrNotSupported.
func (n *Namespaces) Remove(string) error { return errNotLinux() }

func errNotLinux() error {
	return fmt.Errorf("ebpf on %s: %w", runtime.GOOS, proxier.ErrNotSupported)
}
