//go:build !linux

package userspace

import (
	"context"
	"net"
	"net/netip"
	"time"
)

// dialTCP connects to an endpoint.
func dialTCP(ctx context.Context, network string, to netip.AddrPort, timeout time.Duration) (net.Conn, error) {
	return (&net.Dialer{Timeout: timeout}).DialContext(ctx, network, to.String())
}
