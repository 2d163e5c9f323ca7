package proxiertest_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

type bucket struct {
	weight uint16
	zone   string
	local  bool
}

// flow leads to a group, or to those of its buckets that are on the node.
type flow struct {
	group  changetracker.ServicePortName
	scope  desired.Scope
	action desired.Action
}

// bridge is an engine with the tables of Open vSwitch: groups for service ports, flows for frontends.
type bridge struct {
	*rand.Rand
	*testing.T

	sick   bool
	fulls  int
	groups map[changetracker.ServicePortName]map[netip.AddrPort]bucket
	flows  map[desired.Key]flow
}

var errSick = errors.New("the switch is busy")

func (b *bridge) Apply(_ context.Context, u desired.Update) (result proxier.Result, err error) {
	if b.sick && b.IntN(6) == 0 {
		return result, errSick
	}
	if u.Full {
		b.fulls++
		b.groups, b.flows = map[changetracker.ServicePortName]map[netip.AddrPort]bucket{}, map[desired.Key]flow{}
	}
	failed := map[changetracker.ServicePortName]bool{}
	for _, c := range u.Changes {
		if b.sick && !u.Full && b.IntN(4) == 0 {
			failed[c.Name] = true
			result.Failed = append(result.Failed, &proxier.ServiceError{Name: c.Name, Err: errSick})
			continue
		}
		b.setBuckets(&u, &c)
		b.setFlows(&u, &c)
	}
	for _, key := range u.Gone {
		if left, there := b.flows[key]; there && !failed[left.group] {
			b.Errorf("%v of %v is deleted, and still exists", key, left.group)
		}
	}
	return result, nil
}

// setBuckets applies the trackers' changes alone, unless the update is full.
func (b *bridge) setBuckets(u *desired.Update, c *desired.Change) {
	if c.After == nil {
		delete(b.groups, c.Name)
		return
	}
	if b.groups[c.Name] == nil {
		b.groups[c.Name] = map[netip.AddrPort]bucket{}
	}
	source := c.Source
	if u.Full {
		source = &changetracker.PortChange{Added: u.Now.View().State().Endpoints(c.Name)}
	}
	if source != nil {
		for _, e := range source.Removed {
			delete(b.groups[c.Name], e.Addr)
		}
		b.addBuckets(c.Name, u.Now.View(), source.Added)
	}
}

func (b *bridge) addBuckets(name changetracker.ServicePortName, view changetracker.View, added []changetracker.Endpoint) {
	for _, e := range added {
		b.groups[name][e.Addr] = bucket{weight: max(e.Weight, 1), zone: e.Zone, local: view.Local(&e)}
	}
}

func (b *bridge) setFlows(u *desired.Update, c *desired.Change) {
	if was, ok := u.Was.Service(c.Name); ok && !u.Full {
		for _, f := range was.Frontends {
			key := was.Key(&f)
			if b.flows[key].group == c.Name {
				delete(b.flows, key)
			} else if _, taken := b.flows[key]; !taken {
				b.Errorf("%v should have had %v, and has not", c.Name, key)
			}
		}
	}
	if c.After != nil {
		b.addFlows(c.After)
	}
}

func (b *bridge) addFlows(s *desired.Service) {
	for _, f := range s.Frontends {
		b.flows[s.Key(&f)] = flow{group: s.Name, scope: f.Scope, action: f.Action}
	}
}

func (b *bridge) Cleanup(context.Context) error                 { clear(b.groups); clear(b.flows); return nil }
func (b *bridge) Close() error                                  { return nil }
func (b *bridge) Traits(*desired.Service) (none desired.Traits) { return none }
func (b *bridge) Abilities() (none proxier.Abilities)           { return none }

func fromScratch(p *proxier.Proxier) *bridge {
	b := &bridge{groups: map[changetracker.ServicePortName]map[netip.AddrPort]bucket{}, flows: map[desired.Key]flow{}}
	view := p.Programmed(v1.IPv4Protocol).For(p.Status().Node)
	for name := range view.State().All() {
		s, _ := p.Resolved(v1.IPv4Protocol).Service(name)
		b.addFlows(s)
		b.groups[name] = map[netip.AddrPort]bucket{}
		b.addBuckets(name, view, view.State().Endpoints(name))
	}
	return b
}

// TestGlueOfAnEngineWithFlows: whatever fails, the tables finally equal those of a new engine.
func TestGlueOfAnEngineWithFlows(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			b := &bridge{Rand: rand.New(rand.NewPCG(seed, 1)), T: t}
			config := proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}, Node: changetracker.Node{Name: "here"}, Runner: runner.Options{MinInterval: runner.Unlimited}}
			p, err := proxier.New(config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: b})
			if err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			defer synctest.Wait()
			defer stop()
			go func() { _ = p.Run(ctx) }()
			p.OnServiceSynced()
			p.OnEndpointSlicesSynced()
			for step := range 60 {
				b.change(p)
				b.sick = b.IntN(4) > 0
				if _ = p.Sync(ctx); b.sick {
					continue
				}
				synctest.Wait()
				if want := fromScratch(p); !reflect.DeepEqual(b.groups, want.groups) || !reflect.DeepEqual(b.flows, want.flows) {
					t.Fatalf("seed %d, step %d: groups\n%v\nand flows\n%v\nwant\n%v\nand\n%v", seed, step, b.groups, b.flows, want.groups, want.flows)
				}
			}
			if b.fulls > 30 {
				t.Errorf("seed %d: %d of 60 syncs were full", seed, b.fulls)
			}
		})
	}
}

func (b *bridge) change(p *proxier.Proxier) {
	synctest.Wait() // for requested syncs
	i := b.IntN(5)
	name := changetracker.ServicePortName{Protocol: v1.ProtocolTCP}
	name.Namespace, name.Name = "shop", string(rune('a'+i))
	switch b.IntN(10) {
	case 0:
		p.Tracker().Services.Delete(name.NamespacedName)
	case 1:
		p.OnNodeChange(changetracker.Node{Name: []string{"here", "there"}[b.IntN(2)]})
		synctest.Wait()
	case 2, 3, 4:
		_, _ = p.Tracker().Services.Set(name.NamespacedName, changetracker.ServicePort{
			Name: name, ClusterIP: netip.AddrFrom4([4]byte{10, 96, 0, byte(i)}), Port: uint16(80 + b.IntN(2)), ExternalPolicyLocal: b.IntN(2) == 0,
			ExternalIPs: [][]netip.Addr{nil, {netip.MustParseAddr("203.0.113.1")}}[b.IntN(2)], CreationTimestamp: time.Unix(int64(b.IntN(3)), 0),
		})
	default:
		var endpoints []changetracker.Endpoint
		for n := range 4 {
			if b.IntN(2) == 0 {
				endpoints = append(endpoints, changetracker.Endpoint{
					Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i), byte(n)}), 8080), Ready: true, Serving: true, Weight: uint16(b.IntN(4)), Zone: []string{"a", "b"}[b.IntN(2)], Node: []string{"here", "there"}[b.IntN(2)],
				})
			}
		}
		_, _ = p.Tracker().Endpoints.Set(name, endpoints...)
	}
}
