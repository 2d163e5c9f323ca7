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

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/proxier"
)

// drainPeriod is how often Watch deletes drained real servers, checkPeriod how often it
// checks all virtual servers, because the kernel sends no notifications of them. It checks
// less often if that takes more than one part in checkShare of the time.
const (
	drainPeriod = time.Second
	checkPeriod = time.Second
	checkShare  = 20
)

// Watch is for proxier.Abilities: it reports damage to the rules and virtual servers, and
// changes of the node's addresses. It also deletes real servers that have drained.
func (e *Engine) Watch(ctx context.Context, damaged func(proxier.Damage)) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	addresses, err := e.subscribe(ctx)
	if err != nil {
		return err
	}
	defer func() {
		stop()
		for range addresses { // until the goroutine of the netlink package has ended
		}
	}()
	if e.addressesChanged() { // before subscribe
		damaged(proxier.Damage{Object: "addresses of the node"})
	}
	rules := make(chan error, 1)
	go func() {
		rules <- e.watchRules(ctx, damaged)
		stop()
	}()
	tick, check := time.NewTicker(drainPeriod), time.NewTimer(checkPeriod)
	defer tick.Stop()
	defer check.Stop()
	for {
		select {
		case <-ctx.Done():
			return <-rules
		case <-tick.C:
			e.deleteOrRepair(ctx, damaged)
		case <-check.C:
			text, took := e.checkServers()
			if text != "" {
				damaged(proxier.Damage{Object: text})
			}
			check.Reset(max(checkPeriod, checkShare*took))
		case change, open := <-addresses:
			if !open && ctx.Err() != nil {
				return <-rules
			}
			if !open {
				stop()
				return errors.Join(errors.New("watch addresses: the kernel has closed the subscription"), <-rules)
			}
			if text, isDamage := e.isDamage(change); isDamage {
				damaged(proxier.Damage{Object: text})
			}
		}
	}
}

// subscribe receives all changes of addresses. During a sync they wait in the socket's
// buffer, at first those of thousands of VIPs.
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

// addressesChanged reports whether the node's addresses differ from those of the last sync.
// It ignores errors, which the next sync will return too.
func (e *Engine) addressesChanged() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.trusted {
		return false // the next update is full
	}
	here, elsewhere, err := e.device.addresses()
	return err == nil && (!maps.Equal(here, e.boundVIPs) || !slices.Equal(relevant(elsewhere), relevant(e.local)))
}

// relevant returns the addresses whose changes are reported, sorted.
func relevant(addrs []netip.Addr) []netip.Addr {
	kept := slices.DeleteFunc(slices.Clone(addrs), isLocalOnly)
	slices.SortFunc(kept, netip.Addr.Compare)
	return slices.Compact(kept)
}

// isDamage reports whether an address of the node was added or deleted, or a VIP deleted
// by another program.
func (e *Engine) isDamage(change netlink.AddrUpdate) (text string, isDamage bool) {
	addr := addrOf(change.LinkAddress.IP)
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.trusted || addr.Is4() != (e.family == v1.IPv4Protocol) || isLocalOnly(addr) {
		return "", false
	}
	if e.device.isOn(change.LinkIndex) {
		return fmt.Sprintf("address %v of device %s", addr, e.config.Names.Device), !change.NewAddr && e.boundVIPs[addr]
	}
	return fmt.Sprintf("address %v of the node", addr), change.NewAddr != slices.Contains(e.local, addr)
}

// checkServers returns which virtual server another program has changed, once until the
// next full sync, and how long the check took, without waiting for a sync.
func (e *Engine) checkServers() (text string, took time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.trusted || e.reported {
		return "", 0 // the next update is full
	}
	began := time.Now()
	text, err := e.table.findDamage()
	if err != nil {
		e.log.Warn("virtual servers not checked: retrying", zap.Error(err))
	}
	e.reported = text != ""
	return text, time.Since(began)
}

// deleteOrRepair deletes real servers that have drained, or requests a full sync.
func (e *Engine) deleteOrRepair(ctx context.Context, damaged func(proxier.Damage)) {
	if err := e.deleteDrained(ctx); err != nil {
		e.log.Warn("drained real servers not deleted: a full sync follows", zap.Error(err))
		damaged(proxier.Damage{})
	}
}

// deleteDrained deletes real servers that have drained. After an error the state of the kernel
// is unknown: the next update must be full.
func (e *Engine) deleteDrained(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.trusted || len(e.table.draining) == 0 {
		return nil
	}
	err := errors.Join(e.table.deleteDrained(), e.unbind(), e.releaseGone(ctx))
	e.trusted = err == nil
	return err
}

// watchRules watches the rules and the firewall.
func (e *Engine) watchRules(ctx context.Context, damaged func(proxier.Damage)) error {
	var watch func(context.Context, func(proxier.Damage)) error
	if e.firewall != nil {
		watch = e.firewall.engine.Abilities().Watch
	}
	if watch == nil {
		return e.rules.Watch(ctx, damaged)
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var running sync.WaitGroup
	var failure error
	running.Go(func() {
		defer stop()
		failure = watch(ctx, damaged)
	})
	err := e.rules.Watch(ctx, damaged)
	stop()
	running.Wait()
	return errors.Join(err, failure)
}
