package ipvs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/proxier"
)

// observe reads what the kernel holds. What this engine knows of service ports is
// forgotten: a full update brings it back.
func (e *Engine) observe(ctx context.Context) error {
	here, elsewhere, err := e.device.addresses()
	if err != nil {
		return err
	}
	all, err := e.kernel.List()
	if err != nil {
		return err
	}
	owned, err := e.owned(ctx, elsewhere)
	if err != nil {
		return err
	}
	before := e.table
	e.table = newTable(e.kernel, e.config.Drain, time.Now)
	for key, v := range all {
		addr := key.addr.Addr()
		if e.excluded(addr) || !here[addr] && !owned[key] {
			continue
		}
		e.table.adopt(key, v)
		e.table.inherit(before, key)
	}
	e.bound, e.local, e.isTold = here, elsewhere, false
	e.uses, e.idle = map[netip.Addr]int{}, maps.Clone(here)
	e.services = map[changetracker.ServicePortName]*placed{}
	e.users, e.nodePorts = map[serverKey]changetracker.ServicePortName{}, map[serverKey]claim{}
	return nil
}

// owned are the virtual servers on addresses that are not on our device, which are
// ours all the same: the rules know them, from us or from a predecessor.
func (e *Engine) owned(ctx context.Context, local []netip.Addr) (map[serverKey]bool, error) {
	frontends, err := e.rules.Frontends(ctx)
	if err != nil {
		return nil, err
	}
	owned := map[serverKey]bool{}
	for _, f := range frontends {
		addrs := []netip.Addr{f.VIP}
		if !f.VIP.IsValid() {
			addrs = local
		}
		for _, addr := range addrs {
			owned[serverKey{f.Protocol, netip.AddrPortFrom(addr, f.Port)}] = true
		}
	}
	if e.table != nil {
		for key := range e.table.known {
			owned[key] = true
		}
	}
	return owned, nil
}

// tendPeriod is how often real servers that drain are looked at, and lookPeriod how
// often all are, or less often, so that looking takes one part in lookShare of the time
// for each IP family: the kernel does not tell of changes of these.
const (
	tendPeriod = time.Second
	lookPeriod = time.Second
	lookShare  = 20
)

// Watch implements proxier.Watcher: it hears of damage to the rules, and of changes
// of the node's addresses. Meanwhile it deletes real servers that have drained.
func (e *Engine) Watch(ctx context.Context, damaged func(proxier.Damage)) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	addresses, err := e.subscribe(ctx)
	if err != nil {
		return err
	}
	defer func() {
		stop()
		for range addresses { // until the library's goroutine has ended
		}
	}()
	if e.missed() { // while nobody listened
		damaged(proxier.Damage{Object: "addresses of the node"})
	}
	rules := make(chan error, 1)
	go func() {
		rules <- e.watchRules(ctx, damaged)
		stop()
	}()
	tick, look := time.NewTicker(tendPeriod), time.NewTimer(lookPeriod)
	defer tick.Stop()
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return <-rules
		case <-tick.C:
			e.tend(ctx)
		case <-look.C:
			text, took := e.look()
			if text != "" {
				damaged(proxier.Damage{Object: text})
			}
			look.Reset(max(lookPeriod, lookShare*took))
		case change, open := <-addresses:
			if !open && ctx.Err() != nil {
				return <-rules
			}
			if !open {
				stop()
				return errors.Join(errors.New("the kernel tells of addresses no more"), <-rules)
			}
			if text, matters := e.matters(change); matters {
				damaged(proxier.Damage{Object: text})
			}
		}
	}
}

// subscribe hears of all changes of addresses. What comes while a sync is on waits in
// the socket: our own thousands of VIPs, at first.
func (e *Engine) subscribe(ctx context.Context) (<-chan netlink.AddrUpdate, error) {
	const (
		queue  = 128
		buffer = 16 << 20
	)
	changes := make(chan netlink.AddrUpdate, queue)
	err := namespace.Visit(e.config.NetNS, func() error {
		ns, err := netns.Get()
		if err != nil {
			return err
		}
		defer func() { _ = ns.Close() }()
		return netlink.AddrSubscribeWithOptions(changes, ctx.Done(), netlink.AddrSubscribeOptions{
			Namespace: &ns, ReceiveBufferSize: buffer, ReceiveBufferForceSize: true,
		})
	})
	if err != nil {
		return nil, fmt.Errorf("subscribe to addresses: %w", denied(err))
	}
	return changes, nil
}

// missed says whether the node's addresses are others than those that the engine
// knows. A failure shows in the next sync too.
func (e *Engine) missed() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.trusted {
		return false // the next update is full
	}
	here, elsewhere, err := e.device.addresses()
	return err == nil && (!maps.Equal(here, e.bound) || !slices.Equal(relevant(elsewhere), relevant(e.local)))
}

// relevant are the addresses whose coming and going is told.
func relevant(addrs []netip.Addr) []netip.Addr {
	kept := slices.DeleteFunc(slices.Clone(addrs), isUnusable)
	slices.SortFunc(kept, netip.Addr.Compare)
	return slices.Compact(kept)
}

// matters says whether a change of an address is not one of ours: an address of the
// node that comes or goes, or one of ours that somebody else took away.
func (e *Engine) matters(change netlink.AddrUpdate) (text string, matters bool) {
	addr := addrOf(change.LinkAddress.IP)
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.trusted || addr.Is4() != (e.family == v1.IPv4Protocol) || isUnusable(addr) {
		return "", false
	}
	if e.device.isOn(change.LinkIndex) {
		return fmt.Sprintf("address %v of device %s", addr, e.config.Names.Device), !change.NewAddr && e.bound[addr]
	}
	return fmt.Sprintf("address %v of the node", addr), change.NewAddr != slices.Contains(e.local, addr)
}

// look names what somebody else has changed of our virtual servers or their real servers,
// once until everything is observed again, and says how long that took, beside waiting
// for a sync to end.
func (e *Engine) look() (text string, took time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.trusted || e.isTold {
		return "", 0 // the next update is full
	}
	began := time.Now()
	text, err := e.table.damage()
	if err != nil {
		e.log.Warn("virtual servers cannot be looked at", zap.Error(err))
	}
	e.isTold = text != ""
	return text, time.Since(began)
}

// tend looks after what drains. A failure is logged, and tried again.
func (e *Engine) tend(ctx context.Context) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.trusted || len(e.table.draining) == 0 {
		return
	}
	if err := errors.Join(e.table.tend(), e.unbind(), e.release(ctx)); err != nil {
		e.log.Warn("draining is delayed", zap.Error(err))
	}
}

// Dump implements proxier.Dumper: it prints our virtual servers and the rules.
func (e *Engine) Dump(ctx context.Context, w io.Writer) error {
	e.mu.Lock()
	err := e.dump(w)
	e.mu.Unlock()
	if err != nil {
		return err
	}
	return e.rules.Dump(ctx, w)
}

func (e *Engine) dump(w io.Writer) error {
	if e.table == nil {
		return nil
	}
	all := map[serverKey]*virtual{}
	for key, known := range e.table.known {
		all[key] = &virtual{settings: known.settings, reals: map[netip.AddrPort]int{}}
		for addr, r := range known.reals {
			all[key].reals[addr] = r.weight
		}
	}
	_, err := io.WriteString(w, text(all))
	return err
}

// Plan implements proxier.Planner. Without a look at the node, its addresses are those
// that the embedding program has told.
func (e *Engine) Plan(update desired.Update) (string, error) {
	p := planner{config: &e.config, nodeAddrs: nodePortAddrs(update.Globals.NodeAddresses, update.Globals.NodePortAddresses)}
	all := map[serverKey]*virtual{}
	for s := range update.Services() {
		maps.Copy(all, p.virtuals(s))
		maps.DeleteFunc(all, func(_ serverKey, v *virtual) bool { return len(v.reals) == 0 })
	}
	front, err := e.rules.Plan(update, func(vip netip.Addr) bool { return !slices.Contains(update.Globals.NodeAddresses, vip) })
	return text(all) + "\n" + front, err
}
