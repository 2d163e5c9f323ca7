//go:build !linux

package main

import "net/netip"

// reserve returns no endpoints: the proxy does not run here.
func reserve([]netip.Prefix) (refusing, func(), error) { return nil, func() {}, nil }
