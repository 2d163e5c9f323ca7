package ipvs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/companions"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// Engine programs one IP family. It implements proxier.Engine, Watcher, Reporter,
// Dumper and Characteristic, and io.Closer. Calls must not overlap, but Watch runs
// beside all others.
type Engine struct {
	config Config
	family v1.IPFamily
	log    *zap.Logger
	// rules decide what is refused and masqueraded before packets get to IPVS.
	rules rules
	// open opens what is below.
	open func() (handle, holder, error)

	mu     sync.Mutex // guards all below; Watch tends to what drains
	kernel handle     // nil until it is needed
	device holder
	table  *table
	// trusted says that table and bound are what the kernel holds.
	trusted bool
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
	globals  desired.Globals
	report   proxier.ApplyReport
}

// rules is the nftables engine, as this one needs it.
type rules interface {
	proxier.Engine
	proxier.Reporter
	proxier.Watcher
	proxier.Dumper
	proxier.Planner
	io.Closer
	Frontends(ctx context.Context) ([]desired.Key, error)
}

// handle is an open kernel.
type handle interface {
	kernel
	setTimeouts(c *Config) error
	Close()
}

// holder is the device that holds the VIPs.
type holder interface {
	ensure() error
	find() error
	// addresses lists those of the family: of the device, and of all other links.
	addresses() (here map[netip.Addr]bool, elsewhere []netip.Addr, err error)
	add(addrs []netip.Addr) error
	remove(addrs []netip.Addr) error
	delete() error
	close()
}

// placed is a service port with its virtual servers, and the VIPs that it needs.
type placed struct {
	keys []serverKey
	vips []netip.Addr
}

// NewEngine returns the engine of one family. It opens nothing before the first
// Apply.
func NewEngine(config Config, family v1.IPFamily, deps proxier.Deps) (proxier.Engine, error) {
	return newEngine(config, family, deps)
}

func newEngine(config Config, family v1.IPFamily, deps proxier.Deps) (*Engine, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	inFront := nftables.Config{Config: config.Config, Verdicts: true}
	inFront.Names.Table += "-ipvs" // beside the nftables engine's, so that one can succeed the other
	engine, err := nftables.NewEngine(inFront, family, deps)
	if err != nil {
		return nil, err
	}
	front, ok := engine.(rules)
	if !ok {
		return nil, fmt.Errorf("rules are of type %T: %w", engine, proxier.ErrNotSupported)
	}
	log := deps.Logger
	if log == nil {
		log = zap.NewNop()
	}
	e := &Engine{
		config: config, family: family, rules: front,
		log: log.Named("ipvs").With(zap.String("family", string(family))),
	}
	e.open = e.openAll
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
	deps = companions.Complete(deps, config.NetNS)
	if deps.Conntrack == nil {
		deps.Conntrack = conntrack.New(conntrack.Options{NetNS: config.NetNS})
	}
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range config.Families {
		engine, err := newEngine(config, family, deps)
		if err != nil {
			return nil, err
		}
		engines[family] = engine
	}
	return proxier.New(config.Config, deps, engines)
}

// errNotFull is a bug of the caller: it must send a full Update first, and after
// every failure.
var errNotFull = errors.New("ipvs: a partial update where a full one is needed")

// Apply implements proxier.Engine. A service port whose scheduler the kernel has not
// is a *proxier.ServiceError.
func (e *Engine) Apply(ctx context.Context, update desired.Update) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.report = proxier.ApplyReport{}
	if !update.Full && !e.trusted {
		return errNotFull
	}
	e.trusted = false // unless all goes well
	if err := e.connect(); err != nil {
		return err
	}
	if update.Full {
		if err := e.observe(ctx); err != nil {
			return errors.Join(err, e.disconnect())
		}
	}
	err := e.program(ctx, &update)
	if rest := others(err); rest != nil {
		return errors.Join(err, e.disconnect())
	}
	e.trusted = true
	return err
}

// program does what there is to do, in this order: rules, addresses, virtual servers,
// and then what is too much the other way round.
func (e *Engine) program(ctx context.Context, update *desired.Update) error {
	began := time.Now()
	e.table.writes = 0
	e.globals = update.Globals
	p := planner{config: &e.config, nodeAddrs: nodePortAddrs(e.local, update.Globals.NodePortAddresses)}
	wanted := make([]map[serverKey]*virtual, len(update.Services))
	var addrs []netip.Addr
	for i, s := range update.Services {
		wanted[i] = p.virtuals(s)
		addrs = append(addrs, e.vipsOf(s)...)
	}
	if err := e.bind(addrs); err != nil {
		return err
	}
	if err := e.applyRules(ctx, update); err != nil {
		return err
	}
	var errs []error
	gone := slices.Concat(update.Removed, e.missing(update))
	for _, name := range gone {
		errs = append(errs, e.forget(name))
	}
	for i, s := range update.Services {
		if err := e.place(s, wanted[i]); err != nil {
			errs = append(errs, &proxier.ServiceError{Name: s.Name, Family: e.family, Err: err})
		}
	}
	if update.Full {
		errs = append(errs, e.removeLeftovers())
	}
	errs = append(errs, e.unbind())
	e.report.Writes += e.table.writes
	e.report.Kernel += time.Since(began)
	return errors.Join(errs...)
}

func (e *Engine) applyRules(ctx context.Context, update *desired.Update) error {
	rules := *update
	rules.Services = make([]*desired.Service, len(update.Services))
	for i, s := range update.Services {
		rules.Services[i] = verdicts(s, func(a netip.Addr) bool { return e.bound[a] })
	}
	err := e.rules.Apply(ctx, rules)
	e.report = e.rules.LastApply()
	return err
}

// vipsOf are the addresses that a service port needs on our device: all but those
// that the node has anyway, or that are excluded.
func (e *Engine) vipsOf(s *desired.Service) []netip.Addr {
	var vips []netip.Addr
	for i := range s.Frontends {
		vip := s.Frontends[i].VIP
		if vip.IsValid() && !slices.Contains(e.local, vip) && !e.excluded(vip) && !slices.Contains(vips, vip) {
			vips = append(vips, vip)
		}
	}
	return vips
}

func (e *Engine) excluded(a netip.Addr) bool {
	return slices.ContainsFunc(e.config.ExcludeCIDRs, func(p netip.Prefix) bool { return p.Contains(a) })
}

// bind puts addresses on our device.
func (e *Engine) bind(addrs []netip.Addr) error {
	var added []netip.Addr
	for _, a := range addrs {
		if !e.bound[a] {
			e.bound[a] = true
			added = append(added, a)
		}
	}
	e.report.Writes += len(added)
	return e.device.add(added)
}

// unbind takes the addresses away that no service port needs any more, and no virtual
// server that drains.
func (e *Engine) unbind() error {
	for addr := range e.table.left {
		e.idle[addr] = true
	}
	clear(e.table.left)
	var removed []netip.Addr
	for a := range e.idle {
		if e.bound[a] && e.uses[a] == 0 && e.table.servers[a] == 0 && !e.excluded(a) {
			removed = append(removed, a)
			delete(e.bound, a)
		}
	}
	clear(e.idle)
	e.report.Writes += len(removed)
	return e.device.remove(removed)
}

// use counts the service ports that need addresses.
func (e *Engine) use(vips []netip.Addr, n int) {
	for _, a := range vips {
		if e.uses[a] += n; e.uses[a] == 0 {
			delete(e.uses, a)
			e.idle[a] = true
		}
	}
}

// place brings the virtual servers of a service port to what they must be.
func (e *Engine) place(s *desired.Service, wanted map[serverKey]*virtual) error {
	before := e.services[s.Name]
	now := &placed{vips: e.vipsOf(s)}
	var errs []error
	for _, key := range slices.SortedFunc(maps.Keys(wanted), compareKeys) {
		if e.excluded(key.addr.Addr()) {
			continue
		}
		if user, used := e.users[key]; used && user != s.Name && !slices.Contains(now.vips, key.addr.Addr()) {
			continue // a VIP of another one is an address of the node, and goes before node ports
		}
		e.users[key] = s.Name
		now.keys = append(now.keys, key)
		errs = append(errs, e.table.set(key, wanted[key]))
	}
	e.use(now.vips, 1)
	if before != nil {
		e.use(before.vips, -1)
		errs = append(errs, e.leave(s.Name, before.keys, now.keys))
	}
	e.services[s.Name] = now
	return errors.Join(errs...)
}

// leave removes the virtual servers that a service port had and has not any more.
func (e *Engine) leave(name changetracker.ServicePortName, before, now []serverKey) error {
	var errs []error
	for _, key := range before {
		if e.users[key] == name && !slices.Contains(now, key) {
			delete(e.users, key)
			errs = append(errs, e.table.remove(key))
		}
	}
	return errors.Join(errs...)
}

func (e *Engine) forget(name changetracker.ServicePortName) error {
	p := e.services[name]
	if p == nil {
		return nil
	}
	delete(e.services, name)
	e.use(p.vips, -1)
	return e.leave(name, p.keys, nil)
}

// missing are the service ports that a full update does not have any more.
func (e *Engine) missing(update *desired.Update) (gone []changetracker.ServicePortName) {
	if !update.Full {
		return nil
	}
	wanted := make(map[changetracker.ServicePortName]bool, len(update.Services))
	for _, s := range update.Services {
		wanted[s.Name] = true
	}
	for name := range e.services {
		if !wanted[name] {
			gone = append(gone, name)
		}
	}
	return gone
}

// removeLeftovers removes the virtual servers of ours that no service port has.
func (e *Engine) removeLeftovers() error {
	var errs []error
	for _, key := range slices.SortedFunc(maps.Keys(e.table.known), compareKeys) {
		if _, used := e.users[key]; !used {
			errs = append(errs, e.table.remove(key))
		}
	}
	return errors.Join(errs...)
}

// others is what an error says beside service ports that failed.
func others(err error) error {
	_, rest := proxier.SplitErrors(err)
	return rest
}

// LastApply implements proxier.Reporter.
func (e *Engine) LastApply() proxier.ApplyReport { return e.report }

// Traits implements proxier.Characteristic.
func (e *Engine) Traits() desired.Traits {
	return desired.Traits{LocalPolicyBindsAll: true, VIPsAreLocal: true}
}

// connect opens what is not open, and makes the device.
func (e *Engine) connect() (err error) {
	if e.kernel != nil {
		return nil
	}
	if e.kernel, e.device, err = e.open(); err != nil {
		e.kernel, e.device = nil, nil
		return err
	}
	err = errors.Join(
		e.checkSysctls(func(text string) { e.log.Warn(text) }),
		e.device.ensure(),
		e.kernel.setTimeouts(&e.config))
	if err != nil {
		return errors.Join(err, e.disconnect())
	}
	return nil
}

// openAll opens the sockets.
func (e *Engine) openAll() (handle, holder, error) {
	k, err := openKernel(e.config.NetNS, e.family, e.config.Forward)
	if err != nil {
		return nil, nil, err
	}
	d, err := openDevice(e.config.NetNS, e.config.Names.Device, e.family)
	if err != nil {
		k.Close()
		return nil, nil, err
	}
	return k, d, nil
}

func (e *Engine) disconnect() error {
	if e.kernel != nil {
		e.kernel.Close()
		e.kernel = nil
	}
	if e.device != nil {
		e.device.close()
		e.device = nil
	}
	e.trusted = false
	return nil
}

// Close closes all netlink sockets. The kernel objects stay.
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return errors.Join(e.rules.Close(), e.disconnect())
}

// Cleanup implements proxier.Engine: it deletes our virtual servers, addresses,
// device and rules. A kernel without IPVS has none of them.
func (e *Engine) Cleanup(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.removeAll(ctx)
	if errors.Is(err, proxier.ErrNotSupported) {
		err = nil
	}
	return errors.Join(err, e.disconnect(), e.rules.Cleanup(ctx))
}

func (e *Engine) removeAll(ctx context.Context) (err error) {
	if e.kernel == nil {
		if loaded, err := ipvsLoaded(e.config.NetNS); err != nil || !loaded {
			return errors.Join(err, e.removeDevice()) // IPVS is not loaded just to look for what cannot be there
		}
		if e.kernel, e.device, err = e.open(); err != nil {
			e.kernel, e.device = nil, nil
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
	d, err := openDevice(e.config.NetNS, e.config.Names.Device, e.family)
	if err != nil {
		return err
	}
	defer d.close()
	return d.delete()
}
