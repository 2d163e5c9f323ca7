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
		e, err := NewEngine(config, family, deps)
		if err != nil {
			return nil, err
		}
		l.families = append(l.families, &leavingFamily{engine: e, log: e.log})
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
	defer func() {
		for _, f := range l.families {
			f.close()
		}
	}()
	var busy []*leavingFamily
	for _, f := range l.families {
		if err := f.begin(ctx); err != nil {
			errs = append(errs, fmt.Errorf("leave ipvs: %s: %w", f.engine.family, err))
			continue
		}
		busy = append(busy, f)
	}
	began := time.Now()
	for len(busy) > 0 {
		started, total := time.Now(), 0
		busy = slices.DeleteFunc(busy, func(f *leavingFamily) bool {
			n, done, err := f.step(time.Since(began))
			total += n
			if done && err != nil {
				errs = append(errs, fmt.Errorf("leave ipvs: %s: %w", f.engine.family, err))
			} else if err != nil {
				f.log.Warn("virtual servers of the previous mode are not deleted: retrying", zap.Error(err))
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

// leavingFamily removes the objects of one IP family.
type leavingFamily struct {
	// engine knows which objects belong to the instance. It writes nothing by itself.
	engine *Engine
	log    *zap.Logger
	left   *left
	// servers are the virtual servers that still have connections.
	servers map[serverKey]bool
	// attempts counts those to delete ipsets.
	attempts int
}

func (f *leavingFamily) close() {
	f.engine.mu.Lock()
	defer f.engine.mu.Unlock()
	f.engine.disconnect() // closes left, too
	_ = errors.Join(f.engine.rules.Close(), f.engine.firewall.close())
}

// begin stops new connections to the virtual servers, and replaces the addresses of the
// device by routes. What it needs to continue after a crash is in the kernel first.
func (f *leavingFamily) begin(ctx context.Context) error {
	e := f.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	var err error
	if f.left, err = openLeft(e); err != nil {
		return err
	}
	e.left = f.left // observe needs it
	if f.servers, err = f.find(ctx); err != nil {
		return err
	}
	vips := map[netip.Addr]bool{}
	for key := range f.servers {
		if addr := key.addr.Addr(); e.boundVIPs[addr] || f.left.vips[addr] {
			vips[addr] = true
		}
	}
	if err := f.left.add(f.servers, vips); err != nil {
		return err
	}
	if err := f.stopNew(); err != nil {
		return err
	}
	if err := f.left.addRoutes(vips, e.local); err != nil {
		return err
	}
	if err := errors.Join(e.removeDevice(), e.rules.Cleanup(ctx), e.firewall.cleanup(ctx)); err != nil {
		return err
	}
	if len(f.servers) > 0 {
		f.log.Info("connections of the previous mode may end: new ones use the new rules",
			zap.Int("virtualServers", len(f.servers)), zap.Duration("deadline", e.config.Drain))
	}
	return nil
}

// find returns the virtual servers of the instance, and of kube-proxy if it has its names.
func (f *leavingFamily) find(ctx context.Context) (map[serverKey]bool, error) {
	e := f.engine
	if loaded, err := e.system.loaded(); err != nil || !loaded {
		return nil, err // opening IPVS would load the module
	}
	if err := e.openAll(); err != nil {
		return nil, err
	}
	if err := e.device.find(); err != nil {
		return nil, err
	}
	foreign, err := f.left.kubeProxyServers()
	if err != nil {
		return nil, err
	}
	e.claimed = foreign
	if err := e.observe(ctx); err != nil {
		return nil, err
	}
	servers := map[serverKey]bool{}
	for key := range e.table.virtuals {
		servers[key] = true
	}
	return servers, nil
}

// stopNew gives all real servers weight 0: connections continue, and new ones, which only
// come while no rule of the new mode is for them, are refused.
func (f *leavingFamily) stopNew() error {
	for _, key := range sortedKeys(f.servers) {
		server := f.engine.table.virtuals[key]
		for real, r := range server.reals {
			if r.weight == 0 {
				continue
			}
			if err := f.engine.kernel.PutReal(key, real, 0, server.forward, update); err != nil {
				return fmt.Errorf("drain %s: %w", object(key, real), err)
			}
		}
	}
	return nil
}

// step deletes what has no connections, or everything after the deadline. It returns how
// many connections are left.
func (f *leavingFamily) step(age time.Duration) (connections int, done bool, err error) {
	idle := map[serverKey]bool{}
	for key := range f.servers {
		busy, err := f.engine.kernel.Loads(key)
		if err != nil && !isGone(err) {
			return connections, false, fmt.Errorf("count connections of virtual server %v: %w", key, err)
		}
		n := 0
		for _, of := range busy {
			n += of.open
		}
		if n > 0 && age < f.engine.config.Drain {
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
	if len(f.servers) > 0 {
		return connections, false, nil
	}
	err = errors.Join(f.left.end(), f.left.removeSets())
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
		if err := f.engine.kernel.Delete(key); err != nil {
			return fmt.Errorf("delete virtual server %v: %w", key, err)
		}
	}
	vips := maps.Clone(f.left.vips)
	for key := range f.servers {
		if !servers[key] {
			delete(vips, key.addr.Addr())
		}
	}
	if err := f.left.remove(servers, vips); err != nil {
		return err
	}
	maps.DeleteFunc(f.servers, func(key serverKey, _ bool) bool { return servers[key] })
	return nil
}

func sortedKeys(keys map[serverKey]bool) []serverKey {
	return slices.SortedFunc(maps.Keys(keys), compareKeys)
}

// isGone reports that another program has deleted a virtual server.
func isGone(err error) bool { return errors.Is(err, unix.ESRCH) }
