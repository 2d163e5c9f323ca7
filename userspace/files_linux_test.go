package userspace

import (
	"testing"

	"golang.org/x/sys/unix"
)

// files raises the limit of descriptors to wanted, if possible, and returns the limit.
func files(t *testing.T, wanted uint64) uint64 {
	t.Helper()
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if before.Cur >= wanted {
		return before.Cur
	}
	if unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: wanted, Max: max(wanted, before.Max)}) != nil {
		return before.Cur
	}
	t.Cleanup(func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &before) })
	return wanted
}
