//go:build !unix

package userspace

// processLimit is how many descriptors this process may have. Windows has no limit
// below what memory allows.
func processLimit() int { return mostDescriptors }

// openDescriptors counts those that are open.
func openDescriptors() int { return unknownOpen }
