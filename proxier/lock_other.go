//go:build !linux

package proxier

import v1 "k8s.io/api/core/v1"

// lock is there on Linux only, as are the engines that need it.
type lock struct{}

func (*lock) held() bool                      { return false }
func (*lock) tidy()                           {}
func (*lock) take(*Config, v1.IPFamily) error { return nil }
func (*lock) release()                        {}
