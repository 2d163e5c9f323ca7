package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/serviceplane/serviceplane/proxier"
)

// Cleanup implements proxier.Engine: it deletes the instance's virtual servers, addresses,
// device and rules.
func (e *Engine) Cleanup(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.removeAll(ctx)
	e.disconnect()
	if failure := e.firewall.cleanup(ctx); failure != nil {
		return errors.Join(err, failure)
	}
	if err != nil && !errors.Is(err, proxier.ErrNotSupported) {
		return err // the rules stay: the next attempt needs them to recognize virtual servers
	}
	return e.rules.Cleanup(ctx)
}

func (e *Engine) removeAll(ctx context.Context) error {
	if e.kernel == nil {
		if loaded, err := e.system.loaded(); err != nil || !loaded {
			return errors.Join(err, e.removeDevice()) // without IPVS there are no virtual servers; opening it would load the module
		}
		if err := e.openAll(); err != nil {
			return err
		}
	}
	if err := e.device.find(); err != nil {
		return err
	}
	if err := e.observe(ctx); err != nil {
		return err
	}
	var errs []error
	for _, key := range slices.SortedFunc(maps.Keys(e.table.virtuals), compareKeys) {
		if err := e.kernel.Delete(key); err != nil {
			errs = append(errs, fmt.Errorf("delete virtual server %v: %w", key, err))
		}
	}
	e.table = nil
	return errors.Join(append(errs, e.device.delete())...)
}

func (e *Engine) removeDevice() error {
	d, err := e.system.device()
	if err != nil {
		return err
	}
	defer d.close()
	return d.delete()
}
