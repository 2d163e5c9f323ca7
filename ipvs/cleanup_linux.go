package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// Cleanup implements proxier.Engine.
func (e *engine) Cleanup(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	defer e.disconnect()
	err := errors.Join(e.findLeft(), e.removeAll(ctx))
	if err == nil && e.left != nil {
		err = e.left.deleteRoutes()
	}
	if failure := e.firewall.cleanup(ctx); failure != nil {
		return errors.Join(err, failure)
	}
	if err != nil && !errors.Is(err, proxier.ErrNotSupported) {
		return err // the rules stay: the next attempt needs them to recognize virtual servers
	}
	return errors.Join(e.rules.Cleanup(ctx), e.removeSets())
}

// removeSets deletes the ipsets of a kube-proxy that had the instance's names.
func (e *engine) removeSets() error {
	if e.left == nil {
		return nil
	}
	err := e.left.removeSets()
	if errors.Is(err, errSetInUse) {
		e.log.Warn("ipsets are not deleted: delete the rules that use them, and clean up again", zap.Error(err))
		return nil
	}
	return err
}

// find reads which objects the instance has. Without IPVS, which loaded reports, it has no virtual
// servers; opening it would load the module.
func (e *engine) find(ctx context.Context) (loaded bool, err error) {
	if e.kernel == nil {
		if loaded, err := e.system.loaded(); err != nil || !loaded {
			return false, err
		}
		if err := e.openAll(); err != nil {
			return false, err
		}
	}
	if err := e.device.find(); err != nil {
		return false, err
	}
	return true, e.observe(ctx)
}

func (e *engine) removeAll(ctx context.Context) error {
	loaded, err := e.find(ctx)
	errs := []error{err}
	if loaded && err == nil {
		for _, key := range slices.SortedFunc(maps.Keys(e.table.virtuals), desired.Key.Compare) {
			if err := e.kernel.Delete(key); err != nil {
				errs = append(errs, fmt.Errorf("delete virtual server %v: %w", key, err))
			}
		}
		e.table = nil
	}
	return errors.Join(append(errs, e.removeDevice())...)
}

func (e *engine) removeDevice() error {
	d, err := e.system.device()
	if err != nil {
		return err
	}
	defer d.close()
	return d.delete()
}
