package nftrace

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/canary"
	"github.com/serviceplane/serviceplane/internal/namespace"
)

const (
	// traceGroup is NFNLGRP_NFTRACE of linux/netfilter/nfnetlink.h.
	traceGroup = 9
	// drainTime is for how long events are read after a connection has failed.
	drainTime = 100 * time.Millisecond
	// maxEvents bounds the events that are read if another program traces too.
	maxEvents = 10000
)

// Explain returns a function for canary.Options.Explain. netNS is canary.Options.NetNS.
//
// While the function runs there is a table "canary-…" with two chains, for the packets of this
// connection only. The kernel deletes the table with the socket that made it, also if the
// program crashes. Without the privilege CAP_NET_ADMIN, and before Linux 5.12, the function
// knows nothing.
func Explain(netNS string) func(ctx context.Context, probe canary.Probe, connect func(context.Context) error) string {
	return func(ctx context.Context, probe canary.Probe, connect func(context.Context) error) string {
		text, err := explain(ctx, netNS, probe, connect)
		if err != nil {
			return ""
		}
		return text
	}
}

func explain(ctx context.Context, netNS string, probe canary.Probe, connect func(context.Context) error) (text string, err error) {
	listener, err := open(netNS)
	if err != nil {
		return "", err
	}
	defer func() { _ = listener.Close() }()
	if err := listener.JoinGroup(traceGroup); err != nil {
		return "", fmt.Errorf("listen to traces: %w", err)
	}
	owner, err := open(netNS)
	if err != nil {
		return "", err
	}
	defer func() { _ = owner.Close() }() // deletes the table
	t := &traced{Probe: probe, table: "canary-" + rand.Text(), ids: map[uint32]bool{}}
	if err := t.install(owner); err != nil {
		return "", err
	}
	if connect(ctx) == nil {
		return "", nil
	}
	if err := listener.SetReadDeadline(time.Now().Add(drainTime)); err != nil {
		return "", fmt.Errorf("read traces: %w", err)
	}
	for range maxEvents {
		messages, err := listener.Receive()
		if err != nil {
			break // all are read
		}
		for _, m := range messages {
			if e, err := parse(m); err == nil && t.stops(e) {
				return e.String(), nil
			}
		}
	}
	return t.text(), nil
}

// open opens a netlink socket in a network namespace.
func open(netNS string) (conn *netlink.Conn, err error) {
	err = namespace.Visit(netNS, func() error {
		conn, err = netlink.Dial(unix.NETLINK_NETFILTER, nil)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	return conn, nil
}

// traced is the connection whose packets are traced.
type traced struct {
	canary.Probe

	table string
	ids   map[uint32]bool // of its packets
	// untranslated means that a packet has left for the VIP itself.
	untranslated bool
}

// stops reports whether an event ends the way of one of the packets.
func (t *traced) stops(e event) bool {
	vip, endpoint := t.VIP.Addr(), t.Endpoint.Addr()
	if e.destination == vip || e.destination == endpoint || e.source == endpoint {
		t.ids[e.id] = true
	}
	if e.table == t.table && e.chain == chainPostrouting && e.destination == vip {
		t.untranslated = true
	}
	return t.ids[e.id] && e.drops
}

func (t *traced) text() string {
	if t.untranslated {
		return "no rule translates the VIP: the proxy's rules are gone or incomplete"
	}
	return ""
}

// install creates the table in one transaction.
func (t *traced) install(conn *netlink.Conn) error {
	messages, err := t.messages()
	if err != nil {
		return err
	}
	if _, err := conn.SendMessages(messages); err != nil {
		return fmt.Errorf("create table %s: %w", t.table, err)
	}
	answers, err := conn.Receive() // of the first message that asks for one, or an error
	if err == nil && len(answers) == 0 {
		err = errors.New("no answer")
	}
	if err != nil {
		return fmt.Errorf("create table %s: %w", t.table, err)
	}
	return nil
}
