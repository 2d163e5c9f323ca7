package ebpf

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// Engine programs one IP family: the rules of nftables, which do everything, and before them sockets.
// It implements proxier.Engine.
type Engine struct {
	config Config
	family v1.IPFamily
	log    *zap.Logger
	rules  proxier.Engine // that of package nftables, never nil
	// carries is that of config.Sockets.
	carries func(*desired.Service, *desired.Frontend, *desired.Globals) (carried bool, why string)

	forward   *forwarder // never nil
	datagrams *datagrams // nil if UDP is left to the rules
	// withoutUDP says why UDP is left to the rules although Sockets.UDP says otherwise; else it is "".
	withoutUDP string

	mu       sync.Mutex // guards all below; Watch reads the links
	programs *programs  // nil until the first Apply
	layer    *layer     // so is this
	// without is why sockets are not translated, and lacking that check finds it. Otherwise Watch has it tried
	// again then.
	without  error
	lacking  bool
	tryAt    time.Time
	tryPause time.Duration
	// cgroups are those that exist; missing are Sockets.Cgroups that match none.
	cgroups, missing []string
	limited          []*proxier.ServiceError // Result.Limited of the current Apply
	// Tests stand between the engine and the kernel: wrap has each call to the maps, and around, if not nil,
	// each change of a link or a pin.
	wrap   func(*tables) kernel
	around func(change func() error) error
	watch  time.Duration // between two looks at the links

	faults faults
}

// NewEngine returns the engine of one family. It keeps nothing open before the first Apply; with Sockets.UDP, it tries what
// the kernel can do.
func NewEngine(config Config, family v1.IPFamily, deps proxier.Deps) (*Engine, error) {
	return newEngine(config, family, deps, canDestroy)
}

// newEngine gets what says that the kernel cannot end sockets.
func newEngine(config Config, family v1.IPFamily, deps proxier.Deps, canDestroy func(v1.IPFamily) error) (*Engine, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	rules, err := nftables.NewEngine(config.Config, family, deps)
	if err != nil {
		return nil, err
	}
	log := lightdeps.Logger(deps.Logger, "ebpf", family)
	e := &Engine{config: config, family: family, rules: rules, log: log, forward: newForwarder(config, family, log), watch: watchPause}
	e.wrap, e.carries = func(t *tables) kernel { return t }, e.config.Sockets.carries
	if !config.Sockets.UDP {
		return e, nil
	}
	switch err := canDestroy(family); {
	case errors.Is(err, errUnavailable):
		e.withoutUDP, e.config.Sockets.UDP = fmt.Sprintf("rules do UDP: %v", err), false
		log.Warn("rules do UDP: see the error, or leave Sockets.UDP off", zap.Error(err))
	case err != nil:
		return nil, err
	default:
		e.datagrams = newDatagrams(&config, family, log)
	}
	return e, nil
}

// New returns a Provider with an engine for each family of the config. It also deletes stale UDP
// flows and serves health check node ports, unless deps replace that.
func New(config Config, deps proxier.Deps) (*proxier.Proxier, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	complete := nodedeps.Complete(config.Config.Config, deps)
	return lightdeps.Provider(config.Config.Config, complete, func(family v1.IPFamily) (*Engine, error) {
		return NewEngine(config, family, complete)
	})
}

// Close closes the maps, links and sockets that this process holds. The kernel objects stay, and do their
// work. A later call opens them again.
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return errors.Join(e.forward.close(), e.closeSockets(), e.rules.Close())
}

func (e *Engine) closeSockets() error {
	e.datagrams.close()
	if e.programs == nil {
		return nil
	}
	err := errors.Join(e.layer.close(), e.programs.close())
	e.layer, e.programs = nil, nil
	return err
}

// Traits implements proxier.Engine.
func (e *Engine) Traits(s *desired.Service) desired.Traits {
	traits := e.rules.Traits(s)
	traits.Sockets = e.carries
	traits.FastPath = traits.FastPath || e.forward.forwards()
	return traits
}

// Abilities implements proxier.Engine. Plan prints the frontends that sockets have, and why they lack the
// others, and then the rules; Dump the frontends in the maps, and then the rules. Counts are those of the rules:
// sockets do not count.
func (e *Engine) Abilities() proxier.Abilities {
	can := e.rules.Abilities()
	can.Watch, can.Plan, can.Dump, can.Verify, can.Conditions = e.Watch, e.Plan, e.Dump, e.Verify, e.faults.conditions
	can.Lingers = e.datagrams.lingers
	return can
}

// SocketCounts returns the counts of the programs. It is an error if there are none, because nothing
// was applied yet, or because sockets are not translated.
func (e *Engine) SocketCounts() (connection.SocketCounts, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.programs == nil {
		return connection.SocketCounts{}, errors.Join(errors.New("no programs: sync first"), e.without)
	}
	var counts connection.SocketCounts
	if e.datagrams != nil {
		counts.Ended = e.datagrams.ended.Load()
	}
	err := sumCounts(e.programs.shared[mapCounts], &counts.Translated, &counts.Namespace, &counts.Bound, &counts.Empty, &counts.NoMemory)
	return counts, err
}
