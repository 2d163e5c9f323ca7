package iptables

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// nftWatcher receives notifications of what each transaction of nf_tables changes, and
// which process commits it.
type nftWatcher struct {
	requests, events *netlinkx.Conn
	family           uint8
	owned            func(chain string) bool

	// generation is the last known generation ID, which counts transactions; checked is
	// its value at the last check.
	generation, checked uint32
	// current is the transaction that has not been committed yet; pending are the
	// transactions since the last check that changed chains of the instance.
	current transaction
	pending []transaction
	// overrun means that the socket's buffer was full, so that notifications are missing.
	overrun bool
	// newest is the largest handle of a chain in each table; new chains get larger ones.
	newest map[string]uint64
	// counting means that deleted rules are looked at: what they had counted; endedLost means
	// that notifications of some are missing.
	counting      bool
	endedCounters []endedCounter
	endedLost     bool
}

// transaction is what a transaction changes.
type transaction struct {
	damage  proxier.Damage // its Object is "" if no chain of the instance changes
	process uint32
	newest  map[string]uint64 // of the chains that it creates or renames
	ended   []endedCounter    // of the rules that it deletes
}

// eventRoom holds the notifications about some ten thousand rules, answerRoom the answers that the kernel
// gives at once.
const eventRoom, answerRoom = 16 << 20, 1 << 20

// newNFTWatcher listens in the network namespace.
func newNFTWatcher(c toolConfig, owned func(chain string) bool) (w *nftWatcher, err error) {
	w = &nftWatcher{family: unix.NFPROTO_IPV4, owned: owned, counting: c.counting}
	if c.family == v1.IPv6Protocol {
		w.family = unix.NFPROTO_IPV6
	}
	if w.requests, err = netlinkx.Dial(c.netNS, unix.NETLINK_NETFILTER, answerRoom); err == nil {
		err = w.subscribe(c.netNS)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("subscribe to nf_tables: %w", netlinkx.Denied(err)), w.close())
	}
	if err := w.resync(); err != nil {
		return nil, errors.Join(err, w.close())
	}
	return w, nil
}

func (w *nftWatcher) subscribe(netNS string) (err error) {
	if w.events, err = netlinkx.Dial(netNS, unix.NETLINK_NETFILTER, eventRoom); err != nil {
		return err
	}
	return cmp.Or(w.events.Filter(familyFilter(w.family)), w.events.Join(unix.NFNLGRP_NFTABLES))
}

func (w *nftWatcher) close() error {
	var errs []error
	for _, c := range []*netlinkx.Conn{w.requests, w.events} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// check implements watcher.
func (w *nftWatcher) check(bool) (*proxier.Damage, error) { return w.wrote(&effect{}) }

// during implements watcher. It receives during the write, whose own notifications would
// fill the buffer.
func (w *nftWatcher) during(_ map[chainID]bool, write func() error) error {
	done := make(chan error, 1)
	go func() { done <- w.receive(true) }()
	err := write()
	stopErr := w.events.SetReadDeadline(time.Unix(1, 0))
	if receiveErr := <-done; !errors.Is(receiveErr, os.ErrDeadlineExceeded) {
		err = errors.Join(err, watchError(receiveErr))
	}
	return errors.Join(err, watchError(stopErr), watchError(w.events.SetReadDeadline(time.Time{})))
}

// wrote implements watcher. The engine's own transactions are all by one process, and each
// changes a chain of the instance. The number of that process is unknown, because it may
// be in another PID namespace; only the number of transactions is known.
func (w *nftWatcher) wrote(o *effect) (damage *proxier.Damage, err error) {
	if err := w.receive(false); !errors.Is(err, unix.EAGAIN) {
		return nil, err
	}
	if w.overrun { // only the number of transactions is known
		if err := w.resync(); err != nil {
			return nil, err
		}
		if w.generation-w.checked != uint32(o.transactions) {
			damage = &proxier.Damage{}
		}
	} else {
		damage = foreignDamage(w.pending, o.transactions)
	}
	w.pending, w.overrun, w.checked = w.pending[:0], false, w.generation
	return damage, nil
}

// foreignDamage finds damage by other programs in transactions of which own are the
// engine's.
func foreignDamage(all []transaction, own int) *proxier.Damage {
	byProcess := map[uint32]int{}
	for _, t := range all {
		byProcess[t.process]++
	}
	if len(all) == own && len(byProcess) <= 1 {
		return nil
	}
	for _, t := range all {
		if byProcess[t.process] != own {
			return &t.damage
		}
	}
	return &proxier.Damage{} // which process is the engine's is unknown
}

// receive handles notifications until none is left, or waits for more until the deadline.
// Then it returns unix.EAGAIN or os.ErrDeadlineExceeded.
func (w *nftWatcher) receive(wait bool) error {
	for {
		notifications, err := w.events.Receive(wait)
		switch {
		case errors.Is(err, netlinkx.ErrLost):
			w.overrun, w.endedLost = true, w.counting
			w.current = transaction{}
		case err != nil:
			return err
		}
		w.handle(notifications)
	}
}

// handle handles the notifications of one or more transactions. The last one of each names
// the process.
func (w *nftWatcher) handle(notifications []byte) {
	for m := range netlinkx.Messages(notifications) {
		if m.Type>>8 != unix.NFNL_SUBSYS_NFTABLES {
			continue
		}
		family, attrs := m.Netfilter()
		if typ := m.Type & 0xff; typ == unix.NFT_MSG_NEWGEN {
			w.commit(attrs)
		} else if family == w.family {
			w.change(typ, attrs)
		}
	}
}

// commit ends a transaction.
func (w *nftWatcher) commit(attrs []byte) {
	t := w.current
	w.current = transaction{}
	w.generation = netlinkx.Uint32(netlinkx.Find(attrs, unix.NFTA_GEN_ID))
	w.endedCounters = append(w.endedCounters, t.ended...)
	for table, handle := range t.newest {
		w.newest[table] = max(w.newest[table], handle)
	}
	if t.damage.Object != "" {
		t.process = netlinkx.Uint32(netlinkx.Find(attrs, unix.NFTA_GEN_PROC_PID))
		t.damage.By = netlinkx.Author(attrs)
		w.pending = append(w.pending, t)
	}
}

// change records a change of a chain of the instance or its rules, or of a rule in a
// built-in chain that jumps to one.
func (w *nftWatcher) change(typ uint16, attrs []byte) {
	table := netlinkx.String(netlinkx.Find(attrs, unix.NFTA_CHAIN_TABLE)) // the same as NFTA_RULE_TABLE
	if table != tableNAT && table != tableFilter {
		return
	}
	object := ""
	switch typ {
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		chain := netlinkx.String(netlinkx.Find(attrs, unix.NFTA_CHAIN_NAME))
		if typ == unix.NFT_MSG_NEWCHAIN && w.isRenamed(table, attrs) || w.owned(chain) {
			object = "chain " + chain
		}
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		chain := netlinkx.String(netlinkx.Find(attrs, unix.NFTA_RULE_CHAIN))
		if w.owned(chain) || slices.Contains(builtInChains, chain) && w.jumps(attrs) {
			object = "rules in chain " + chain
		}
		w.end(typ, attrs)
	}
	if object != "" && w.current.damage.Object == "" {
		w.current.damage.Object = object + " of table " + w.program() + " " + table
	}
}

// isRenamed reports whether a chain is older than the transaction, so that it may have had
// a name of the instance. Built-in chains cannot be renamed.
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

// jumps reports whether a rule jumps to a chain of the instance.
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

// resync requests what missing notifications would have reported.
func (w *nftWatcher) resync() error {
	generation, err := w.request(unix.NFT_MSG_GETGEN, 0)
	if err != nil {
		return err
	}
	chains, err := w.request(unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP)
	if err != nil {
		return err
	}
	w.newest = map[string]uint64{}
	for _, m := range generation {
		_, attrs := m.Netfilter()
		w.generation = netlinkx.Uint32(netlinkx.Find(attrs, unix.NFTA_GEN_ID))
	}
	for _, m := range chains {
		_, attrs := m.Netfilter()
		table := netlinkx.String(netlinkx.Find(attrs, unix.NFTA_CHAIN_TABLE))
		w.newest[table] = max(w.newest[table], handleOf(attrs))
	}
	return nil
}

// request returns the answers to a request.
func (w *nftWatcher) request(typ, flags uint16, attrs ...byte) ([]netlinkx.Message, error) {
	answers, err := w.requests.AskAll(netlinkx.Request(unix.NFNL_SUBSYS_NFTABLES<<8|typ, flags, w.family, attrs...))
	if err != nil {
		return nil, fmt.Errorf("read nf_tables: %w", netlinkx.Denied(err))
	}
	return answers, nil
}
