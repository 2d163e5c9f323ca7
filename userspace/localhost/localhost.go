package localhost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/counting"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
	"github.com/serviceplane/serviceplane/userspace"
)

// engine adds node ports at localhost to another engine.
type engine struct {
	kernel  proxier.Engine
	sockets *userspace.Engine
	family  v1.IPFamily
	netNS   string
	log     *zap.Logger

	used atomic.Bool // whether Apply has served node ports at localhost
	// present reports whether this machine has the address of localhost.
	present bool
	// served are the service ports that the sockets know.
	served map[changetracker.ServicePortName]bool
}

var _ proxier.Engine = (*engine)(nil)

// Wrap returns a function for proxier.Deps.Wrap. The IP families share config.Budget. Of the
// config, the fields about where and for whom sockets listen must not be set: AtFrontends, Listen,
// Ports, Portals, ShareNodePorts, Addresses and Hooks.Activate. Its proxier.Config is that of
// the engine. Of the deps only Logger and Observer count.
//
// The engine that it returns closes the one that it wraps, and has its abilities. Plan and Dump print the
// sockets too, and Counts adds the connections at localhost, and their bytes. Descriptors are the figures of
// Config.Budget, if the wrapped engine does not count them: engines that count them should share the Budget.
// Where the rules of the wrapped engine accept node ports at 127.0.0.1, there are no sockets.
func Wrap(config userspace.Config, deps proxier.Deps) func(v1.IPFamily, proxier.Engine) (proxier.Engine, error) {
	if config.Budget == nil {
		config.Budget = userspace.NewBudget(0)
	}
	return func(family v1.IPFamily, kernel proxier.Engine) (proxier.Engine, error) {
		return newEngine(config, family, kernel, deps)
	}
}

func newEngine(config userspace.Config, family v1.IPFamily, kernel proxier.Engine, deps proxier.Deps) (*engine, error) {
	if err := validate(&config, kernel); err != nil {
		return nil, err
	}
	config.AtFrontends = true
	bound := net.ListenConfig{Control: bindToLoopback}
	bound.SetMultipathTCP(false)
	if config.Hooks.Listen == nil {
		config.Hooks.Listen = func(ctx context.Context, at userspace.Site) (net.Listener, error) {
			return bound.Listen(ctx, at.Network, at.Addr.String())
		}
	}
	if config.Hooks.ListenPacket == nil {
		config.Hooks.ListenPacket = func(ctx context.Context, at userspace.Site) (net.PacketConn, error) {
			return bound.ListenPacket(ctx, at.Network, at.Addr.String())
		}
	}
	sockets, err := userspace.NewEngine(config, family, deps)
	if err != nil {
		return nil, err
	}
	return &engine{
		kernel: kernel, sockets: sockets, family: family, netNS: config.NetNS,
		log: lightdeps.Logger(deps.Logger, "localhost", family), present: true, served: map[changetracker.ServicePortName]bool{},
	}, nil
}

func validate(c *userspace.Config, kernel proxier.Engine) error {
	var errs []error
	for field, isSet := range map[string]bool{
		"AtFrontends": c.AtFrontends, "Listen": len(c.Listen) > 0, "Ports": c.Ports != userspace.PortRange{}, "Portals": c.Portals != nil,
		"ShareNodePorts": c.ShareNodePorts, "Addresses": c.Addresses != nil, "Hooks.Activate": c.Hooks.Activate != nil,
	} {
		if isSet {
			errs = append(errs, fmt.Errorf("%w: %s: is set, want the zero value: sockets listen at localhost only", proxier.ErrInvalidConfig, field))
		}
	}
	if kernel == nil {
		errs = append(errs, fmt.Errorf("%w: no engine to wrap", proxier.ErrInvalidConfig))
	}
	return errors.Join(errs...)
}

func (e *engine) Abilities() proxier.Abilities {
	can := e.kernel.Abilities()
	if can.Plan != nil {
		can.Plan = e.Plan
	}
	if can.Dump != nil {
		can.Dump = e.Dump
	}
	if can.Counts != nil {
		can.Counts = e.Counts
	}
	if can.Descriptors == nil {
		can.Descriptors = e.descriptors
	}
	return can
}

// Apply implements proxier.Engine: the wrapped engine gets the Update unchanged, and the
// sockets get its node ports.
func (e *engine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	result, err := e.kernel.Apply(ctx, update)
	if update.Full {
		e.lookForLocalhost(&update)
	}
	if local := e.atLocalhost(&update); local.Full || len(local.Changes) > 0 {
		sockets, socketErr := e.sockets.Apply(ctx, local)
		for _, f := range sockets.Failed {
			result.Failed = append(result.Failed, &proxier.ServiceError{Name: f.Name, Err: fmt.Errorf("accept node port at localhost: %w", f.Err), Partial: true})
		}
		err = errors.Join(err, socketErr)
	}
	return result, err
}

// lookForLocalhost finds out whether this machine has the address of localhost: ::1 is absent
// where IPv6 is disabled.
func (e *engine) lookForLocalhost(update *desired.Update) {
	before := e.present
	e.present = e.family == v1.IPv4Protocol
	if e.present || !e.isUsed(update) {
		return
	}
	local, err := lightdeps.LocalAddresses(e.netNS)
	if e.present = err != nil || slices.Contains(local, desired.Localhost(e.family)); !e.present && before {
		e.log.Warn("node ports are not accepted at ::1, this machine does not have the address: is IPv6 disabled?")
	}
}

// isUsed reports whether sockets serve node ports.
func (e *engine) isUsed(update *desired.Update) bool {
	return update.Globals.LocalhostNodePorts && e.Traits(nil).LocalhostSockets
}

// atLocalhost returns the update of the sockets: service ports with a node port, which is
// accepted at localhost alone.
func (e *engine) atLocalhost(update *desired.Update) desired.Update {
	local := desired.Update{Family: update.Family, Full: update.Full, Globals: localGlobals(e.family)}
	if update.Full {
		clear(e.served)
	}
	if !e.isUsed(update) {
		return desired.Update{}
	}
	e.used.Store(true)
	if !e.present {
		return local
	}
	for i := range update.Changes {
		c := &update.Changes[i]
		var after *desired.Service
		if c.After != nil {
			after, _ = c.After.AtLocalhost()
		}
		switch {
		case after != nil:
			e.served[c.Name] = true
		case e.served[c.Name]:
			delete(e.served, c.Name)
		default:
			continue // has no node port and had none
		}
		local.Changes = append(local.Changes, desired.Change{Name: c.Name, After: after})
	}
	return local
}

func localGlobals(family v1.IPFamily) desired.Globals {
	a := desired.Localhost(family)
	return desired.Globals{NodePortAddresses: []netip.Prefix{netip.PrefixFrom(a, a.BitLen())}}
}

// Cleanup implements proxier.Engine.
func (e *engine) Cleanup(ctx context.Context) error {
	return errors.Join(e.sockets.Cleanup(ctx), e.kernel.Cleanup(ctx))
}

// Close implements proxier.Engine: it ends the connections at localhost, and closes the
// wrapped engine.
func (e *engine) Close() error { return errors.Join(e.sockets.Close(), e.kernel.Close()) }

// Traits implements proxier.Engine. Where the rules of the wrapped engine accept node ports at
// 127.0.0.1, there are no sockets.
func (e *engine) Traits(s *desired.Service) desired.Traits {
	t := e.kernel.Traits(s)
	t.LocalhostSockets = e.family == v1.IPv6Protocol || !t.LoopbackNodePorts
	return t
}

func (e *engine) descriptors() connection.Descriptors {
	if !e.used.Load() {
		return connection.Descriptors{}
	}
	return e.sockets.Abilities().Descriptors()
}

// Counts is for Abilities.
func (e *engine) Counts(ctx context.Context) (connection.Counts, error) {
	counts, err := e.kernel.Abilities().Counts(ctx)
	if err != nil && !errors.Is(err, errors.ErrUnsupported) { // then the sockets may count traffic
		return counts, err
	}
	local, err := e.sockets.Counts(ctx)
	return counting.Sum(counts, local), err
}

const title = "# node ports at localhost\n"

// Plan is for Abilities.
func (e *engine) Plan(update desired.Update) (string, error) {
	plan, err := e.kernel.Abilities().Plan(update)
	if err != nil || !e.isUsed(&update) {
		return plan, err
	}
	local := desired.Update{Family: update.Family, Full: true, Globals: localGlobals(e.family)}
	for s := range update.Services() {
		if at, ok := s.AtLocalhost(); ok && len(at.Frontends) > 0 {
			local.Changes = append(local.Changes, desired.Change{Name: s.Name, After: at})
		}
	}
	sockets, err := e.sockets.Plan(local)
	return plan + title + sockets, err
}

// Dump is for Abilities.
func (e *engine) Dump(ctx context.Context, w io.Writer) error {
	err := e.kernel.Abilities().Dump(ctx, w)
	if len(e.sockets.Sockets()) == 0 {
		return err
	}
	_, titleErr := io.WriteString(w, title)
	return errors.Join(err, titleErr, e.sockets.Dump(ctx, w))
}
