package netlinkx

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

const (
	groupDestroyed = 3 // NFNLGRP_CONNTRACK_DESTROY of linux/netfilter/nfnetlink.h
	// endedRoom holds some thousand notifications.
	endedRoom = 4 << 20
)

// Ended is a socket that gets a notification for each conntrack entry that the kernel deletes.
type Ended struct{ conn *Conn }

// OpenEnded opens the socket in a network namespace, as Open does.
func OpenEnded(netNS string) (*Ended, error) {
	conn, err := Listen(netNS, unix.NETLINK_NETFILTER, endedRoom, groupDestroyed)
	if err != nil {
		return nil, err
	}
	return &Ended{conn}, nil
}

// Close closes the socket. It waits for a Read, and ends a Wait.
func (e *Ended) Close() { _ = e.conn.Close() }

// Wait calls readable whenever there are notifications to Read, until ctx ends; then it closes the
// socket and returns nil. It also returns when readable fails.
func (e *Ended) Wait(ctx context.Context, readable func() error) error {
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { e.Close(); close(closed) })
	var failed error
	err := e.conn.Raw().Read(func(uintptr) bool {
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
	for {
		messages, err := e.conn.Receive(false)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return lost, nil
		case errors.Is(err, ErrLost):
			lost++
		case err != nil:
			return lost, fmt.Errorf("receive notifications of connection tracking: %w", err)
		}
		for m := range Messages(messages) {
			_, attrs := m.Netfilter()
			if flow, ok := parseFlow(attrs); ok {
				ended(&flow)
			}
		}
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
