package proxiertest

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// RecordingEngine is a proxier.Engine without a data plane. It records every Update, and
// stores the services that a data plane would hold after it. The zero value is ready for
// use. Its methods can be called from several goroutines at once.
type RecordingEngine struct {
	mu       sync.Mutex // guards everything below
	updates  []desired.Update
	services map[changetracker.ServicePortName]*desired.Service
	globals  desired.Globals
	failure  error
	refusals map[changetracker.ServicePortName]error
	cleanups int
}

var _ proxier.Engine = (*RecordingEngine)(nil)

// Apply records the update. It stores its services, unless Fail or Refuse prevent it.
func (e *RecordingEngine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	update.Changes = slices.Clone(update.Changes)
	e.updates = append(e.updates, update)
	if err := errors.Join(ctx.Err(), e.failure); err != nil {
		return proxier.Result{}, err
	}
	e.globals = update.Globals
	if update.Full || e.services == nil {
		e.services = make(map[changetracker.ServicePortName]*desired.Service, len(update.Changes))
	}
	var result proxier.Result
	var refused []changetracker.ServicePortName
	for service := range update.Services() {
		if err, isRefused := e.refusals[service.Name]; isRefused {
			refused = append(refused, service.Name)
			result.Failed = append(result.Failed, &proxier.ServiceError{Name: service.Name, Err: err})
		}
	}
	for _, o := range update.Applied(refused) {
		if e.services[o.Name] = o.Is; o.Is == nil {
			delete(e.services, o.Name)
		}
	}
	return result, nil
}

// Close does nothing.
func (e *RecordingEngine) Close() error { return nil }

// Traits returns the zero value.
func (e *RecordingEngine) Traits(*desired.Service) desired.Traits { return desired.Traits{} }

// Abilities returns none.
func (e *RecordingEngine) Abilities() proxier.Abilities { return proxier.Abilities{} }

// Cleanup deletes the services, but not the recorded updates.
func (e *RecordingEngine) Cleanup(context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cleanups++
	e.services, e.globals = nil, desired.Globals{}
	return e.failure
}

// Fail makes every later Apply and Cleanup return err, and Apply store no services. Nil
// ends that.
func (e *RecordingEngine) Fail(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.failure = err
}

// Refuse makes every later Apply leave one service port as it is, and report err for it.
// Nil ends that.
func (e *RecordingEngine) Refuse(name changetracker.ServicePortName, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err == nil {
		delete(e.refusals, name)
		return
	}
	if e.refusals == nil {
		e.refusals = map[changetracker.ServicePortName]error{}
	}
	e.refusals[name] = err
}

// Updates returns every Update so far, also those that failed, oldest first.
func (e *RecordingEngine) Updates() []desired.Update {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.updates)
}

// Services returns the services that a data plane would hold now. The caller owns the map;
// the services in it are shared and immutable.
func (e *RecordingEngine) Services() map[changetracker.ServicePortName]*desired.Service {
	e.mu.Lock()
	defer e.mu.Unlock()
	return maps.Clone(e.services)
}

// Globals returns the Globals of the last Update that did not fail as a whole.
func (e *RecordingEngine) Globals() desired.Globals {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.globals
}

// Cleanups returns how often Cleanup was called.
func (e *RecordingEngine) Cleanups() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.cleanups
}
