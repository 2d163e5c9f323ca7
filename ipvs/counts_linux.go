package ipvs

import (
	"context"

	"github.com/serviceplane/serviceplane/internal/counting"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// Counts is for proxier.Abilities.
func (e *engine) Counts(ctx context.Context) (connection.Counts, error) {
	if e.totals == nil {
		return connection.Counts{}, counting.ErrOff
	}
	e.mu.Lock()
	began, programmed := e.totals.ledger.Clock(), e.table != nil
	e.mu.Unlock()
	var all map[serverKey]*virtual
	if programmed {
		k, err := e.system.kernel() // of its own, so that no sync waits
		if err != nil {
			return connection.Counts{}, err
		}
		defer k.Close()
		if all, err = k.List(); err != nil {
			return connection.Counts{}, err
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return connection.Counts{}, err
	}
	for key, v := range all {
		if e.table != nil && e.table.virtuals[key] != nil {
			e.totals.add(key, v.loads, began)
		}
	}
	return e.totals.ledger.Counts(), nil
}
