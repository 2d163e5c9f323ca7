//go:build !unix

package userspace

// processLimit returns the limit of open descriptors. On Windows only memory limits
// them.
func processLimit() int { return maxDescriptors }

// openDescriptors returns the number of open descriptors.
func openDescriptors() int { return assumedOpen }
