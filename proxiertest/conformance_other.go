//go:build !linux

package proxiertest

import (
	"runtime"
	"testing"
)

// Conformance needs the network namespaces of Linux. On other systems it skips the test.
func Conformance(t *testing.T, _ Features, _ Factory) {
	t.Helper()
	t.Skip("no network namespaces on " + runtime.GOOS)
}

// Topology is a network of Linux' network namespaces. There is none on other systems.
type Topology struct{}
