package iptables

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
)

// ended implements watcher. The kernel's notification of a deleted rule has the last value of
// its counter, so no connection is lost when a chain is written again.
func (w *nftWatcher) ended() (e endings) {
	e.counters, e.lost = w.endedCounters, w.endedLost
	w.endedCounters, w.endedLost = nil, false
	return e
}

// end records the counter of a deleted rule.
func (w *nftWatcher) end(typ uint16, attrs []byte) {
	if !w.counting || typ != unix.NFT_MSG_DELRULE {
		return
	}
	if c, ok := w.counter(attrs); ok {
		w.current.ended = append(w.current.ended, c)
	}
}

// counters implements watcher. It reads again if another program deletes rules meanwhile, so that
// the values are of rules that exist.
func (w *nftWatcher) counters(ctx context.Context, _ func(counterKey) uint64) (values counterValues, err error) {
	for range readAttempts {
		if err := w.drain(); err != nil {
			return nil, err
		}
		before := len(w.endedCounters)
		if values, err = w.readCounters(); err != nil {
			return nil, err
		}
		if err := errors.Join(ctx.Err(), w.drain()); err != nil {
			return nil, err
		}
		if len(w.endedCounters) == before && !w.overrun {
			break
		}
	}
	return values, nil
}

// drain receives what is in the socket's buffer.
func (w *nftWatcher) drain() error {
	if err := w.receive(false); !errors.Is(err, unix.EAGAIN) {
		return watchError(err)
	}
	return nil
}

func (w *nftWatcher) readCounters() (counterValues, error) {
	rules, err := w.request(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated(tableNAT)).Serialize()...)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, err
	}
	values, seen := counterValues{}, map[string]bool{} // while another program writes, a dump may have a rule twice
	for _, m := range rules {
		_, rule := m.Netfilter()
		handle := string(netlinkx.Find(rule, unix.NFTA_RULE_HANDLE))
		if c, ok := w.counter(rule); ok && !seen[handle] {
			seen[handle] = true
			values[c.counterKey] += c.value
		}
	}
	return values, nil
}

// counter returns the counter of a rule that translates to an endpoint; ok is false for others.
func (w *nftWatcher) counter(rule []byte) (c endedCounter, ok bool) {
	if netlinkx.String(netlinkx.Find(rule, unix.NFTA_RULE_TABLE)) != tableNAT {
		return c, false
	}
	chain := netlinkx.String(netlinkx.Find(rule, unix.NFTA_RULE_CHAIN))
	if slices.Contains(builtInChains, chain) || !w.owned(chain) {
		return c, false
	}
	for _, expr := range netlinkx.Attributes(netlinkx.Find(rule, unix.NFTA_RULE_EXPRESSIONS)) {
		data := netlinkx.Find(expr, unix.NFTA_EXPR_DATA)
		switch netlinkx.String(netlinkx.Find(expr, unix.NFTA_EXPR_NAME)) {
		case "counter":
			if packets := netlinkx.Find(data, unix.NFTA_COUNTER_PACKETS); len(packets) == 8 {
				c.value = binary.BigEndian.Uint64(packets)
			}
		case "target":
			if netlinkx.String(netlinkx.Find(data, unix.NFTA_TARGET_NAME)) == dnatTarget {
				revision := netlinkx.Uint32(netlinkx.Find(data, unix.NFTA_TARGET_REV))
				c.endpoint, ok = endpointOf(revision, netlinkx.Find(data, unix.NFTA_TARGET_INFO), w.family == unix.NFPROTO_IPV6)
			}
		}
	}
	c.chain = chain
	return c, ok
}
