package proxier

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
)

// cleanFlows deletes the flows that may be stale, and finds the connections that must end. If that fails, they stay pending. A
// kernel that does not support it makes a condition, but does not fail the sync.
func (f *family) cleanFlows(ctx context.Context) (deleted int, checked bool, err error) {
	traits, now := f.engine.Traits(nil), time.Now()
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
	} else {
		err = fmt.Errorf("delete stale flows: %w", err)
	}
	f.setStaleFlows(err)
	if errors.Is(err, ErrNotSupported) {
		return deleted, true, nil
	}
	return deleted, true, err
}

// setStaleFlows updates ConditionStaleFlows, and logs the first of several failures.
func (f *family) setStaleFlows(err error) {
	f.mu.Lock()
	before := f.staleFlows
	switch {
	case err == nil:
		f.staleFlows = Condition{}
	case before.Type == "":
		f.staleFlows = Condition{Type: ConditionStaleFlows, Since: time.Now(), Message: err.Error()}
	default:
		f.staleFlows.Message = err.Error()
	}
	f.mu.Unlock()
	if err != nil && before.Type == "" {
		f.log.Warn("stale flows are not deleted", zap.Error(err))
	}
}
