//go:build !linux

package proxier

import v1 "k8s.io/api/core/v1"

// lock is there on Linux only, as are the engines that need it.
type lock struct{}

func (*lock) tidy()                                 {}
func (*lock) take(*Config, v1.IPFamily, bool) error { return nil }
func (*lock) release()                              {}
