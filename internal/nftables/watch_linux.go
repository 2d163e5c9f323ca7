package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/proxier"
)

// Watch is for proxier.Abilities. It also keeps the devices of the fast path, and reads the table for the first full update.
func (e *Engine) Watch(ctx context.Context, damaged func(proxier.Damage)) error {
	if !e.asksForFastPath() {
		return e.watchTable(ctx, damaged)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var links error
	var done sync.WaitGroup
	done.Go(func() {
		defer cancel()
		links = e.watchLinks(ctx)
	})
	table := e.watchTable(ctx, damaged)
	cancel()
	done.Wait()
	return errors.Join(table, links)
}

func (e *Engine) watchTable(ctx context.Context, damaged func(proxier.Damage)) error {
	s, err := netlinkx.Dial(e.config.NetNS, unix.NETLINK_NETFILTER, nft.ReceiveBuffer)
	if err != nil {
		return nft.Unreachable(err)
	}
	l := &listener{
		socket: s, listeners: e.listeners,
		family: e.batch.Family, table: e.config.Names.Table, damaged: damaged, doubts: make(chan struct{}, 1),
	}
	stop := context.AfterFunc(ctx, func() {
		_ = s.SetReadDeadline(time.Unix(1, 0)) // fails only if the socket is closed already
	})
	checking, end := context.WithCancel(ctx)
	var checks sync.WaitGroup
	checks.Go(func() { e.answer(checking, l) })
	if complete := e.readAhead(checking); complete != nil {
		checks.Go(complete)
	}
	err = e.listeners.add(l)
	if err == nil {
		err = l.listen(ctx)
	}
	stop()
	end()
	checks.Wait()
	err = errors.Join(err, e.listeners.remove(l))
	select {
	case <-ctx.Done():
		return nil
	default:
		return err
	}
}

// listener receives notifications of changes of one table by other programs.
type listener struct {
	socket    *netlinkx.Conn
	listeners *listeners
	family    uint8
	table     string
	damaged   func(proxier.Damage)
	doubts    chan struct{} // another program may have changed the table unnoticed
	reports   atomic.Uint64 // of damage
	// pending are the changes of the current transaction.
	pending []proxier.Damage
	// received counts the notifications since a time, at most a second ago.
	received int
	since    time.Time
	// pause is the length of the last pause, which ended at pauseEnd.
	pause    time.Duration
	pauseEnd time.Time
}

const (
	shortestPause = time.Second
	longestPause  = time.Minute
	// maxRate is the number of notifications a second from which the listener pauses.
	maxRate = 10000
)

// listen reads until ctx ends or reading fails.
func (l *listener) listen(ctx context.Context) error {
	for {
		notifications, err := l.socket.Receive(true)
		switch {
		case err == nil:
			if l.receive(notifications) > maxRate {
				err = l.stepAside(ctx)
			}
			if err != nil {
				return err
			}
		case ctx.Err() != nil, errors.Is(err, os.ErrDeadlineExceeded):
			return ctx.Err()
		case errors.Is(err, netlinkx.ErrLost):
			if err := l.stepAside(ctx); err != nil {
				return err
			}
		default:
			return nft.Failed("receive", "changes of nf_tables", err)
		}
	}
}

// receive searches the notifications of one or more transactions for our table. The last
// notification of each transaction names its program. It returns the number of
// notifications in the last second or less.
func (l *listener) receive(notifications []byte) (rate int) {
	if time.Since(l.since) > time.Second {
		l.received, l.since = 0, time.Now()
	}
	for m := range netlinkx.Messages(notifications) {
		l.received++
		if m.Type>>8 != unix.NFNL_SUBSYS_NFTABLES {
			continue
		}
		kind := m.Type & 0xff
		family, attrs := m.Netfilter()
		if kind == unix.NFT_MSG_NEWGEN {
			l.report(netlinkx.Author(attrs))
			continue
		}
		if family == l.family && netlinkx.String(netlinkx.Find(attrs, unix.NFTA_TABLE_NAME)) == l.table && len(l.pending) == 0 {
			l.pending = append(l.pending, proxier.Damage{Object: objectOf(kind, attrs) + l.inTable()})
		}
	}
	return l.received
}

func (l *listener) inTable() string {
	if l.family == unix.NFPROTO_IPV6 {
		return " of table ip6 " + l.table
	}
	return " of table ip " + l.table
}

// report reports the changes of the transaction that just ended.
func (l *listener) report(by string) {
	for _, d := range l.pending {
		d.By = by
		l.reports.Add(1)
		l.damaged(d)
	}
	l.pending = l.pending[:0]
}

// objectOf names the object of a notification of a kind, NFT_MSG_*. The numbers of attributes depend on the kind
// of object, but attribute 1 is always the table.
func objectOf(kind uint16, attrs []byte) string {
	switch kind {
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		return "chain " + netlinkx.String(netlinkx.Find(attrs, unix.NFTA_CHAIN_NAME))
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		return "rules in chain " + netlinkx.String(netlinkx.Find(attrs, unix.NFTA_RULE_CHAIN))
	case unix.NFT_MSG_NEWSET, unix.NFT_MSG_DELSET:
		return "set " + netlinkx.String(netlinkx.Find(attrs, unix.NFTA_SET_NAME))
	case unix.NFT_MSG_NEWFLOWTABLE, unix.NFT_MSG_DELFLOWTABLE:
		return "flowtable " + netlinkx.String(netlinkx.Find(attrs, nft.FlowtableName))
	case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
		return "elements of set " + netlinkx.String(netlinkx.Find(attrs, unix.NFTA_SET_ELEM_LIST_SET))
	default:
		return "all"
	}
}

// stepAside leaves the multicast group for a while: another program writes so much that
// notifications may be lost, and a listener slows each of its writes down. Its changes
// meanwhile are unknown.
func (l *listener) stepAside(ctx context.Context) error {
	if time.Since(l.pauseEnd) > longestPause {
		l.pause = 0
	}
	l.pause = min(max(2*l.pause, shortestPause), longestPause)
	if err := l.leave(); err != nil {
		return err
	}
	select {
	case <-time.After(l.pause):
	case <-ctx.Done():
		return nil
	}
	l.pauseEnd = time.Now()
	l.pending = nil
	return l.listeners.add(l)
}

func (l *listener) doubt() {
	select {
	case l.doubts <- struct{}{}:
	default:
	}
}

func (l *listener) join() error {
	if err := l.socket.Join(unix.NFNLGRP_NFTABLES); err != nil {
		return nft.Failed("listen", "to changes of nf_tables", err)
	}
	return nil
}

func (l *listener) leave() error {
	if err := l.socket.Leave(unix.NFNLGRP_NFTABLES); err != nil {
		return nft.Failed("stop listening", "to changes of nf_tables", err)
	}
	return nil
}

// ignore makes the kernel drop the notifications about transactions of these sockets. The
// header of a notification has the port of the socket that caused it at offset 12 (struct
// nlmsghdr of linux/netlink.h).
func (l *listener) ignore(ports map[writer]uint32) error {
	program := []bpf.Instruction{bpf.LoadAbsolute{Off: 12, Size: 4}}
	for _, port := range ports {
		// The load is in network byte order, the port in the machine's.
		value := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, port))
		program = append(program,
			bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: value, SkipTrue: 1},
			bpf.RetConstant{Val: 0})
	}
	if err := l.socket.Filter(append(program, bpf.RetConstant{Val: ^uint32(0)})); err != nil {
		return fmt.Errorf("filter own changes of nf_tables: %w", err)
	}
	return nil
}
