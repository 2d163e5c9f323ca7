//go:build !linux

package nodeproxy

// ownSocket has no lock.
func ownSocket(string) (release func(), err error) { return func() {}, nil }

// checkPrivilege does nothing: the engine reports that it needs Linux.
func checkPrivilege() error { return nil }
