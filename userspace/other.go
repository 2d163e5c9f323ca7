//go:build !linux

package userspace

import (
	"context"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/serviceplane/serviceplane/desired"
)

// dialTCP connects to an endpoint.
func dialTCP(ctx context.Context, network string, to netip.AddrPort, timeout time.Duration) (net.Conn, error) {
	return (&net.Dialer{Timeout: timeout}).DialContext(ctx, network, to.String())
}

// copyAll copies one direction to its end, and returns the number of bytes.
func copyAll(to passingWriter, from net.Conn, _ *sync.Pool, l *lease) (int64, error) {
	return io.Copy(to, activityReader{from, l})
}

// next waits for a datagram and passes it to handle.
func (r *receiver) next(handle func(datagram []byte)) error { return r.pass(r.conn.Read, handle) }

// originalDst returns the socket's own address: portals, which translate destinations,
// exist only on Linux.
func originalDst(_ net.Conn, local netip.AddrPort) (netip.AddrPort, bool) { return local, true }

// reservePort does nothing: portals exist only on Linux.
func reservePort(string, desired.Protocol, netip.AddrPort) (fd int, err error) { return -1, nil }

func closeReservation(int) {}

// kernelState is nothing: this system is not asked.
type kernelState struct{}

func stateOf(syscall.RawConn, desired.Protocol) kernelState { return kernelState{} }
