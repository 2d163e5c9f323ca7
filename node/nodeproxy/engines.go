package nodeproxy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/healthcheck"
	"github.com/serviceplane/serviceplane/node/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/userspace"
	"github.com/serviceplane/serviceplane/userspace/localhost"
)

// mode is an engine, by kube-proxy's name.
type mode string

const (
	modeNFTables  mode = "nftables"
	modeIPTables  mode = "iptables"
	modeIPVS      mode = "ipvs"
	modeEBPF      mode = "ebpf"
	modeUserspace mode = "userspace"
)

func modes() []mode { return []mode{modeNFTables, modeIPTables, modeIPVS, modeEBPF, modeUserspace} }

// kernelModes are the modes with rules in the kernel. The portals of mode userspace are
// rules of one of them.
func kernelModes() []mode { return []mode{modeNFTables, modeIPTables, modeIPVS, modeEBPF} }

// mode returns the mode of the flags.
func (o *options) mode() mode {
	if o.proxyMode == "" {
		return modeNFTables
	}
	return mode(o.proxyMode)
}

// kernelMode returns the mode of the rules in the kernel.
func (o *options) kernelMode() mode {
	if o.mode() == modeUserspace {
		return mode(o.userspace.portals)
	}
	return o.mode()
}

// tuning holds the flags that each kernel mode has.
type tuning struct {
	masqueradeBit             int
	minSyncPeriod, syncPeriod time.Duration
}

// tuned returns the flags of the kernel mode.
func (o *options) tuned() *tuning {
	switch o.kernelMode() {
	case modeIPTables:
		return &o.iptables
	case modeIPVS:
		own := o.ipvs.tuning
		own.masqueradeBit = o.iptables.masqueradeBit // as in kube-proxy
		return &own
	case modeNFTables, modeEBPF, modeUserspace:
	}
	return &o.nftables
}

// section returns the section of a configuration file that the mode has, as in kube-proxy:
// mode ipvs reads what it lacks from iptables.
func (o *options) section() string {
	if m := o.kernelMode(); m == modeIPTables || m == modeIPVS {
		return string(modeIPTables)
	}
	return string(modeNFTables)
}

// provider returns the proxy with its kernel settings and health check node ports.
func (o *options) provider(config proxier.Config, observer proxier.Observer, log *zap.Logger) (*proxier.Proxier, error) {
	o.decorate(&config.Tracker, log)
	if o.mode() == modeEBPF {
		o.ebpf.openNamespaces(log)
	}
	settings, err := o.sysctls(config.Names.Instance, log)
	if err != nil {
		return nil, err
	}
	deps := proxier.Deps{
		Logger: log, Observer: observer, Settings: settings,
		Surroundings: nodedeps.Surroundings(config),
		Health:       healthcheck.NewNodePortServer(healthcheck.NodePortOptions{Logger: log, Threshold: o.threshold()}),
	}
	budget := userspace.NewBudget(0)
	if o.socketsAtLocalhost() {
		deps.Wrap = localhost.Wrap(userspace.Config{Config: config, Budget: budget, UDPIdle: o.userspace.udpTimeout, Linger: o.userspace.linger}, deps)
	}
	deps.Wrap = o.engines.wrap(deps.Wrap)
	return o.engine(o.mode(), config, deps, budget)
}

// decorate adds the hooks that read annotations.
func (o *options) decorate(tracker *changetracker.ObjectOptions, log *zap.Logger) {
	a := newAnnotations(log)
	tracker.DecorateEndpoint = a.endpoint
	tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) {
		a.service(p, s)
		o.nftablesOnly.decorate(a, p, s)
		if o.mode() == modeEBPF {
			decorateSockets(a, p, s)
		}
		if o.health.enabled {
			o.health.decorate(p, s)
		}
	}
}

// engine returns the proxy of a mode. Its sockets share the budget; nil means one of its own.
func (o *options) engine(m mode, config proxier.Config, deps proxier.Deps, budget *userspace.Budget) (*proxier.Proxier, error) {
	switch m {
	case modeIPTables:
		return iptables.New(o.iptablesConfig(config), deps)
	case modeIPVS:
		return o.ipvs.provider(config, deps)
	case modeUserspace:
		return o.sockets(config, deps, budget)
	case modeEBPF:
		return ebpf.New(o.ebpf.config(o.nftablesOnly.config(config)), deps)
	case modeNFTables:
	}
	return nftables.New(o.nftablesOnly.config(config), deps)
}

func (o *options) iptablesConfig(config proxier.Config) iptables.Config {
	return iptables.Config{Config: config, RouteLocalnet: o.localhostNodePorts}
}

// sockets returns the userspace proxy with its portals.
func (o *options) sockets(config proxier.Config, deps proxier.Deps, budget *userspace.Budget) (*proxier.Proxier, error) {
	ports, _ := parsePorts(o.userspace.ports) // validated
	deps.Conntrack = conntrack.New(conntrack.Options{NetNS: config.NetNS, Table: config.Names.Table + ".ending"})
	return userspace.New(userspace.Config{
		Config: config, Ports: ports, UDPIdle: o.userspace.udpTimeout, Linger: o.userspace.linger, Budget: budget,
		Portals: func(family v1.IPFamily) (proxier.Engine, error) {
			config := config
			config.CountConnections, config.CountTraffic = false, false // the sockets count
			if o.kernelMode() == modeIPTables {
				portals := o.iptablesConfig(config)
				portals.Portals = true
				return iptables.NewEngine(portals, family, deps)
			}
			return nftables.NewEngine(nftables.Config{Config: config, CloseLoadBalancerIPs: o.nftablesOnly.closeLoadBalancerIPs}, family, deps)
		},
	}, deps)
}

// cleanUpModes removes this instance's objects of some modes. Modes that the node does not
// support are skipped.
func (o *options) cleanUpModes(ctx context.Context, modes []mode, config proxier.Config, log *zap.Logger) error {
	var errs []error
	for _, m := range modes {
		if err := o.cleanUpMode(ctx, m, config, log); !errors.Is(err, proxier.ErrNotSupported) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// cleanUpMode removes the objects of a mode. Those of mode ebpf are its sockets alone: the rules are the
// table of mode nftables.
func (o *options) cleanUpMode(ctx context.Context, m mode, config proxier.Config, log *zap.Logger) error {
	if m == modeEBPF {
		return ebpf.RemoveSockets(o.ebpf.config(nftables.Config{Config: config}))
	}
	config.NodePorts = proxier.NodePorts{} // it accepts none, and must not say what it cannot
	tracking := conntrack.New(conntrack.Options{NetNS: config.NetNS})
	tracking.RunEnding = nil // all modes have the same table of connections that must end, and it stays
	p, err := o.engine(m, config, proxier.Deps{Logger: log, Health: proxier.NoHealth(), Conntrack: tracking}, nil)
	if err == nil {
		err = p.Cleanup(ctx)
	}
	return err
}

// cleanUpAll removes this instance's objects of all modes.
func (o *options) cleanUpAll(ctx context.Context, p *proxier.Proxier, config proxier.Config, log *zap.Logger) error {
	err := p.Cleanup(ctx)
	if errors.Is(err, proxier.ErrInUse) { // the other modes have the same names
		return err
	}
	return errors.Join(err, o.cleanUpModes(ctx, o.otherModes(), config, log), o.removeLeftSocket(ctx))
}

// otherModes returns the kernel modes except the mode of the flags, and the mode of its rules.
func (o *options) otherModes() []mode {
	return slices.DeleteFunc(kernelModes(), func(m mode) bool {
		return m == o.kernelMode() || m == modeNFTables && o.kernelMode() == modeEBPF
	})
}

// cleanUpOtherModes removes the rules of other modes after the first sync, and the rules
// of mode ipvs when their connections have ended. A failure is tried again: connections work with the
// rules of both modes, but the old rules lead deleted Services to endpoints that are gone, and rules of
// mode nftables come first.
func (o *options) cleanUpOtherModes(p *proxier.Proxier, l *ipvs.Leaving, config proxier.Config, log *zap.Logger) func(context.Context) error {
	return func(ctx context.Context) error {
		if !untilSynced(ctx, p) {
			return nil
		}
		others := slices.DeleteFunc(o.otherModes(), func(m mode) bool { return m == modeIPVS })
		var running sync.WaitGroup
		running.Go(func() {
			untilDone(ctx, log, func() error { return o.cleanUpModes(ctx, others, config, log) })
		})
		if l != nil {
			untilDone(ctx, log, func() error { return l.Run(ctx) })
		}
		running.Wait()
		return nil
	}
}

// The pauses between attempts to remove rules.
const firstCleanupPause, longestCleanupPause = time.Second, time.Minute

// untilDone tries to remove rules of other modes until that succeeds or ctx ends. It logs each new reason.
func untilDone(ctx context.Context, log *zap.Logger, remove func() error) {
	var last lastFailure
	for d := firstCleanupPause; ; d = min(2*d, longestCleanupPause) {
		err := remove()
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && last != "":
			log.Info("rules of other modes are removed now")
			return
		case err == nil:
			return
		case last.isNew(err):
			log.Warn("rules of other modes are not removed, will be retried", zap.Error(err))
		}
		if !pause.For(ctx, d) {
			return
		}
	}
}

// sysctls returns the kernel settings of the flags.
func (o *options) sysctls(instance string, log *zap.Logger) (proxier.Settings, error) {
	wanted := o.conntrack
	wanted.Accounting = o.countTraffic && o.mode() != modeUserspace // whose sockets count
	wanted.StateDir, wanted.Instance, wanted.Logger = o.stateDir, instance, log
	return conntrack.NewSysctls(wanted)
}

// initialize changes the kernel settings that a container with CAP_NET_ADMIN alone
// cannot change. Its error names those that stay.
func (o *options) initialize(ctx context.Context, instance string, log *zap.Logger) error {
	settings, err := o.sysctls(instance, log)
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range settings.Apply(ctx) {
		errs = append(errs, fmt.Errorf("change kernel settings: %s", c.Message))
	}
	if len(errs) == 0 {
		log.Info("kernel settings are as wanted")
	}
	return errors.Join(errs...)
}
