package userspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/proxier"
)

// Apply implements proxier.Engine. A service port fails if its socket cannot be opened,
// if another program uses its node port, or if its protocol is SCTP.
func (e *Engine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	var result proxier.Result
	err := e.apply(ctx, &update, &result)
	result.FlowEnds = e.flowEnds(&update)
	return result, err
}

func (e *Engine) apply(ctx context.Context, update *desired.Update, result *proxier.Result) error {
	e.start()
	e.globals = update.Globals
	e.goal.Store(&goal{update.Now, update.Globals})
	if err := e.chooseAddress(update); err != nil {
		return err
	}
	for _, name := range slices.AppendSeq(e.missing(update), update.Removed()) {
		e.remove(name)
	}
	if update.Full {
		e.dropLost()
	}
	plans, err := e.plan(update)
	if err != nil {
		return err
	}
	if e.config.AtFrontends { // a new socket may need the address of an old one
		err = e.closeSockets(ctx)
	}
	failed, setErr := e.setServices(ctx, update, plans, result)
	if err = errors.Join(err, setErr); setErr != nil {
		return err
	}
	if portalErr := e.applyPortals(ctx, update, failed, result); portalErr != nil {
		return errors.Join(err, portalErr) // the old portals may still lead to sockets in e.closing
	}
	return errors.Join(err, e.closeSockets(ctx))
}

// dropLost queues the sockets for closing that another program has closed, so that others are
// opened. Root can close sockets of others, such as with ss -K.
func (e *Engine) dropLost() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for name, s := range e.services {
		for key, socket := range s.sockets {
			if socket.isLost() {
				e.log.Warn("another program has closed a socket: opening it again", zap.Stringer("service", name), zap.Stringer("address", socket.site.Addr))
				e.closing = append(e.closing, socket)
				delete(s.sockets, key)
			}
		}
	}
}

// setServices creates or updates the service ports of an update. Those in failed lack
// sockets. If sockets have to be opened, the thread enters Config.NetNS once for all of
// them, because entering it takes milliseconds.
func (e *Engine) setServices(ctx context.Context, update *desired.Update, plans []map[socketKey]policy, result *proxier.Result) (failed map[changetracker.ServicePortName]bool, err error) {
	failed = map[changetracker.ServicePortName]bool{}
	set := func() error {
		for i := range update.Changes {
			s := update.Changes[i].After
			if s == nil {
				continue
			}
			if err := e.setService(ctx, s, plans[i]); err != nil {
				failed[s.Name] = e.lacksSockets(s.Name, plans[i])
				result.Failed = append(result.Failed, &proxier.ServiceError{Name: s.Name, Err: err, Partial: true, Terminal: s.Protocol == desired.SCTP})
			}
		}
		return nil
	}
	for i, listeners := range plans {
		if len(listeners) > 0 && e.lacksSockets(update.Changes[i].Name, listeners) {
			return failed, namespace.Visit(e.config.NetNS, set)
		}
	}
	return failed, set()
}

// lacksSockets reports whether a service port does not have all of its sockets.
func (e *Engine) lacksSockets(name changetracker.ServicePortName, listeners map[socketKey]policy) bool {
	s := e.services[name]
	return s == nil || len(s.sockets) < len(listeners)
}

// start starts the sweep of session affinities, and notes when counting began.
func (e *Engine) start() {
	if e.end != nil {
		return
	}
	e.mu.Lock()
	e.began = cmp.Or(e.began, time.Now())
	e.mu.Unlock()
	e.connCtx, e.end = context.WithCancel(context.Background()) //nolint:forbidigo // Close ends it
	e.running.Go(func() { e.sweep(e.connCtx) })
}

// remove removes a service port and queues its sockets for closing.
func (e *Engine) remove(name changetracker.ServicePortName) {
	s := e.services[name]
	if s == nil {
		return
	}
	e.mu.Lock()
	delete(e.services, name)
	e.mu.Unlock()
	e.closing = slices.AppendSeq(e.closing, maps.Values(s.sockets))
	e.releaseUnneeded(s, &desired.Service{})
	s.drainer.remove()
	s.balancer.end()
}

// setService creates or updates a service port. Existing sockets keep their ports and
// connections.
func (e *Engine) setService(ctx context.Context, want *desired.Service, listeners map[socketKey]policy) error {
	if want.Protocol == desired.SCTP {
		return fmt.Errorf("%w: the userspace engine does not proxy SCTP, whose associations have several addresses", proxier.ErrNotSupported)
	}
	s := e.services[want.Name]
	if s == nil {
		s = &service{
			balancer: newBalancer(&e.affinityShare), drainer: &drainer{timeout: e.config.Drain, conns: map[*drainingConn]struct{}{}, of: want},
			sockets: map[socketKey]*socket{}, reservations: reservations{},
		}
		e.mu.Lock()
		e.services[want.Name] = s
		e.mu.Unlock()
	}
	s.balancer.update(want)
	s.drainer.update(want)
	var errs []error // none is the usual case, and costs no memory
	if e.portals != nil {
		if err := e.reserve(s, want); err != nil {
			errs = append(errs, err)
		}
	}
	for key, p := range listeners {
		if err := e.setSocket(ctx, want, s, key, &p); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// setSocket opens a socket, or updates the policy of an open one.
func (e *Engine) setSocket(ctx context.Context, want *desired.Service, s *service, key socketKey, p *policy) error {
	if socket := s.sockets[key]; socket != nil {
		socket.policy.Store(p)
		socket.changed()
		return nil
	}
	socket, err := e.open(ctx, want, s, key)
	if err != nil {
		return err
	}
	e.mu.Lock()
	s.sockets[key] = socket
	e.mu.Unlock()
	socket.policy.Store(p)
	e.running.Go(socket.serve)
	return nil
}

// closeSockets closes the sockets that are no longer needed. Their TCP connections
// drain.
func (e *Engine) closeSockets(ctx context.Context) error {
	var errs []error
	for _, s := range e.closing {
		if e.portals == nil {
			s.quit()
		} else {
			e.running.Go(func() {
				pause.For(s.connCtx, handshakeGrace)
				s.quit()
			})
		}
		errs = append(errs, e.addresses.release(ctx, s.requested.Addr()))
	}
	e.closing = nil
	return errors.Join(errs...)
}
