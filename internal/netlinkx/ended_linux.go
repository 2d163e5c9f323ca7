package netlinkx

import (
	"context"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

const (
	groupDestroyed = 3 // NFNLGRP_CONNTRACK_DESTROY of linux/netfilter/nfnetlink.h
	// eventBuffer holds some thousand notifications.
	eventBuffer = 4 << 20
)

// WatchEnded calls ended for each conntrack entry that the kernel deletes, until ctx ends; then
// it returns nil. If there are more than it can read, some are lost.
func WatchEnded(ctx context.Context, netNS string, ended func(*Flow)) error {
	ns := netns.None()
	if netNS != "" {
		var err error
		if ns, err = namespace.Open(netNS); err != nil {
			return err
		}
		defer func() { _ = ns.Close() }() // the socket keeps it open
	}
	s, err := nl.SubscribeAt(ns, netns.None(), unix.NETLINK_NETFILTER, groupDestroyed)
	if err != nil {
		return fmt.Errorf("open netlink socket: %w", err)
	}
	if s.SetReceiveBufferSize(eventBuffer, true) != nil {
		_ = s.SetReceiveBufferSize(eventBuffer, false) // or the default
	}
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { s.Close(); close(closed) })
	err = readEnded(ctx, s, ended)
	if stop() {
		s.Close()
	} else {
		<-closed
	}
	return err
}

func readEnded(ctx context.Context, s *nl.NetlinkSocket, ended func(*Flow)) error {
	for {
		messages, _, err := s.Receive()
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // the end of ctx has closed the socket
		case errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("receive ended flows: %w", err)
		}
		for i := range messages {
			data := messages[i].Data
			if len(data) < nl.SizeofNfgenmsg {
				continue
			}
			if flow, ok := parseFlow(data[nl.SizeofNfgenmsg:]); ok {
				ended(&flow)
			}
		}
	}
}
