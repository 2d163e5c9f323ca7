package userspace

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
)

// relay copies bytes between a client and its endpoint, in both directions.
type relay struct {
	client, upstream net.Conn
	header, first    []byte     // sent to the endpoint first; first is from the client
	buffers          *sync.Pool // of *[copyBufferSize]byte
	lease            *lease
	tap              tap

	ended   atomic.Int32 // directions
	failing sync.Once
	failure error // the first one; it causes the others
}

const directions = 2

// copyBufferSize is the size of the buffers of TCP connections.
const copyBufferSize = 16 << 10

// run copies until both directions have ended, or ctx has. Each direction ends by
// itself: a client may close its half and still wait for the answer. start calls a function in
// another goroutine.
func (r *relay) run(ctx context.Context, start func(func())) (sent, received int64, err error) {
	stop := context.AfterFunc(ctx, r.reset)
	var sending sync.WaitGroup
	sending.Add(1)
	start(func() {
		defer sending.Done()
		sent = r.send()
	})
	received = r.copy(r.client, r.upstream, r.tap.out)
	sending.Wait()
	_ = r.client.Close()
	_ = r.upstream.Close()
	if !stop() {
		return sent, received, errCut
	}
	return sent, received, r.failure
}

func (r *relay) reset() {
	reset(r.client)
	reset(r.upstream)
}

// send sends what comes first, and then copies from the client to the endpoint.
func (r *relay) send() (n int64) {
	if first := append(r.header, r.first...); len(first) > 0 {
		if _, err := r.upstream.Write(first); err != nil {
			r.fail(err)
			return 0
		}
		r.tap.in(int64(len(r.first)))
	}
	return int64(len(r.first)) + r.copy(r.upstream, r.client, r.tap.in)
}

// fail ends both directions.
func (r *relay) fail(err error) {
	r.failing.Do(func() { r.failure = err })
	r.reset()
}

// copy copies one direction, and closes that half of the other connection; run closes all after
// the second direction. It calls passed with the number of bytes of each piece.
func (r *relay) copy(to, from net.Conn, passed func(int64)) (n int64) {
	n, err := copyAll(passingWriter{to, passed}, from, r.buffers, r.lease)
	if err != nil {
		r.fail(err)
		return n
	}
	if r.ended.Add(1) == directions {
		return n
	}
	if half, ok := to.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite() // the other end may be closed already
		return n
	}
	_ = to.Close()
	return n
}

// reset closes a connection with a RST, so that the client sees an error instead of the
// end of an answer.
func reset(conn net.Conn) {
	if tcp, ok := conn.(interface{ SetLinger(seconds int) error }); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}

// passingWriter tells how much was written to a connection.
type passingWriter struct {
	net.Conn

	passed func(int64)
}

func (w passingWriter) Write(piece []byte) (int, error) {
	n, err := w.Conn.Write(piece)
	w.passed(int64(n))
	return n, err
}

// activityReader records in the lease that something was read.
type activityReader struct {
	from  io.Reader
	lease *lease
}

func (r activityReader) Read(buffer []byte) (int, error) {
	n, err := r.from.Read(buffer)
	r.lease.touch()
	return n, err
}

// proxyHeader returns the header of the PROXY protocol, version 2, for a TCP connection
// (https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt, section 2.2): the
// signature, version and command, family and protocol, the length of the rest, and
// both addresses and ports. If the families differ, both addresses are written as IPv6.
func proxyHeader(client, server netip.AddrPort) []byte {
	const (
		commandProxy = 0x21 // version 2, PROXY
		tcp4, tcp6   = 0x11, 0x21
	)
	header := append([]byte("\r\n\r\n\x00\r\nQUIT\n"), commandProxy, tcp4, 0, 0)
	begin := len(header)
	if client.Addr().Is4() && server.Addr().Is4() {
		header = append(header, client.Addr().AsSlice()...)
		header = append(header, server.Addr().AsSlice()...)
	} else {
		from, to := client.Addr().As16(), server.Addr().As16()
		header[begin-3] = tcp6
		header = append(append(header, from[:]...), to[:]...)
	}
	header = binary.BigEndian.AppendUint16(header, client.Port())
	header = binary.BigEndian.AppendUint16(header, server.Port())
	binary.BigEndian.PutUint16(header[begin-2:], uint16(len(header)-begin))
	return header
}
