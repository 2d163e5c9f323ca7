package ipvs

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"sync"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/internal/nftables"
	"github.com/serviceplane/serviceplane/node/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
)

// engine programs one IP family.
type engine struct {
	config Config
	family v1.IPFamily
	log    *zap.Logger
	// rules refuse packets and set the masquerade mark before packets reach IPVS. Only Plan and
	// Watch are called without mu.
	rules    rules
	firewall *firewall // nil: none
	system   system

	mu     sync.Mutex // guards all below, and rules; Watch deletes drained real servers
	kernel kernel     // nil until it is needed
	device vipDevice
	table  *table
	// trusted means that table and boundVIPs are what the kernel holds; reported means that
	// Watch has reported damage.
	trusted, reported bool
	// boundVIPs are the addresses of the device.
	boundVIPs map[netip.Addr]bool
	// vipUses counts the service ports that need an address there.
	vipUses map[netip.Addr]int
	// local are the node's other addresses.
	local    []netip.Addr
	services map[changetracker.ServicePortName]portState
	// owners are the service ports of the virtual servers, frontends those of the frontends,
	// which have no virtual server without endpoints.
	owners    map[serverKey]changetracker.ServicePortName
	frontends map[desired.Key]*desired.Service
	// found are the frontends of the rules that a full update finds in the kernel, and whether
	// each is open to everybody; nil during other updates.
	found map[desired.Key]bool
	// nodePorts are the virtual servers that node ports need. If a VIP is an address of the
	// node, its virtual server has precedence over theirs.
	nodePorts map[serverKey]claim
	// refused are draining virtual servers, where the rules refuse new connections.
	refused map[serverKey]bool
	// left is what Leaving has in the kernel, until this engine has taken it over; claimed
	// reports which virtual servers on addresses of the node belong to the instance too.
	left    *left
	claimed func(serverKey) bool
	globals desired.Globals
	// result is that of the current Apply. Its Left is kept until an Apply succeeds.
	result proxier.Result
	totals *totals // of new connections; nil if they are not counted
}

// system is how the engine reaches the machine; tests replace it.
type system struct {
	kernel func() (kernel, error)
	device func() (vipDevice, error)
	// loaded reports whether IPVS is loaded.
	loaded func() (bool, error)
	// left opens what Leaving has in the kernel; tests have nil.
	left func() (*left, error)
	// check checks the kernel settings, and passes warnings to advise.
	check func(advise func(text string)) error
	// waitForPackets waits for packets that have passed the rules, but not IPVS.
	waitForPackets func()
}

// rules is the part of nftables.Front that the engine uses.
type rules interface {
	Watch(ctx context.Context, damaged func(proxier.Damage)) error
	Dump(ctx context.Context, w io.Writer) error
	Apply(ctx context.Context, update desired.Update, behind nftables.Behind) (proxier.Result, error)
	Plan(update desired.Update, holds func(vip netip.Addr) bool) (string, error)
	Verify(ctx context.Context, update desired.Update, behind nftables.Behind) (proxier.Verification, error)
	Frontends(ctx context.Context) (map[desired.Key]bool, error)
	Cleanup(ctx context.Context) error
	Close() error
}

// vipDevice is the device that holds the VIPs.
type vipDevice interface {
	// ensure creates the device. It fails if another program's device has the name.
	ensure() error
	// find finds the device; it ignores another program's.
	find() error
	// addresses lists the family's addresses: of the device, and of all other links.
	addresses() (here map[netip.Addr]bool, elsewhere []netip.Addr, err error)
	add(addrs []netip.Addr) error
	remove(addrs []netip.Addr) error
	// isOn reports whether a link is the device.
	isOn(link int) bool
	delete() error
	close()
}

// NewEngine returns the engine of one family. It opens nothing before the first Apply. Service ports that the
// kernel refuses, for example for an unknown scheduler, are in Result.Failed. Cleanup deletes the instance's
// virtual servers, addresses, device and rules. Close closes all netlink sockets; the kernel objects stay.
//
// Plan does not read the node's addresses; it uses those of the update's Globals. Dump prints the instance's
// virtual servers and rules. Counts adds up the kernel's counters of real servers, over all virtual servers of a
// service port. Watch reports damage to the rules and virtual servers, and changes of the node's addresses. It
// also deletes real servers that have drained.
//
// Verify compares the addresses of the device, the virtual servers with their schedulers, flags, real servers and
// weights, and the rules in front. Real servers of weight 0 that are no endpoints may drain, except those of UDP.
// A virtual server may have the weighted form of its scheduler, or another one if the kernel lacks its own.
func NewEngine(config Config, family v1.IPFamily, deps proxier.Deps) (proxier.Engine, error) {
	e, err := newEngine(config, family, deps)
	if err != nil {
		return nil, err
	}
	return e, nil
}

func newEngine(config Config, family v1.IPFamily, deps proxier.Deps) (*engine, error) {
	config = config.WithDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	inFront := config.Config
	inFront.Names.Table += ".ipvs" // not the nftables engine's table, so that one engine can replace the other
	front, err := nftables.NewFront(inFront, family, deps, (&planner{config: &config}).traits)
	if err != nil {
		return nil, err
	}
	e := &engine{
		config: config, family: family, rules: front,
		log: lightdeps.Logger(deps.Logger, "ipvs", family), totals: newTotals(config.CountConnections),
	}
	e.system = system{
		kernel:         func() (kernel, error) { return openKernel(config.NetNS, family) },
		device:         func() (vipDevice, error) { return openDevice(config.NetNS, config.Names, number(family)) },
		loaded:         func() (bool, error) { return ipvsLoaded(config.NetNS) },
		left:           func() (*left, error) { return openLeft(&config, family) },
		check:          e.checkSysctls,
		waitForPackets: waitForPackets,
	}
	if config.Firewall != nil {
		if e.firewall, err = newFirewall(&config, family, e.log); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// New returns a Provider with an IPVS engine for each family of the config. Unless deps
// say otherwise, it also deletes stale UDP flows and serves health check node ports.
func New(config Config, deps proxier.Deps) (*proxier.Proxier, error) {
	config = config.WithDefaults()
	if deps.LocalAddresses == nil {
		deps.LocalAddresses = func(context.Context) ([]netip.Addr, error) { return otherAddresses(&config) }
	}
	deps.Surroundings = withFlowtables(config.NetNS, deps.Surroundings)
	deps = nodedeps.Complete(config.Config, deps)
	return lightdeps.Provider(config.Config, deps, func(family v1.IPFamily) (*engine, error) { return newEngine(config, family, deps) })
}

// Abilities implements proxier.Engine.
func (e *engine) Abilities() proxier.Abilities {
	return proxier.Abilities{OwnsNames: true, Part: nftables.PartSize, Watch: e.Watch, Plan: e.Plan, Dump: e.Dump, Counts: e.Counts, Verify: e.Verify}
}

// Traits implements proxier.Engine.
func (e *engine) Traits(s *desired.Service) desired.Traits {
	return (&planner{config: &e.config}).traits(s)
}

// connect opens the sockets, unless they are open.
func (e *engine) connect() error {
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
func (e *engine) openAll() error {
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

func (e *engine) disconnect() {
	if e.kernel != nil {
		e.kernel.Close()
		e.kernel = nil
	}
	if e.device != nil {
		e.device.close()
		e.device = nil
	}
	if e.left != nil {
		e.left.close()
		e.left = nil
	}
	e.trusted = false
}

// Close closes all netlink sockets. The kernel objects stay.
func (e *engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.disconnect()
	return errors.Join(e.rules.Close(), e.firewall.close())
}
