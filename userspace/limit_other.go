//go:build !unix

package userspace

// processLimit is how many descriptors this process may have: as far as Windows is
// concerned, more than its memory.
func processLimit() int { return mostDescriptors }

// openDescriptors counts those that are open.
func openDescriptors() int { return unknownOpen }
