//go:build !linux

package proxiertest

import (
	"runtime"
	"testing"
)

// Conformance needs the network namespaces of Linux, and skips the test here.
func Conformance(t *testing.T, _ Features, _ Factory) {
	t.Helper()
	t.Skip("no network namespaces on " + runtime.GOOS)
}
