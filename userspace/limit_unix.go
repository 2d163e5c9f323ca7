//go:build unix

package userspace

import (
	"os"
	"syscall"
)

// processLimit returns the limit of open descriptors. The Go runtime has raised the
// soft limit to the hard one at start.
func processLimit() int {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return maxDescriptors
	}
	return int(min(uint64(limit.Cur), maxDescriptors)) //nolint:unconvert // FreeBSD has an int64
}

// openDescriptors returns the number of open descriptors.
func openDescriptors() int {
	entries, err := os.ReadDir("/dev/fd")
	if err != nil {
		return assumedOpen
	}
	return len(entries)
}
