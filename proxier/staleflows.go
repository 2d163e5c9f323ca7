package proxier

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
)

// cleanShare is how many times as long as a search for flows takes the next parts of a change leave it to later ones:
// it costs what the kernel tracks, not what is in the part.
const cleanShare = 10

// cleanFlows deletes the flows that may be stale, and finds the connections that must end. If that fails, they stay pending. A
// kernel that does not support it makes a condition, but does not fail the sync.
func (f *family) cleanFlows(ctx context.Context, o *outcome) (deleted int, checked bool, err error) {
	traits, now := f.engine.Traits(nil), time.Now()
	o.unclean = o.more && f.late.failures == 0 && now.Sub(f.cleaned) < cleanShare*f.cleaning && !f.cleanNow.Swap(false)
	if f.unclean.Store(o.unclean); o.unclean {
		return 0, false, nil
	}
	check, ok := f.flows.check(&f.globals, traits)
	if ends, due := f.ending.due(now); due {
		check.End, ok = ends, true
	}
	if !ok {
		return 0, false, nil
	}
	deleted, err = f.conntrack.Clean(ctx, f.name, check)
	for f.waitForModule(ctx, err) {
		deleted, err = f.conntrack.Clean(ctx, f.name, check)
	}
	if err == nil {
		f.flows.done()
		f.ending.done(now)
		f.cleaned = time.Now()
		f.cleaning = f.cleaned.Sub(now)
	} else {
		err = fmt.Errorf("delete stale flows: %w", err)
	}
	f.setLasting(&f.staleFlows, ConditionStaleFlows, err, "stale flows are not deleted")
	if errors.Is(err, ErrNotSupported) {
		return deleted, true, nil
	}
	return deleted, true, err
}

// setLasting begins a condition, changes or ends it, and logs the first of several failures.
func (f *family) setLasting(c *Condition, kind string, err error, text string) {
	f.mu.Lock()
	before := *c
	switch {
	case err == nil:
		*c = Condition{}
	case before.Type == "":
		*c = Condition{Type: kind, Since: time.Now(), Message: err.Error()}
	default:
		c.Message = err.Error()
	}
	f.mu.Unlock()
	if err != nil && before.Type == "" {
		f.log.Warn(text, zap.Error(err))
	}
}
