package netlinkx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/pause"
)

// Routing returns the handle for single changes. Lists must be repeated if they are interrupted: see LinkList.
func (s *Socket) Routing() *netlink.Handle { return s.routing }

// LinkList lists all links.
func LinkList(s *Socket) (links []netlink.Link, err error) {
	err = Retry(func() error {
		links, err = s.routing.LinkList() //nolint:forbidigo // retried here
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	return links, nil
}

// FilterList lists the filters of a link at a parent.
func FilterList(s *Socket, link netlink.Link, parent uint32) (filters []netlink.Filter, err error) {
	err = Retry(func() error {
		filters, err = s.routing.FilterList(link, parent)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list filters: %w", err)
	}
	return filters, nil
}

// linkBurst is how long changes of links are collected.
const linkBurst = 20 * time.Millisecond

// WatchLinks calls changed when it begins, and soon after links change, until ctx ends; then it returns nil.
// It also returns when changed fails.
func WatchLinks(ctx context.Context, netNS string, changed func() error) (err error) {
	const room = 1 << 20
	links, err := Listen(netNS, unix.NETLINK_ROUTE, room, unix.RTNLGRP_LINK)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, links.Close()) }()
	stop := context.AfterFunc(ctx, func() { _ = links.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	for ctx.Err() == nil {
		err := changed()
		if err == nil {
			err = links.nextBurst(ctx)
		}
		if err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// nextBurst waits for notifications, and drops them with all that come soon after.
func (c *Conn) nextBurst(ctx context.Context) error {
	_, err := c.Receive(true)
	for pause.For(ctx, linkBurst); err == nil || errors.Is(err, ErrLost); {
		_, err = c.Receive(false)
	}
	if errors.Is(err, unix.EAGAIN) {
		return nil
	}
	return fmt.Errorf("receive changes of links: %w", err)
}
