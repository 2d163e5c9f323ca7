package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// Leaving removes the objects of an IPVS engine from a node that has another engine now,
// without ending connections. Doc.go describes it.
type Leaving struct {
	families    []*leavingFamily
	connections atomic.Int64
}

// NewLeaving returns what replaces Engine.Cleanup after a change to another engine. Of the
// config it uses Names, NetNS, Families, ExcludeCIDRs, Forward, Firewall and Drain, which is
// how long connections may continue. With proxier.KubeProxyNames, it also removes what kube-proxy
// has made in mode ipvs: the objects on kube-ipvs0, the virtual servers of node ports, and
// its ipsets, but not its iptables chains.
func NewLeaving(config Config, deps proxier.Deps) (*Leaving, error) {
	config = config.WithDefaults()
	l := &Leaving{}
	for _, family := range config.Families {
		e, err := newEngine(config, family, deps)
		if err != nil {
			return nil, err
		}
		l.families = append(l.families, &leavingFamily{engine: e})
	}
	return l, nil
}

// Connections returns how many connections still pass IPVS. Any goroutine may call it.
func (l *Leaving) Connections() int { return int(l.connections.Load()) }

// leavingPeriod is how often connections are counted, unless that takes more than one part
// in checkShare of the time. busyAttempts is how often it tries to delete an ipset that a
// rule still uses.
const (
	leavingPeriod = time.Second
	busyAttempts  = 60
)

// Run starts when the other engine has programmed all Services: new connections must find
// its rules. It returns when all objects are deleted, or when ctx ends; then the rest stays,
// and the next Run continues, with a new deadline. An error means that some objects stay.
func (l *Leaving) Run(ctx context.Context) error {
	var errs []error
	fail := func(f *leavingFamily, err error) {
		errs = append(errs, fmt.Errorf("leave ipvs: %s: %w", f.family, err))
	}
	defer func() {
		for _, f := range l.families {
			_ = f.Close()
		}
	}()
	var busy []*leavingFamily
	for _, f := range l.families {
		if err := f.begin(ctx); err != nil {
			fail(f, err)
		} else {
			busy = append(busy, f)
		}
	}
	began := time.Now()
	for len(busy) > 0 {
		started, total := time.Now(), 0
		busy = slices.DeleteFunc(busy, func(f *leavingFamily) bool {
			n, done, err := f.step(time.Since(began))
			total += n
			if done && err != nil {
				fail(f, err)
			} else if err != nil {
				f.log.Warn("virtual servers of the previous mode are not deleted, will be retried", zap.Error(err))
			}
			return done
		})
		l.connections.Store(int64(total))
		if len(busy) == 0 {
			break
		}
		select {
		case <-time.After(max(leavingPeriod, checkShare*time.Since(started))):
		case <-ctx.Done():
			return errors.Join(errs...)
		}
	}
	return errors.Join(errs...)
}

// leavingFamily removes the objects of one IP family. The Engine knows which they are; it writes
// nothing by itself.
type leavingFamily struct {
	*engine

	// attempts counts those to delete ipsets.
	attempts int
}

// begin stops new connections to the virtual servers, and replaces the addresses of the
// device by routes. What it needs to continue after a crash is in the kernel first.
func (f *leavingFamily) begin(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := f.findLeft()
	if err != nil {
		return err
	}
	if f.claimed, err = f.left.kubeProxyServers(); err != nil {
		return err
	}
	loaded, err := f.find(ctx)
	if err != nil {
		return err
	}
	servers, vips := map[serverKey]bool{}, map[netip.Addr]bool{}
	if loaded {
		for key := range f.table.virtuals {
			servers[key] = true
			if addr := key.VIP; f.boundVIPs[addr] || f.left.vips.keys[addr] {
				vips[addr] = true
			}
		}
	}
	if err := f.left.add(servers, vips); err != nil {
		return err
	}
	if err := f.stopNew(); err != nil {
		return err
	}
	if err := f.left.addRoutes(vips, f.local); err != nil {
		return err
	}
	if err := errors.Join(f.removeDevice(), f.rules.Cleanup(ctx), f.firewall.cleanup(ctx)); err != nil {
		return err
	}
	if len(servers) > 0 {
		f.log.Info("connections of the previous mode may end: new ones use the new rules",
			zap.Int("virtualServers", len(servers)), zap.Duration("deadline", f.config.Drain))
	}
	return nil
}

// stopNew gives all real servers weight 0: connections continue, and new ones, which only
// come while no rule of the new mode is for them, are refused.
func (f *leavingFamily) stopNew() error {
	for _, key := range slices.SortedFunc(maps.Keys(f.left.servers.keys), desired.Key.Compare) {
		server := f.table.virtuals[key]
		for real := range server.reals {
			if err := f.table.drainReal(key, server, real); err != nil {
				return err
			}
		}
	}
	return nil
}

// step deletes what has no connections, or everything after the deadline. It returns how
// many connections are left.
func (f *leavingFamily) step(age time.Duration) (connections int, done bool, err error) {
	idle := map[serverKey]bool{}
	for key := range f.left.servers.keys {
		busy, err := f.kernel.Loads(key)
		if err != nil && !errors.Is(err, unix.ESRCH) { // not just deleted by another program
			return connections, false, fmt.Errorf("count connections of virtual server %v: %w", key, err)
		}
		n := 0
		for _, of := range busy {
			n += int(of.open)
		}
		if n > 0 && age < f.config.Drain {
			connections += n
			continue
		}
		if idle[key] = true; n > 0 {
			f.log.Warn("connections of the previous mode end: the deadline has passed", zap.Stringer("virtualServer", key), zap.Int("connections", n))
		}
	}
	if err := f.remove(idle); err != nil {
		return connections, false, err
	}
	if len(f.left.servers.keys) > 0 {
		return connections, false, nil
	}
	err = errors.Join(f.left.deleteRoutes(), f.left.removeSets())
	if f.attempts++; errors.Is(err, errSetInUse) && f.attempts < busyAttempts {
		return 0, false, nil // until the rules that use it are deleted
	}
	return 0, true, err
}

// remove deletes virtual servers, the routes of their VIPs, and their conntrack entries.
func (f *leavingFamily) remove(servers map[serverKey]bool) error {
	if len(servers) == 0 {
		return nil
	}
	for key := range servers {
		if err := f.kernel.Delete(key); err != nil {
			return fmt.Errorf("delete virtual server %v: %w", key, err)
		}
	}
	vips := maps.Clone(f.left.vips.keys)
	for key := range f.left.servers.keys {
		if !servers[key] {
			delete(vips, key.VIP)
		}
	}
	return f.left.remove(servers, vips)
}
