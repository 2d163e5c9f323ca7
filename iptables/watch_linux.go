package iptables

import (
	"context"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/proxier"
)

// watchPeriod is how often Watch checks the tables.
const watchPeriod = time.Second

// Watch is for proxier.Abilities. It checks the tables every second and after each
// write. Only the nft variant can report who changed what.
func (e *engine) Watch(ctx context.Context, damaged func(proxier.Damage)) error {
	tick := time.NewTicker(e.watchPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-e.written:
		}
		damage, err := e.checkTables(ctx)
		if damage != nil {
			damaged(*damage)
		}
		if err != nil {
			return err
		}
	}
}

// checkTables returns damage by another program, once for each write. It returns nil
// while a write is in progress, because the write itself checks.
func (e *engine) checkTables(ctx context.Context) (*proxier.Damage, error) {
	if !e.mu.TryLock() {
		return nil, nil
	}
	defer e.mu.Unlock()
	if !e.trusted || e.guard.reported { // the next write is a full one
		return e.guard.report(), nil
	}
	intact, err := e.guard.check(false)
	if err == nil && intact {
		_, err = e.confirm(ctx)
	}
	return e.guard.report(), err
}

// confirmation is what a watcher cannot know by itself. The kernel gives no text of the
// entries of the legacy variant, so nobody knows the hash of a new rule: what another program
// makes of it, before the entries are read after its first write, looks like the rule itself.
type confirmation struct {
	needed bool // there are new rules since the last one
	at     time.Time
	took   time.Duration
}

// isDue is false for so long that confirmations take at most one part in readShare of the
// time.
func (c *confirmation) isDue() bool { return c.needed && time.Since(c.at) > readShare*c.took }

// confirm compares the text of the tables with what the engine has written. It returns false
// if another program has changed them. Without an answer the next call tries again.
func (e *engine) confirm(ctx context.Context) (intact bool, err error) {
	w, ok := e.guard.watcher.(*legacyWatcher)
	if !ok || !w.confirmation.isDue() {
		return true, nil
	}
	if intact, err := e.guard.check(true); err != nil || !intact {
		return intact, err
	}
	began := time.Now()
	for _, table := range []string{tableNAT, tableFilter} {
		have, err := observe(ctx, e.kernel, table, e.model.names)
		if err != nil {
			e.log.Warn("tables are not compared with the kernel after a write, will be retried", zap.Error(err))
			w.confirmation.at, w.confirmation.took = time.Now(), time.Since(began)
			return true, nil
		}
		if !e.isAsLeft(table, e.have[table], &have) {
			e.guard.record(&proxier.Damage{})
			clear(w.hashes)
			return false, nil
		}
	}
	w.confirmation = confirmation{at: time.Now(), took: time.Since(began)}
	return e.guard.check(true) // nobody changed them meanwhile
}

// isAsLeft reports whether a table has the chains that the engine has left there, and the jumps
// to them.
func (e *engine) isAsLeft(table string, left ruleset, now *observed) bool {
	deletes, inserts, _ := repairJumps(e.model.jumps()[table], now.jumps)
	return len(deletes)+len(inserts) == 0 && maps.EqualFunc(now.chains, left, slices.Equal[[]rule])
}
