package main

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/healthcheck"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/userspace"
)

// mode is the engine, as kube-proxy names it.
type mode string

const (
	modeNFTables  mode = "nftables"
	modeIPTables  mode = "iptables"
	modeIPVS      mode = "ipvs"
	modeUserspace mode = "userspace"
)

func modes() []mode { return []mode{modeNFTables, modeIPTables, modeIPVS, modeUserspace} }

// kernelModes are those that leave rules. Userspace has portals of one of them.
func kernelModes() []mode { return []mode{modeNFTables, modeIPTables, modeIPVS} }

// mode is the one that the flags choose.
func (o *options) mode() mode {
	if o.proxyMode == "" {
		return modeNFTables
	}
	return mode(o.proxyMode)
}

// kernelMode is whose rules there are.
func (o *options) kernelMode() mode {
	if o.mode() == modeUserspace {
		return mode(o.userspace.portals)
	}
	return o.mode()
}

// tuning are the flags that each mode with rules has of its own.
type tuning struct {
	masqueradeBit             int
	minSyncPeriod, syncPeriod time.Duration
}

// tuned are the flags of the rules of the mode that is chosen.
func (o *options) tuned() *tuning {
	switch o.kernelMode() {
	case modeIPTables:
		return &o.iptables
	case modeIPVS:
		own := o.ipvs.tuning
		own.masqueradeBit = o.iptables.masqueradeBit // as in kube-proxy
		return &own
	case modeNFTables, modeUserspace:
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
	switch m {
	case modeIPTables:
		return iptables.New(o.iptablesConfig(config), deps)
	case modeIPVS:
		return o.ipvs.provider(config, deps)
	case modeUserspace:
		return o.sockets(config, deps)
	case modeNFTables:
	}
	return nftables.New(nftables.Config{Config: config}, deps)
}

func (o *options) iptablesConfig(config proxier.Config) iptables.Config {
	return iptables.Config{Config: config, LocalhostNodePorts: o.localhostNodePorts}
}

// sockets is the proxy in user space, with the portals that lead there.
func (o *options) sockets(config proxier.Config, deps proxier.Deps) (*proxier.Proxier, error) {
	ports, err := parsePorts(o.userspace.ports)
	if err != nil {
		return nil, err
	}
	deps.Conntrack = conntrack.New(conntrack.Options{NetNS: config.NetNS})
	return userspace.New(userspace.Config{
		Config: config, Ports: ports, UDPIdle: o.userspace.udpTimeout,
		Portals: func(family v1.IPFamily) (proxier.Engine, error) {
			if o.kernelMode() == modeIPTables {
				portals := o.iptablesConfig(config)
				portals.Portals = true
				return iptables.NewEngine(portals, family, deps)
			}
			return nftables.NewEngine(nftables.Config{Config: config}, family, deps)
		},
	}, deps)
}

// cleanUpModes removes what this instance has made in all modes but one. A mode that
// the node does not have has nothing there.
func (o *options) cleanUpModes(ctx context.Context, but mode, config proxier.Config, log *zap.Logger) error {
	var errs []error
	for _, m := range kernelModes() {
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
		if !untilSynced(ctx, p) {
			return nil
		}
		if err := o.cleanUpModes(ctx, o.kernelMode(), config, log); err != nil && ctx.Err() == nil {
			log.Warn("rules of other modes are left", zap.Error(err))
		}
		return nil
	}
}

func isMode(text string) bool { return text == "" || slices.Contains(modes(), mode(text)) }
