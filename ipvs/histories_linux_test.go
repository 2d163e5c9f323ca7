package ipvs

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	histories "github.com/serviceplane/serviceplane/proxiertest/history"
)

// TestHistories runs random histories of the cluster, the process and the kernel against an
// IPVS in memory: see package history.
func TestHistories(t *testing.T) { t.Parallel(); histories.Test(t, 10, 2, historyPlanes) }

// TestEachCallOfAHistory lets each call to IPVS, the device and the rules fail.
func TestEachCallOfAHistory(t *testing.T) { t.Parallel(); histories.TestEachCall(t, historyPlanes) }

// TestHistoriesCatchPlantedBugs checks the histories themselves.
func TestHistoriesCatchPlantedBugs(t *testing.T) {
	t.Parallel()
	histories.TestPlanted(t, 1, historyPlanes)
}

func historyPlanes(t *testing.T, seed uint64) (plane, fresh histories.Plane) {
	t.Helper()
	shared := proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}
	shared.Masquerade.All = seed%5 == 0
	return &historyPlane{ns: netnstest.New(t), shared: shared, node: newFakeNode(), tb: t},
		&historyPlane{ns: netnstest.New(t), shared: shared, node: newFakeNode(), tb: t}
}

// historyPlane is a node in memory for histories.
type historyPlane struct {
	tb     testing.TB
	ns     *netns.NS
	shared proxier.Config

	mu   sync.Mutex // guards what is in node
	node *node
}

// Config implements history.Plane.
func (p *historyPlane) Config() proxier.Config {
	c := p.shared
	c.NetNS = p.ns.Path()
	return c
}

// Engines implements history.Plane.
func (p *historyPlane) Engines(config proxier.Config, calls *histories.Calls) (map[v1.IPFamily]proxier.Engine, error) {
	c := calledNode{p, calls}
	e := p.node.engine(p.tb, func(own *Config) { own.Config = config })
	e.rules = &guardedRules{rules: calledRules{p.node.rules, c}, engine: e}
	e.system.kernel = func() (kernel, error) { return calledKernel{c}, nil }
	e.system.device = func() (vipDevice, error) { return calledDevice{p.node.device, c}, nil }
	return map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: e}, nil
}

// Damage implements history.Plane: another program changes virtual servers.
func (p *historyPlane) Damage(number int, _ *histories.Objects) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.node.kernel
	keys := slices.SortedFunc(maps.Keys(k.virtuals), func(a, b serverKey) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	if len(keys) == 0 {
		return
	}
	key := keys[number/4%len(keys)]
	switch number % 4 {
	case 0:
		clear(k.virtuals)
	case 1:
		delete(k.virtuals, key)
	case 2:
		clear(k.virtuals[key].reals)
	default:
		for real, weight := range k.virtuals[key].reals {
			if weight > 0 { // what drains at an address of the node may be another program's
				k.virtuals[key].reals[real] = 7
			}
		}
	}
}

// Kernel implements history.Plane. It leaves out what drains.
func (p *historyPlane) Kernel() (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var lines []string
	for key, v := range p.node.kernel.virtuals {
		for real, weight := range v.reals {
			if weight > 0 {
				lines = append(lines, fmt.Sprintf("%v %+v -> %v weight %d, bound %t", key, v.settings, real, weight, p.node.device.here[key.VIP]))
			}
		}
	}
	for name, s := range p.node.rules.services {
		for i := range s.Frontends {
			f := s.Frontends[i]
			lines = append(lines, fmt.Sprintf("rules %v %v %v affinity %v of %v/%v", s.Key(&f), f, f.VIP.IsValid() && p.node.device.here[f.VIP], s.Affinity, name, name.Protocol))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n"), nil
}

// calledNode lets a history decide about each call, one at a time.
type calledNode struct {
	plane *historyPlane
	calls *histories.Calls
}

func (c calledNode) do(call func() error) error {
	return c.calls.Do(func() error {
		c.plane.mu.Lock()
		defer c.plane.mu.Unlock()
		return call()
	})
}

func get[T any](c calledNode, call func() (T, error)) (value T, err error) {
	err = c.do(func() error {
		value, err = call()
		return err
	})
	return value, err
}

type calledKernel struct{ calledNode }

func (k calledKernel) fake() *fakeKernel { return k.plane.node.kernel }

func (k calledKernel) List() (map[serverKey]*virtual, error) { return get(k.calledNode, k.fake().List) }

func (k calledKernel) ListFast() (map[serverKey]*virtual, error) {
	return get(k.calledNode, k.fake().ListFast)
}

func (k calledKernel) Get(key serverKey) (*virtual, error) {
	return get(k.calledNode, func() (*virtual, error) { return k.fake().Get(key) })
}

func (k calledKernel) Loads(key serverKey) (loads, error) {
	return get(k.calledNode, func() (loads, error) { return k.fake().Loads(key) })
}

func (k calledKernel) Put(key serverKey, s settings, isNew bool) error {
	return k.do(func() error { return k.fake().Put(key, s, isNew) })
}

func (k calledKernel) Delete(key serverKey) error {
	return k.do(func() error { return k.fake().Delete(key) })
}

func (k calledKernel) PutReal(key serverKey, real netip.AddrPort, weight int, how ForwardingMethod, isNew bool) error {
	return k.do(func() error { return k.fake().PutReal(key, real, weight, how, isNew) })
}

func (k calledKernel) DeleteReal(key serverKey, real netip.AddrPort) error {
	return k.do(func() error { return k.fake().DeleteReal(key, real) })
}
func (k calledKernel) setTimeouts(*Config) error { return k.do(func() error { return nil }) }
func (k calledKernel) Close()                    {}

type calledDevice struct {
	*fakeDevice

	calledNode calledNode
}

func (d calledDevice) ensure() error { return d.calledNode.do(d.fakeDevice.ensure) }
func (d calledDevice) find() error   { return d.calledNode.do(d.fakeDevice.find) }
func (d calledDevice) delete() error { return d.calledNode.do(d.fakeDevice.delete) }
func (d calledDevice) addresses() (here map[netip.Addr]bool, elsewhere []netip.Addr, err error) {
	err = d.calledNode.do(func() error {
		here, elsewhere, err = d.fakeDevice.addresses()
		return err
	})
	return here, elsewhere, err
}

func (d calledDevice) add(addrs []netip.Addr) error {
	return d.calledNode.do(func() error { return d.fakeDevice.add(addrs) })
}

func (d calledDevice) remove(addrs []netip.Addr) error {
	return d.calledNode.do(func() error { return d.fakeDevice.remove(addrs) })
}

type calledRules struct {
	*fakeRules

	calledNode calledNode
}

func (r calledRules) Apply(ctx context.Context, u desired.Update, behind nftables.Behind) (proxier.Result, error) {
	return proxier.Result{}, r.calledNode.do(func() error {
		_, err := r.fakeRules.Apply(ctx, u, behind)
		return err
	})
}

func (r calledRules) Frontends(ctx context.Context) (map[desired.Key]bool, error) {
	return get(r.calledNode, func() (map[desired.Key]bool, error) { return r.fakeRules.Frontends(ctx) })
}

// Verify does not compare the keys that are refused while they drain: another process learns
// them when it programs.
func (r calledRules) Verify(ctx context.Context, u desired.Update, _ nftables.Behind) (proxier.Verification, error) {
	return get(r.calledNode, func() (proxier.Verification, error) { return r.fakeRules.Verify(ctx, u, r.behind) })
}

func (r calledRules) Cleanup(ctx context.Context) error {
	return r.calledNode.do(func() error { return r.fakeRules.Cleanup(ctx) })
}
