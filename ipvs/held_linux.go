package ipvs

import (
	"context"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
)

// rescheduled returns the service ports whose virtual servers get another scheduler. The rules
// hold their new connections meanwhile: a client sends again what is dropped, and gives up
// when it is refused.
func (e *Engine) rescheduled(wanted []wantedPort) (held []*desired.Service) {
	for i := range wanted {
		for key, v := range wanted[i].virtuals {
			if e.table.reschedules(key, v) {
				held = append(held, wanted[i].service)
				break
			}
		}
	}
	return held
}

// holding returns an update that drops new connections to the service ports in held.
func holding(update desired.Update, held []*desired.Service) desired.Update {
	if len(held) == 0 {
		return update
	}
	update.Changes = slices.Clone(update.Changes)
	for i := range update.Changes {
		c := &update.Changes[i]
		if c.After == nil || !slices.Contains(held, c.After) {
			continue
		}
		s := *c.After
		s.Frontends = slices.Clone(s.Frontends)
		for f := range s.Frontends {
			s.Frontends[f].Action, s.Frontends[f].ShortCircuit = desired.Drop, false
		}
		c.After = &s
	}
	return update
}

// releaseHeld accepts new connections again.
func (e *Engine) releaseHeld(ctx context.Context, held []*desired.Service) error {
	if len(held) == 0 {
		return nil
	}
	_, err := e.rules.Apply(ctx, desired.Update{Family: e.family, Globals: e.globals, Changes: desired.ChangesTo(held...)}, e.behind(e.refused))
	return err
}
