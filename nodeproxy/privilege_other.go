//go:build !linux

package nodeproxy

// checkPrivilege does nothing: the engine reports that it needs Linux.
func checkPrivilege() error { return nil }
