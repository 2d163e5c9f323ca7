//go:build !linux

package namespace

import (
	"errors"
	"fmt"
)

// Visit runs f; other systems have no network namespaces.
func Visit(netNS string, f func() error) error {
	if netNS != "" {
		return fmt.Errorf("enter network namespace %s: %w", netNS, errors.ErrUnsupported)
	}
	return f()
}
