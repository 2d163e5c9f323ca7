//go:build !linux

package iptables

import (
	"context"
	"fmt"
	"runtime"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// engine needs Linux. On other systems it can only Plan.
type engine struct {
	config Config
	family v1.IPFamily
}

// NewEngine returns an engine that can only Plan.
func NewEngine(config Config, family v1.IPFamily, _ proxier.Deps) (proxier.Engine, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	return &engine{config: config, family: family}, nil
}

// New returns proxier.ErrNotSupported.
func New(Config, proxier.Deps) (*proxier.Proxier, error) { return nil, errUnsupported() }

// Apply returns proxier.ErrNotSupported.
func (e *engine) Apply(context.Context, desired.Update) (proxier.Result, error) {
	return proxier.Result{}, errUnsupported()
}

// Cleanup returns proxier.ErrNotSupported.
func (e *engine) Cleanup(context.Context) error { return errUnsupported() }

// Close does nothing.
func (e *engine) Close() error { return nil }

// Traits implements proxier.Engine.
func (e *engine) Traits(*desired.Service) desired.Traits { return desired.Traits{} }

// Abilities implements proxier.Engine: it can plan.
func (e *engine) Abilities() proxier.Abilities { return proxier.Abilities{Plan: e.Plan} }

func errUnsupported() error {
	return fmt.Errorf("iptables on %s: %w", runtime.GOOS, proxier.ErrNotSupported)
}

func (c *Counters) read(string) (uint64, bool) { return 0, false }
