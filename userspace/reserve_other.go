//go:build !linux

package userspace

import (
	"net/netip"

	"github.com/serviceplane/serviceplane/desired"
)

// reservePort does nothing: portals exist only on Linux.
func reservePort(string, desired.Protocol, netip.AddrPort) (fd int, err error) { return -1, nil }

func closeReservation(int) {}
