package userspace

import (
	"context"
	"fmt"
	"io"
)

// Dump is for Abilities.
func (e *Engine) Dump(ctx context.Context, w io.Writer) error {
	for _, at := range e.Sockets() {
		if _, err := fmt.Fprintf(w, "%v %v %v/%s\n", at.Name, at.Role, at.Addr, at.Name.Protocol); err != nil {
			return err
		}
	}
	if e.portals == nil || e.portals.Abilities().Dump == nil {
		return nil
	}
	return e.portals.Abilities().Dump(ctx, w)
}
