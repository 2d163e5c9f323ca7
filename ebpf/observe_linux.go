package ebpf

import (
	"context"
	"errors"
	"io"
)

// Dump is for Abilities.
func (e *Engine) Dump(ctx context.Context, w io.Writer) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.layer != nil {
		if err := dump(w, e.layer.kernel); err != nil {
			return err
		}
	}
	return errors.Join(e.forward.dump(w), e.rules.Abilities().Dump(ctx, w))
}
