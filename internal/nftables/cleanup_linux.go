package nftables

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/proxier"
)

// Cleanup implements proxier.Engine.
func (e *Engine) Cleanup(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.connect()
	if errors.Is(err, proxier.ErrNotSupported) {
		return nil // without nf_tables there are no tables
	}
	if err != nil {
		return err
	}
	e.trusted = false
	e.fullUpdates.Add(1) // what is being read ahead goes
	if a := e.ahead; a != nil {
		a.end()
		e.ahead = nil
	}
	w := e.newBatch()
	w.DeleteTable()
	if err := e.send(ctx, w); !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}
