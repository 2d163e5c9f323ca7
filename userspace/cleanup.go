package userspace

import (
	"context"
	"errors"
)

// Cleanup implements proxier.Engine: it removes the portals and closes the engine.
func (e *Engine) Cleanup(ctx context.Context) error {
	var err error
	if e.portals != nil {
		err = e.portals.Cleanup(ctx)
	}
	return errors.Join(err, e.shutdown(ctx))
}
