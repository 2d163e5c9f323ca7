package history

import (
	"context"
	"errors"
	"fmt"
)

// changeMode ends the process, and starts that of another engine. Its objects and those of the
// old engine are there together, until the latter are removed: at once if Late, or otherwise
// at the next Converge.
func (r *run) changeMode(ctx context.Context, s *Event) error {
	plane, ok := r.plane.(modes)
	if !ok {
		return nil
	}
	if err := r.end(); err != nil {
		return err
	}
	plane.SetMode(s.Damage)
	if fresh, ok := r.fresh.(modes); ok {
		fresh.SetMode(s.Damage)
	}
	r.mixed = true
	if err := r.start(ctx); err != nil || !s.Late {
		return err
	}
	return r.unmix(ctx)
}

// unmix removes what other engines have programmed, after a sync.
func (r *run) unmix(ctx context.Context) error {
	plane, ok := r.plane.(modes)
	if !ok || !r.mixed {
		return nil
	}
	if err := r.soonNil(func() error { return r.life.Sync(ctx) }); err != nil {
		return fmt.Errorf("the first sync of an engine after another: %w", err)
	}
	err := r.whenFree(func() error { return plane.CleanOthers(ctx) })
	r.mixed = err != nil
	return errors.Join(err)
}
