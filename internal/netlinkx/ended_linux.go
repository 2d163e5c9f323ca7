package netlinkx

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

const (
	groupDestroyed = 3 // NFNLGRP_CONNTRACK_DESTROY of linux/netfilter/nfnetlink.h
	// eventBuffer holds some thousand notifications.
	eventBuffer = 4 << 20
	// longestEvent is more than the kernel puts into one notification.
	longestEvent = 64 << 10
)

// Ended is a socket that gets a notification for each conntrack entry that the kernel deletes.
type Ended struct {
	file   *os.File
	conn   syscall.RawConn
	buffer []byte
}

// OpenEnded opens the socket in a network namespace, as Open does.
func OpenEnded(netNS string) (*Ended, error) {
	e := &Ended{buffer: make([]byte, longestEvent)}
	err := namespace.Visit(netNS, func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		e.file = os.NewFile(uintptr(fd), "conntrack notifications")
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, eventBuffer) != nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, eventBuffer) // or the default
		}
		return unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 << (groupDestroyed - 1)})
	})
	if err == nil {
		e.conn, err = e.file.SyscallConn()
	}
	if err != nil {
		if e.file != nil {
			e.Close()
		}
		return nil, fmt.Errorf("open socket for notifications of connection tracking: %w", err)
	}
	return e, nil
}

// Close closes the socket. It waits for a Read, and ends a Wait.
func (e *Ended) Close() { _ = e.file.Close() }

// Wait calls readable whenever there are notifications to Read, until ctx ends; then it closes the
// socket and returns nil. It also returns when readable fails.
func (e *Ended) Wait(ctx context.Context, readable func() error) error {
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { e.Close(); close(closed) })
	var failed error
	err := e.conn.Read(func(uintptr) bool {
		failed = readable()
		return failed != nil
	})
	if !stop() {
		<-closed
	}
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the end of ctx has closed the socket
	}
	return errors.Join(failed, err)
}

// Read calls ended for each notification that is there, and does not wait. lost is how often the
// kernel says that it had no room for some. Calls must not overlap.
func (e *Ended) Read(ended func(*Flow)) (lost uint64, err error) {
	closed := e.conn.Control(func(fd uintptr) {
		for {
			n, receiveErr := unix.Read(int(fd), e.buffer)
			switch {
			case errors.Is(receiveErr, unix.EAGAIN):
				return
			case errors.Is(receiveErr, unix.ENOBUFS):
				lost++
			case errors.Is(receiveErr, unix.EINTR):
			case receiveErr != nil:
				err = fmt.Errorf("receive notifications of connection tracking: %w", receiveErr)
				return
			default:
				eachFlow(e.buffer[:n], ended)
			}
		}
	})
	return lost, errors.Join(err, closed)
}

// eachFlow calls f for the flow of each netlink message in b.
func eachFlow(b []byte, f func(*Flow)) {
	const header = unix.NLMSG_HDRLEN + nl.SizeofNfgenmsg
	for len(b) >= header {
		n := int(binary.NativeEndian.Uint32(b))
		if n < header || n > len(b) {
			return
		}
		if flow, ok := parseFlow(b[header:n]); ok {
			f(&flow)
		}
		b = b[min((n+3)&^3, len(b)):]
	}
}

// WatchEnded calls ended for each conntrack entry that the kernel deletes, until ctx ends; then
// it returns nil. If there are more than it can read, some are lost.
func WatchEnded(ctx context.Context, netNS string, ended func(*Flow)) error {
	e, err := OpenEnded(netNS)
	if err != nil {
		return err
	}
	defer e.Close()
	return e.Wait(ctx, func() error {
		_, err := e.Read(ended)
		return err
	})
}
