package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// nftWatcher hears from the kernel what each transaction of nf_tables changes, and who
// commits it.
type nftWatcher struct {
	asks, hears *netlink.Conn
	raw         syscall.RawConn // of hears
	buffer      []byte
	family      uint8
	owned       func(chain string) bool

	// heard is the kernel's count of transactions that we know of, and since what it was
	// at the last look.
	heard, since uint32
	// current is the transaction whose end is not heard yet; ours are those since the
	// last look that changed something of ours.
	current transaction
	ours    []transaction
	// isLost says that the kernel had more to tell than the buffer holds.
	isLost bool
	// newest is the largest handle of a chain in each table; those of new ones are larger.
	newest map[string]uint64
}

// transaction is what a transaction changed of ours, if it did.
type transaction struct {
	damage  proxier.Damage
	process uint32
	newest  map[string]uint64 // of the chains that it made
}

const (
	nfgenHeaderLen = 4 // struct nfgenmsg
	// hearBuffer holds the notifications about some ten thousand rules.
	hearBuffer     = 16 << 20
	largestMessage = 64 << 10
)

// newNFTWatcher listens in a network namespace, as in namespace.Visit.
func newNFTWatcher(family v1.IPFamily, netNS string, owned func(chain string) bool) (w *nftWatcher, err error) {
	w = &nftWatcher{family: unix.NFPROTO_IPV4, owned: owned, buffer: make([]byte, largestMessage)}
	if family == v1.IPv6Protocol {
		w.family = unix.NFPROTO_IPV6
	}
	err = namespace.Visit(netNS, func() (err error) {
		if w.asks, err = netlink.Dial(unix.NETLINK_NETFILTER, nil); err == nil {
			w.hears, err = netlink.Dial(unix.NETLINK_NETFILTER, nil)
		}
		return err
	})
	if err == nil {
		err = w.listen()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen to nf_tables: %w", permission(err)), w.close())
	}
	if err := w.learn(); err != nil {
		return nil, errors.Join(err, w.close())
	}
	return w, nil
}

func (w *nftWatcher) listen() (err error) {
	if w.raw, err = w.hears.SyscallConn(); err != nil {
		return err
	}
	err = w.raw.Control(func(fd uintptr) {
		// Without CAP_NET_ADMIN in the initial user namespace the system's limit holds.
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, hearBuffer) != nil {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, hearBuffer)
		}
	})
	filter, filterErr := familyFilter(w.family)
	if err = errors.Join(err, filterErr); err != nil {
		return err
	}
	if err := w.hears.SetBPF(filter); err != nil {
		return err
	}
	return w.hears.JoinGroup(unix.NFNLGRP_NFTABLES)
}

func (w *nftWatcher) close() error {
	var errs []error
	for _, c := range []*netlink.Conn{w.asks, w.hears} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// look implements watcher.
func (w *nftWatcher) look(bool) (*proxier.Damage, error) { return w.wrote(&effect{}) }

// during implements watcher. It reads while the write is under way, as the kernel tells
// about that too.
func (w *nftWatcher) during(write func() error) error {
	done := make(chan error, 1)
	go func() { done <- w.hear(0) }()
	err := write()
	stopErr := w.hears.SetReadDeadline(time.Unix(1, 0))
	if hearErr := <-done; !errors.Is(hearErr, os.ErrDeadlineExceeded) {
		err = errors.Join(err, watchError(hearErr))
	}
	return errors.Join(err, watchError(stopErr), watchError(w.hears.SetReadDeadline(time.Time{})))
}

// wrote implements watcher. Our own transactions are by one process, and change
// something of ours each; as the process may be in another PID namespace than the
// kernel tells, only their number is known.
func (w *nftWatcher) wrote(o *effect) (damage *proxier.Damage, err error) {
	if err := w.hear(unix.MSG_DONTWAIT); !errors.Is(err, unix.EAGAIN) {
		return nil, err
	}
	if w.isLost { // their number tells whether others wrote
		if err := w.learn(); err != nil {
			return nil, err
		}
		if w.heard-w.since != uint32(o.transactions) {
			damage = &proxier.Damage{}
		}
	} else {
		damage = foreign(w.ours, o.transactions)
	}
	w.ours, w.isLost, w.since = w.ours[:0], false, w.heard
	return damage, nil
}

// foreign finds damage in transactions of which some are our own.
func foreign(all []transaction, own int) *proxier.Damage {
	by := map[uint32]int{}
	for _, t := range all {
		by[t.process]++
	}
	if len(all) == own && len(by) <= 1 {
		return nil
	}
	for _, t := range all {
		if by[t.process] != own {
			return &t.damage
		}
	}
	return &proxier.Damage{} // there is no telling which are ours
}

// hear reads until there is nothing to read, or without flags until the deadline. It
// returns unix.EAGAIN or os.ErrDeadlineExceeded then.
func (w *nftWatcher) hear(flags int) error {
	for {
		var n int
		var got error
		err := w.raw.Read(func(fd uintptr) bool {
			n, _, got = unix.Recvfrom(int(fd), w.buffer, unix.MSG_DONTWAIT|unix.MSG_TRUNC)
			return flags&unix.MSG_DONTWAIT != 0 || !errors.Is(got, unix.EAGAIN)
		})
		switch {
		case err != nil:
			return err
		case errors.Is(got, unix.ENOBUFS) || got == nil && n > len(w.buffer):
			w.isLost = true
			w.current = transaction{}
		case errors.Is(got, unix.EINTR):
		case got != nil:
			return got
		default:
			if err := w.take(w.buffer[:n]); err != nil {
				return err
			}
		}
	}
}

// take reads notifications, of one or more transactions. The last one of each says who
// committed it.
func (w *nftWatcher) take(notifications []byte) error {
	messages, err := syscall.ParseNetlinkMessage(notifications)
	if err != nil {
		return fmt.Errorf("parse notifications of nf_tables: %w", err)
	}
	for _, m := range messages {
		if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(m.Data) < nfgenHeaderLen {
			continue
		}
		attrs := m.Data[nfgenHeaderLen:]
		if typ := m.Header.Type & 0xff; typ == unix.NFT_MSG_NEWGEN {
			w.commit(attrs)
		} else if m.Data[0] == w.family {
			w.change(typ, attrs)
		}
	}
	return nil
}

// commit ends a transaction.
func (w *nftWatcher) commit(attrs []byte) {
	c := w.current
	w.current = transaction{}
	w.heard = netlinkx.Uint32(netlinkx.Find(attrs, unix.NFTA_GEN_ID))
	for table, handle := range c.newest {
		w.newest[table] = max(w.newest[table], handle)
	}
	if c.damage.Object != "" {
		c.process = netlinkx.Uint32(netlinkx.Find(attrs, unix.NFTA_GEN_PROC_PID))
		c.damage.By = netlinkx.Author(attrs)
		w.ours = append(w.ours, c)
	}
}

// change notes a change of ours: of a chain or its rules, and of a rule of a chain of the
// kernel that jumps to one. Attributes 1 are the tables in all of these.
func (w *nftWatcher) change(typ uint16, attrs []byte) {
	table := netlinkx.String(netlinkx.Find(attrs, unix.NFTA_CHAIN_TABLE))
	if table != tableNAT && table != tableFilter {
		return
	}
	what := ""
	switch typ {
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		chain := netlinkx.String(netlinkx.Find(attrs, unix.NFTA_CHAIN_NAME))
		if typ == unix.NFT_MSG_NEWCHAIN && w.isRenamed(table, attrs) || w.owned(chain) {
			what = "chain " + chain
		}
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		chain := netlinkx.String(netlinkx.Find(attrs, unix.NFTA_RULE_CHAIN))
		if w.owned(chain) || slices.Contains(builtIn(), chain) && w.jumps(attrs) {
			what = "rules in chain " + chain
		}
	}
	if what != "" && w.current.damage.Object == "" {
		w.current.damage.Object = what + " of table " + w.program() + " " + table
	}
}

// isRenamed says whether a chain is older than the transaction that tells of it, so that
// it was perhaps ours. The kernel's cannot be renamed.
func (w *nftWatcher) isRenamed(table string, attrs []byte) bool {
	handle := handleOf(attrs)
	if w.current.newest == nil {
		w.current.newest = map[string]uint64{}
	}
	w.current.newest[table] = max(w.current.newest[table], handle)
	return handle <= w.newest[table] && netlinkx.Find(attrs, unix.NFTA_CHAIN_HOOK) == nil
}

func handleOf(chain []byte) uint64 {
	if h := netlinkx.Find(chain, unix.NFTA_CHAIN_HANDLE); len(h) == 8 {
		return binary.BigEndian.Uint64(h)
	}
	return 0
}

// jumps says whether a rule leads to a chain of ours.
func (w *nftWatcher) jumps(attrs []byte) bool {
	for _, expr := range netlinkx.Attributes(netlinkx.Find(attrs, unix.NFTA_RULE_EXPRESSIONS)) {
		verdict := netlinkx.Find(expr, unix.NFTA_EXPR_DATA, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT)
		if w.owned(netlinkx.String(netlinkx.Find(verdict, unix.NFTA_VERDICT_CHAIN))) {
			return true
		}
	}
	return false
}

func (w *nftWatcher) program() string {
	if w.family == unix.NFPROTO_IPV6 {
		return "ip6"
	}
	return "ip"
}

// learn asks for what the notifications have not told.
func (w *nftWatcher) learn() error {
	generation, err := w.execute(unix.NFT_MSG_GETGEN, netlink.Request)
	if err != nil {
		return err
	}
	chains, err := w.execute(unix.NFT_MSG_GETCHAIN, netlink.Request|netlink.Dump)
	if err != nil {
		return err
	}
	w.newest = map[string]uint64{}
	for _, m := range generation {
		w.heard = netlinkx.Uint32(netlinkx.Find(m.Data[min(nfgenHeaderLen, len(m.Data)):], unix.NFTA_GEN_ID))
	}
	for _, m := range chains {
		attrs := m.Data[min(nfgenHeaderLen, len(m.Data)):]
		table := netlinkx.String(netlinkx.Find(attrs, unix.NFTA_CHAIN_TABLE))
		w.newest[table] = max(w.newest[table], handleOf(attrs))
	}
	return nil
}

func (w *nftWatcher) execute(typ uint16, flags netlink.HeaderFlags) ([]netlink.Message, error) {
	messages, err := w.asks.Execute(netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | typ), Flags: flags},
		Data:   []byte{w.family, unix.NFNETLINK_V0, 0, 0},
	})
	if err != nil {
		return nil, fmt.Errorf("list chains of nf_tables: %w", permission(err))
	}
	return messages, nil
}

func permission(err error) error {
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: %w: run with CAP_NET_ADMIN in the network namespace", proxier.ErrPermission, err)
	}
	return err
}
