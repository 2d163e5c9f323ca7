package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/proxier"
)

// Cleanup implements proxier.Engine: it deletes the instance's virtual servers, addresses,
// device and rules.
func (e *Engine) Cleanup(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := errors.Join(e.findLeft(), e.removeAll(ctx))
	if err == nil {
		err = e.endLeft()
	}
	e.disconnect()
	if failure := e.firewall.cleanup(ctx); failure != nil {
		return errors.Join(err, failure)
	}
	if err != nil && !errors.Is(err, proxier.ErrNotSupported) {
		return err // the rules stay: the next attempt needs them to recognize virtual servers
	}
	return errors.Join(e.rules.Cleanup(ctx), e.removeSets())
}

// removeSets deletes the ipsets of a kube-proxy that had the instance's names.
func (e *Engine) removeSets() error {
	if e.config.Names != proxier.KubeProxyNames() {
		return nil
	}
	l, err := openLeft(e)
	if err != nil {
		return err
	}
	defer l.close()
	if err = l.removeSets(); errors.Is(err, errSetInUse) {
		e.log.Warn("ipsets stay", zap.Error(err))
		return nil
	}
	return err
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
