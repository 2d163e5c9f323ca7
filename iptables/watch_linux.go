package iptables

import (
	"context"
	"time"

	"github.com/serviceplane/serviceplane/proxier"
)

// watchPeriod is how often Watch checks the tables.
const watchPeriod = time.Second

// Watch is for proxier.Abilities. It checks the tables every second and after each
// write. Only the nft variant can report who changed what.
func (e *Engine) Watch(ctx context.Context, damaged func(proxier.Damage)) error {
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
func (e *Engine) checkTables(ctx context.Context) (*proxier.Damage, error) {
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
