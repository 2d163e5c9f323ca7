package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/internal/nftables"
	"github.com/serviceplane/serviceplane/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
)

// Engine programs one IP family. It implements proxier.Engine, Watcher, Planner
// and Dumper. Calls must not overlap, but Watch and Traits run beside all others.
type Engine struct {
	config Config
	family v1.IPFamily
	log    *zap.Logger
	// rules decide what is refused and masqueraded before packets get to IPVS.
	rules    rules
	firewall *firewall // nil: none
	system   system

	mu     sync.Mutex // guards all below; Watch tends to what drains
	kernel handle     // nil until it is needed
	device holder
	table  *table
	// trusted says that table and bound are what the kernel holds; isTold that Watch has
	// said that they are not.
	trusted, isTold bool
	// bound are the addresses on our device.
	bound map[netip.Addr]bool
	// uses counts the service ports that need an address there, and idle are those that
	// may have to go.
	uses map[netip.Addr]int
	idle map[netip.Addr]bool
	// local are the node's other addresses.
	local    []netip.Addr
	services map[changetracker.ServicePortName]*placed
	users    map[serverKey]changetracker.ServicePortName
	// nodePorts are the virtual servers that node ports want: where a VIP is an address
	// of the node, it may have taken their place.
	nodePorts map[serverKey]claim
	// kept are virtual servers that drain, which the rules refuse new connections to.
	kept    map[serverKey]bool
	globals desired.Globals
	report  proxier.ApplyReport
	// failed are the service ports of the Apply under way that the kernel refuses.
	failed []*proxier.ServiceError
}

// system is what the engine uses of the machine.
type system struct {
	kernel func() (handle, error)
	device func() (holder, error)
	// loaded says whether the kernel has IPVS now.
	loaded func() (bool, error)
	// check looks at the kernel's settings.
	check func(advise func(text string)) error
}

// rules is nftables.Front, as this one needs it.
type rules interface {
	proxier.Watcher
	proxier.Dumper
	Apply(ctx context.Context, update desired.Update, behind nftables.Behind) (proxier.Result, error)
	Plan(update desired.Update, holds func(vip netip.Addr) bool) (string, error)
	Frontends(ctx context.Context) ([]desired.Key, error)
	Cleanup(ctx context.Context) error
	Close() error
}

// handle is an open kernel.
type handle interface {
	kernel
	setTimeouts(c *Config) error
	Close()
}

// holder is the device that holds the VIPs.
type holder interface {
	// ensure makes it, or fails because somebody else's has its name.
	ensure() error
	// find looks for it. One of somebody else is none.
	find() error
	// addresses lists those of the family: of the device, and of all other links.
	addresses() (here map[netip.Addr]bool, elsewhere []netip.Addr, err error)
	add(addrs []netip.Addr) error
	remove(addrs []netip.Addr) error
	// isOn says whether a link is this one.
	isOn(link int) bool
	delete() error
	close()
}

// NewEngine returns the engine of one family. It opens nothing before the first
// Apply.
func NewEngine(config Config, family v1.IPFamily, deps proxier.Deps) (*Engine, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	inFront := config.Config
	inFront.Names.Table += ".ipvs" // beside the nftables engine's, so that one can succeed the other
	front, err := nftables.NewFront(inFront, family, deps)
	if err != nil {
		return nil, err
	}
	e := &Engine{
		config: config, family: family, rules: front,
		log: lightdeps.Logger(deps.Logger, "ipvs", family),
	}
	e.system = e.realSystem()
	if config.Firewall != nil {
		if e.firewall, err = newFirewall(&config, family, e.log); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// New returns a Provider with an IPVS engine for each family of the config, which
// also forgets stale UDP flows and answers at health check node ports, unless deps
// say otherwise.
func New(config Config, deps proxier.Deps) (*proxier.Proxier, error) {
	config = config.WithDefaults()
	if deps.LocalAddresses == nil {
		deps.LocalAddresses = func(context.Context) ([]netip.Addr, error) { return otherAddresses(config.NetNS, config.Names.Device) }
	}
	deps = nodedeps.Complete(config.Config, deps)
	return lightdeps.Provider(config.Config, deps, func(family v1.IPFamily) (*Engine, error) { return NewEngine(config, family, deps) })
}

// errNotFull is a bug of the caller: it must send a full Update first, and after
// every failure.
var errNotFull = errors.New("ipvs: a partial update where a full one is needed")

// Apply implements proxier.Engine. A service port with what the kernel refuses, such as
// a scheduler that it has not, is among those that failed.
func (e *Engine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.report, e.failed = proxier.ApplyReport{}, nil
	err := e.apply(ctx, &update)
	return proxier.Result{Failed: e.failed, Report: e.report}, err
}

func (e *Engine) apply(ctx context.Context, update *desired.Update) error {
	if !update.Full && !e.trusted {
		return errNotFull
	}
	e.trusted = false // unless all goes well
	if err := e.connect(); err != nil {
		return err
	}
	if update.Full {
		if err := errors.Join(e.device.ensure(), e.observe(ctx)); err != nil {
			e.disconnect()
			return err
		}
	}
	if err := e.program(ctx, update); err != nil {
		e.disconnect()
		return err
	}
	e.trusted = true
	return nil
}

// program does what there is to do, in this order: rules, addresses, virtual servers,
// and then addresses that are too much.
func (e *Engine) program(ctx context.Context, update *desired.Update) error {
	wanted := e.wanted(update)
	if err := e.applyRules(ctx, update, wanted); err != nil {
		return err
	}
	began := time.Now()
	e.table.writes = 0
	err := e.serve(update, wanted)
	e.report.Writes += e.table.writes
	e.report.Kernel += time.Since(began)
	if err != nil {
		return err
	}
	return errors.Join(e.release(ctx), e.firewall.apply(ctx, update))
}

func (e *Engine) serve(update *desired.Update, wanted []wantedPort) error {
	if err := e.bind(wanted); err != nil {
		return err
	}
	var errs []error
	for name := range update.Removed() {
		errs = append(errs, e.forget(name))
	}
	for i := range wanted {
		errs = append(errs, e.place(&wanted[i]))
	}
	if update.Full {
		errs = append(errs, e.removeLeftovers())
	}
	return errors.Join(append(errs, e.unbind())...)
}

func (e *Engine) applyRules(ctx context.Context, update *desired.Update, wanted []wantedPort) error {
	keep := e.keeps(update, wanted)
	result, err := e.rules.Apply(ctx, *update, e.behind(keep))
	e.report = result.Report
	if err == nil {
		e.kept, e.globals = keep, update.Globals
	}
	return err
}

// behind is what the rules are told beside an update.
func (e *Engine) behind(keep map[serverKey]bool) nftables.Behind {
	refused := make(map[desired.Key]bool, len(keep))
	for key := range keep {
		refused[key.frontend()] = true
	}
	return nftables.Behind{Holds: e.holds, Refused: refused}
}

// OwnsNames is true, see proxier.Engine: the device and the table have names of the instance.
func (e *Engine) OwnsNames() bool { return true }

// Traits implements proxier.Engine.
func (e *Engine) Traits(*desired.Service) desired.Traits {
	return desired.Traits{LocalPolicyBindsAll: true, VIPsAreLocal: true}
}

// connect opens what is not open.
func (e *Engine) connect() error {
	if e.kernel != nil {
		return nil
	}
	if err := e.openAll(); err != nil {
		return err
	}
	err := errors.Join(
		e.system.check(func(text string) { e.log.Warn(text) }),
		e.kernel.setTimeouts(&e.config))
	if err != nil {
		e.disconnect()
	}
	return err
}

// openAll opens the sockets.
func (e *Engine) openAll() error {
	k, err := e.system.kernel()
	if err != nil {
		return err
	}
	d, err := e.system.device()
	if err != nil {
		k.Close()
		return err
	}
	e.kernel, e.device = k, d
	return nil
}

func (e *Engine) realSystem() system {
	c := &e.config
	return system{
		kernel: func() (handle, error) { return openKernel(c.NetNS, e.family, c.Forward) },
		device: func() (holder, error) { return openDevice(c.NetNS, c.Names, e.family) },
		loaded: func() (bool, error) { return ipvsLoaded(c.NetNS) },
		check:  e.checkSysctls,
	}
}

func (e *Engine) disconnect() {
	if e.kernel != nil {
		e.kernel.Close()
		e.kernel = nil
	}
	if e.device != nil {
		e.device.close()
		e.device = nil
	}
	e.trusted = false
}

// Close closes all netlink sockets. The kernel objects stay.
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.disconnect()
	return errors.Join(e.rules.Close(), e.firewall.close())
}

// Cleanup implements proxier.Engine: it deletes our virtual servers, addresses,
// device and rules. A kernel without IPVS has none of them.
func (e *Engine) Cleanup(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.removeAll(ctx)
	e.disconnect()
	if failure := e.firewall.cleanup(ctx); failure != nil {
		return errors.Join(err, failure)
	}
	if err != nil && !errors.Is(err, proxier.ErrNotSupported) {
		return err // the rules stay: without them the next attempt does not know which virtual servers are ours
	}
	return e.rules.Cleanup(ctx)
}

func (e *Engine) removeAll(ctx context.Context) error {
	if e.kernel == nil {
		if loaded, err := e.system.loaded(); err != nil || !loaded {
			return errors.Join(err, e.removeDevice()) // IPVS is not loaded just to look for what cannot be there
		}
		if err := e.openAll(); err != nil {
			return err
		}
	}
	if err := e.device.find(); err != nil {
		return err
	}
	if err := e.observe(ctx); err != nil {
		return err
	}
	var errs []error
	for _, key := range slices.SortedFunc(maps.Keys(e.table.known), compareKeys) {
		if err := e.kernel.Delete(key); err != nil {
			errs = append(errs, fmt.Errorf("delete virtual server %v: %w", key, err))
		}
	}
	e.table = nil
	return errors.Join(append(errs, e.device.delete())...)
}

func (e *Engine) removeDevice() error {
	d, err := e.system.device()
	if err != nil {
		return err
	}
	defer d.close()
	return d.delete()
}
