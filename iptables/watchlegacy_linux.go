package iptables

import (
	"maps"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// legacyWatcher compares the chains with what they were. The kernel says at once whether
// a table has other entries or another size; for the rest, all entries must be read.
type legacyWatcher struct {
	tables *legacyTables
	owned  func(chain string) bool
	known  digests
	infos  map[string]tableInfo
	// learned is the hash of each rule that was written before: so what somebody else
	// does to a chain that we have written just now is seen too. Of a rule that is new,
	// it must be believed.
	learned map[rule]uint64
	// readAt is when the entries were read last, took how long that took.
	readAt time.Time
	took   time.Duration
}

// readShare is which part of the time reading may take where nothing seems to change.
const readShare = 20

func newLegacyWatcher(family v1.IPFamily, netNS string, owned func(chain string) bool) (*legacyWatcher, error) {
	tables, err := openLegacyTables(family, netNS)
	return &legacyWatcher{tables: tables, owned: owned, learned: map[rule]uint64{}}, err
}

// look implements watcher.
func (w *legacyWatcher) look(everything bool) (*proxier.Damage, error) {
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
	was, err := w.read()
	if err != nil || was.equal(w.known) {
		return nil, err
	}
	return &proxier.Damage{}, nil
}

func (d digests) equal(o digests) bool { return maps.EqualFunc(d, o, slices.Equal[[]uint64]) }

// during implements watcher.
func (w *legacyWatcher) during(write func() error) error { return write() }

// wrote implements watcher.
func (w *legacyWatcher) wrote(o *effect) (*proxier.Damage, error) {
	was, err := w.read()
	if err != nil {
		return nil, err
	}
	for id, rules := range o.written {
		now, exists := w.known[id]
		if exists != (rules != nil) {
			return &proxier.Damage{}, nil
		}
		delete(was, id)
		if exists {
			was[id] = now
		}
	}
	if !was.equal(w.known) || !w.learn(o) {
		return &proxier.Damage{}, nil
	}
	return nil, nil
}

// mostLearned is how many rules more are learned than twice those that there are.
const mostLearned = 1000

// learn takes over the hashes of what was written, or now and then of all rules, to forget
// those that are gone. It says whether they are those that were learned before.
func (w *legacyWatcher) learn(o *effect) bool {
	rules := o.written
	isAnew := o.isFull || len(w.learned) > mostLearned+2*(o.have[tableNAT].count()+o.have[tableFilter].count())
	if isAnew {
		rules = o.everything()
	}
	for id, rules := range rules {
		if !w.are(w.known[id], rules) {
			return false
		}
	}
	if isAnew {
		w.learned = map[rule]uint64{}
	}
	for id, rules := range rules {
		for i, r := range rules {
			w.learned[r] = w.known[id][i]
		}
	}
	return true
}

// are says whether hashes are those of some rules, as far as these were learned.
func (w *legacyWatcher) are(hashes []uint64, rules []rule) bool {
	if len(hashes) != len(rules) {
		return false
	}
	for i, r := range rules {
		if learned, ok := w.learned[r]; ok && learned != hashes[i] {
			return false
		}
	}
	return true
}

// read brings what is known up to date, and returns what it was.
func (w *legacyWatcher) read() (was digests, err error) {
	began := time.Now()
	known, infos := make(digests, len(w.known)), map[string]tableInfo{}
	for _, table := range []string{tableNAT, tableFilter} {
		if infos[table], err = w.tables.digest(table, w.owned, known); err != nil {
			return nil, err
		}
	}
	was = w.known
	w.known, w.infos, w.readAt = known, infos, time.Now()
	w.took = w.readAt.Sub(began)
	return was, nil
}

func (w *legacyWatcher) close() error { return w.tables.close() }
