//go:build !linux

package namespace

import (
	"errors"
	"fmt"
)

// Visit runs f. Other systems than Linux have no network namespaces.
func Visit(netNS string, f func() error) error {
	if netNS != "" {
		return fmt.Errorf("enter network namespace %s: %w", netNS, errors.ErrUnsupported)
	}
	return f()
}
