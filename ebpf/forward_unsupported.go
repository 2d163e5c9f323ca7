//go:build !linux

package ebpf

// ForwardCounts is zero.
func (e *Engine) ForwardCounts() (ForwardCounts, error) { return ForwardCounts{}, errNotLinux() }
