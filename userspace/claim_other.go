//go:build !linux

package userspace

import (
	"net/netip"

	"github.com/serviceplane/serviceplane/desired"
)

// bindClaim does nothing: there are no portals but on Linux.
func bindClaim(string, desired.Protocol, netip.AddrPort) (fd int, err error) { return -1, nil }

func closeClaim(int) {}
