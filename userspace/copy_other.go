//go:build !linux

package userspace

import (
	"io"
	"net"
	"net/netip"
	"sync"
)

// copyAll copies one direction to its end, and returns the number of bytes.
func copyAll(to passingWriter, from net.Conn, _ *sync.Pool, l *lease) (int64, error) {
	return io.Copy(to, activityReader{from, l})
}

// originalDst returns the socket's own address: portals, which translate destinations,
// exist only on Linux.
func originalDst(_ net.Conn, local netip.AddrPort) (netip.AddrPort, bool) { return local, true }
