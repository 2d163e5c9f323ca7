package ipvs

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// firewall accepts health check node ports in the node's own firewall, because a table of
// nf_tables cannot accept packets that another table drops. A nil firewall does nothing.
// It is guarded by engine.mu.
type firewall struct {
	engine proxier.Engine
	log    *zap.Logger
	// open are the service ports with an open health check node port.
	open map[changetracker.ServicePortName]bool
	// missing means that the node does not support it; the next full update tries again.
	missing bool
}

func newFirewall(config *Config, family v1.IPFamily, log *zap.Logger) (*firewall, error) {
	engine, err := config.Firewall(family)
	if err != nil {
		return nil, fmt.Errorf("create %s firewall: %w", family, err)
	}
	return &firewall{engine: engine, log: log, open: map[changetracker.ServicePortName]bool{}}, nil
}

// apply opens and closes the health check node ports of an update.
func (f *firewall) apply(ctx context.Context, update *desired.Update) error {
	if f == nil || f.missing && !update.Full {
		return nil
	}
	u := f.update(update)
	if !u.Full && len(u.Changes) == 0 {
		return nil
	}
	result, err := f.engine.Apply(ctx, u)
	for _, failed := range result.Failed {
		err = errors.Join(err, failed)
	}
	wasMissing := f.missing
	if f.missing = errors.Is(err, proxier.ErrNotSupported); f.missing {
		if !wasMissing && len(u.Changes) > 0 {
			f.log.Warn("health check node ports not opened in the node's firewall: if it drops them, open them there", zap.Error(err))
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("open health check node ports in the firewall: %w", err)
	}
	if u.Full {
		clear(f.open)
	}
	for s := range u.Services() {
		f.open[s.Name] = true
	}
	for name := range u.Removed() {
		delete(f.open, name)
	}
	return nil
}

// update returns the part of an update that concerns health check node ports.
func (f *firewall) update(of *desired.Update) desired.Update {
	u := desired.Update{Family: of.Family, Full: of.Full, Globals: of.Globals}
	var there []desired.Change
	for i := range of.Changes {
		c := of.Changes[i]
		switch s := c.After; {
		case s != nil && s.Port != nil && s.Port.HealthCheckNodePort != 0:
			there = append(there, desired.Change{Name: c.Name, After: &desired.Service{Name: s.Name, Protocol: s.Protocol, Port: s.Port}})
		case f.open[c.Name] && !of.Full:
			u.Changes = append(u.Changes, desired.Change{Name: c.Name})
		}
	}
	u.Changes = append(u.Changes, there...)
	return u
}

func (f *firewall) cleanup(ctx context.Context) error {
	if f == nil {
		return nil
	}
	clear(f.open)
	if err := f.engine.Cleanup(ctx); err != nil && !errors.Is(err, proxier.ErrNotSupported) {
		return fmt.Errorf("clean up the firewall: %w", err)
	}
	return nil
}

func (f *firewall) close() error {
	if f == nil {
		return nil
	}
	return f.engine.Close()
}
