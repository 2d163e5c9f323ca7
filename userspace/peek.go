package userspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// mostPeeked is how many bytes Peek returns at most: the headers of an HTTP request, or a TLS ClientHello.
const mostPeeked = 64 << 10

// Peek returns what the client of a TCP connection has sent, for Pick and Dial: the host of an HTTP request can choose
// the endpoint, which gets the bytes too. It waits until there are n bytes, at most 65536, and returns all that have come. With
// an error it returns fewer: os.ErrDeadlineExceeded after the timeout, io.EOF if the client sends no more,
// net.ErrClosed if the connection ends. Where the server speaks first, clients send nothing before. It is not for
// UDP, and not after Pick and Dial have returned. The bytes may not be changed.
func (c Connection) Peek(n int, timeout time.Duration) ([]byte, error) {
	switch {
	case c.first == nil:
		return nil, fmt.Errorf("first bytes of %s: only of TCP, in Pick and Dial: %w", c.Name, errors.ErrUnsupported)
	case n < 0 || n > mostPeeked:
		return nil, fmt.Errorf("first bytes of %s: %d are wanted, want at most %d", c.Name, n, mostPeeked)
	}
	f := c.first
	f.mu.Lock()
	defer f.mu.Unlock()
	have := len(f.bytes)
	if have >= n {
		return f.bytes, nil
	}
	const piece = 4 << 10
	all := make([]byte, min(n+piece, mostPeeked))
	copy(all, f.bytes)
	read, err := f.read(all[have:], n-have, timeout)
	f.bytes = all[: have+read : have+read]
	return f.bytes, err
}

// firstBytes are those that a client has sent before there is an endpoint.
type firstBytes struct {
	conn net.Conn
	ends [2]context.Context // of the socket and of the connection

	mu    sync.Mutex // guards bytes
	bytes []byte
}

// read reads at least some bytes. When it has returned, the connection has no deadline.
func (f *firstBytes) read(to []byte, least int, timeout time.Duration) (n int, err error) {
	ctx, stop := context.WithTimeout(f.ends[0], timeout)
	defer stop()
	defer context.AfterFunc(f.ends[1], stop)()
	interrupted := make(chan struct{})
	unused := context.AfterFunc(ctx, func() {
		_ = f.conn.SetReadDeadline(time.Unix(1, 0)) // it is over
		close(interrupted)
	})
	n, err = io.ReadAtLeast(f.conn, to, least)
	if !unused() {
		<-interrupted
	}
	_ = f.conn.SetReadDeadline(time.Time{})
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		err = io.EOF
	case errors.Is(err, os.ErrDeadlineExceeded) && (f.ends[0].Err() != nil || f.ends[1].Err() != nil):
		err = net.ErrClosed
	}
	return n, err
}

// taken returns the bytes, for the endpoint.
func (f *firstBytes) taken() []byte {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bytes
}
