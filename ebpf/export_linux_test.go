package ebpf

import (
	"context"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// Interrupt calls step before each change of maps, links and pins.
func (e *Engine) Interrupt(step func()) {
	e.interpose(func(change func() error) error {
		step()
		return change()
	}, func(write func()) {
		step()
		write()
	})
}

// interpose lets call make each call that may fail, and store each write to memory.
func (e *Engine) interpose(call func(func() error) error, store func(func())) {
	e.around = call
	e.wrap = func(t *tables) kernel { return interposed{t, call, store} }
}

// interposed are maps that others change.
type interposed struct {
	*tables

	call  func(func() error) error
	store func(func())
}

func (k interposed) frontends() (all map[desired.Key]place, err error) {
	err = k.call(func() error {
		all, err = k.tables.frontends()
		return err
	})
	return all, err
}

func (k interposed) putFrontends(frontends map[desired.Key]place) error {
	return k.call(func() error { return k.tables.putFrontends(frontends) })
}

func (k interposed) removeFrontends(keys []desired.Key) error {
	return k.call(func() error { return k.tables.removeFrontends(keys) })
}

func (k interposed) setRange(at place, p endpointRange) { k.store(func() { k.tables.setRange(at, p) }) }

func (k interposed) setEndpoints(first uint32, endpoints desired.Endpoints) {
	k.store(func() { k.tables.setEndpoints(first, endpoints) })
}

func (k interposed) awaitGracePeriod() error { return k.call(k.tables.awaitGracePeriod) }

// Retry does what Watch does from time to time.
func (e *Engine) Retry() error { return e.retry() }

// CanDestroy says why the kernel cannot end sockets.
func CanDestroy(family v1.IPFamily) error { return canDestroy(family) }

// NewEngineWithout returns an engine on a kernel that cannot end sockets.
func NewEngineWithout(config Config, family v1.IPFamily, deps proxier.Deps) (*Engine, error) {
	return newEngine(config, family, deps, func(v1.IPFamily) error { return errUnavailable })
}

// Look does what Watch does after a change.
func (e *Engine) Look(ctx context.Context) {
	e.datagrams.look(ctx)
	e.noteFaults()
}
