package iptables

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/serviceplane/serviceplane/proxier"
)

// legacyWatcher compares the chains with their last known state. The kernel returns the
// size of a table quickly; to detect any other change, all entries must be read.
type legacyWatcher struct {
	tables *legacyTables
	owned  func(chain string) bool
	last   digests // as read last
	infos  map[string]tableInfo
	// hashes holds the hash of each rule that was written before. So a change by another
	// program to a chain that was just written is detected too. New rules need a confirmation.
	hashes       map[rule]uint64
	confirmation confirmation
	// readAt is when the entries were read last, took how long that took.
	readAt time.Time
	took   time.Duration
	// lock keeps the programs from changing tables; counting means that counters are read before
	// a write.
	lock          func(ctx context.Context, f func() error) error
	counting      bool
	endedCounters []endedCounter
	flushed       map[string]bool // chains of the table nat
}

// readShare limits reading without a visible change to one part in readShare of the time.
const readShare = 20

func newLegacyWatcher(c toolConfig, owned func(chain string) bool) (*legacyWatcher, error) {
	tables, err := openLegacyTables(c.family, c.netNS)
	return &legacyWatcher{tables: tables, owned: owned, hashes: map[rule]uint64{}, lock: c.lock, counting: c.counting}, err
}

// check implements watcher.
func (w *legacyWatcher) check(everything bool) (*proxier.Damage, error) {
	isDue := everything || time.Since(w.readAt) > readShare*w.took
	for _, table := range []string{tableNAT, tableFilter} {
		info, err := w.tables.table(table)
		if err != nil {
			return nil, err
		}
		isDue = isDue || info != w.infos[table]
	}
	if !isDue {
		return nil, nil
	}
	before, err := w.read()
	if err != nil || before.equal(w.last) {
		return nil, err
	}
	return &proxier.Damage{}, nil
}

func (d digests) equal(o digests) bool { return maps.EqualFunc(d, o, slices.Equal[[]uint64]) }

// wrote implements watcher.
func (w *legacyWatcher) wrote(o *effect) (*proxier.Damage, error) {
	before, err := w.read()
	if err != nil {
		return nil, err
	}
	for id, rules := range o.written {
		now, exists := w.last[id]
		if exists != (rules != nil) {
			return &proxier.Damage{}, nil
		}
		if before[id] = now; !exists {
			delete(before, id)
		}
	}
	if !before.equal(w.last) || !w.learn(o) {
		return &proxier.Damage{}, nil
	}
	return nil, nil
}

// maxStaleHashes is how many hashes more than twice the number of rules are kept.
const maxStaleHashes = 1000

// learn stores the hashes of the written rules. To drop those of deleted rules, it
// sometimes stores the hashes of all rules anew. It returns false if a rule has another
// hash than before. Then it forgets all hashes: another program may have changed the rule now
// or then.
func (w *legacyWatcher) learn(o *effect) bool {
	chains := o.written
	all := o.isFull || len(w.hashes) > maxStaleHashes+2*(o.have[tableNAT].count()+o.have[tableFilter].count())
	if all {
		chains = o.allChains()
	}
	for id, rules := range chains {
		if !w.match(w.last[id], rules) {
			clear(w.hashes)
			return false
		}
	}
	known := w.hashes
	if all {
		w.hashes = map[rule]uint64{}
	}
	for id, rules := range chains {
		for i, r := range rules {
			_, isKnown := known[r]
			w.confirmation.needed = w.confirmation.needed || !isKnown
			w.hashes[r] = w.last[id][i]
		}
	}
	return true
}

// match reports whether hashes are those of rules; rules without a stored hash match any.
func (w *legacyWatcher) match(hashes []uint64, rules []rule) bool {
	return slices.EqualFunc(hashes, rules, func(hash uint64, r rule) bool {
		stored, ok := w.hashes[r]
		return !ok || stored == hash
	})
}

// read reads all entries, and returns the previous state.
func (w *legacyWatcher) read() (before digests, err error) {
	began := time.Now()
	now, infos := make(digests, len(w.last)), map[string]tableInfo{}
	for _, table := range []string{tableNAT, tableFilter} {
		if infos[table], err = w.tables.digest(table, w.owned, now); err != nil {
			return nil, err
		}
	}
	before = w.last
	w.last, w.infos, w.readAt = now, infos, time.Now()
	w.took = w.readAt.Sub(began)
	return before, nil
}

func (w *legacyWatcher) close() error { return w.tables.close() }
