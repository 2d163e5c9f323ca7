//go:build !linux

package proxier

import v1 "k8s.io/api/core/v1"

// lock does nothing: the engines that need it run on Linux only.
type lock struct{}

func (*lock) drainQueue()                              {}
func (*lock) acquire(*Config, v1.IPFamily, bool) error { return nil }
func (*lock) release()                                 {}
