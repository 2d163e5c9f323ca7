package main

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/healthcheck"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// mode is the engine, as kube-proxy names it.
type mode string

const (
	modeNFTables mode = "nftables"
	modeIPTables mode = "iptables"
)

func modes() []mode { return []mode{modeNFTables, modeIPTables} }

// mode is the one that the flags choose.
func (o *options) mode() mode {
	if o.proxyMode == "" {
		return modeNFTables
	}
	return mode(o.proxyMode)
}

// tuning are the flags that each mode has of its own.
type tuning struct {
	masqueradeBit             int
	minSyncPeriod, syncPeriod time.Duration
}

// tuned are the flags of the mode that is chosen.
func (o *options) tuned() *tuning {
	if o.mode() == modeIPTables {
		return &o.iptables
	}
	return &o.nftables
}

// provider is the proxy, with all that goes with it.
func (o *options) provider(config proxier.Config, observer proxier.Observer, log *zap.Logger) (*proxier.Proxier, error) {
	wanted := o.conntrack
	wanted.StateDir, wanted.Instance, wanted.Logger = o.stateDir, config.Names.Instance, log
	settings, err := conntrack.NewSysctls(wanted)
	if err != nil {
		return nil, err
	}
	return o.engine(o.mode(), config, proxier.Deps{
		Logger: log, Observer: observer, Settings: settings,
		Health: healthcheck.NewNodePorts(healthcheck.NodePortOptions{Logger: log, Threshold: o.threshold()}),
	})
}

// engine is the bare proxy of a mode.
func (o *options) engine(m mode, config proxier.Config, deps proxier.Deps) (*proxier.Proxier, error) {
	if m == modeIPTables {
		return iptables.New(iptables.Config{Config: config, LocalhostNodePorts: o.localhostNodePorts}, deps)
	}
	return nftables.New(nftables.Config{Config: config}, deps)
}

// cleanUpModes removes what this instance has made in all modes but one. A mode that
// the node does not have has nothing there.
func (o *options) cleanUpModes(ctx context.Context, but mode, config proxier.Config, log *zap.Logger) error {
	var errs []error
	for _, m := range modes() {
		if m == but {
			continue
		}
		p, err := o.engine(m, config, proxier.Deps{Logger: log, Health: proxier.NoHealth()})
		if err == nil {
			err = p.Cleanup(ctx)
		}
		if !errors.Is(err, proxier.ErrNotSupported) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// succeed removes what a predecessor of another mode has left, once everything is
// programmed in this one. A failure is logged: packets fare well with both.
func (o *options) succeed(p *proxier.Proxier, config proxier.Config, log *zap.Logger) func(context.Context) error {
	return func(ctx context.Context) error {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for !p.Status().Synced {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return nil
			}
		}
		if err := o.cleanUpModes(ctx, o.mode(), config, log); err != nil && ctx.Err() == nil {
			log.Warn("rules of other modes are left", zap.Error(err))
		}
		return nil
	}
}

func isMode(text string) bool { return text == "" || slices.Contains(modes(), mode(text)) }
