//go:build !linux

package main

// checkPrivilege leaves it to the engine to say that it needs Linux.
func checkPrivilege() error { return nil }
