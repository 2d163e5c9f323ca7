package hostile

import (
	"context"
	"flag"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
	"github.com/serviceplane/serviceplane/userspace"
)

// The defaults are a short run.
var (
	part  = flag.Int("hostile.part", 64, "engines get this part of each object; 1 for all of it")
	only  = flag.String("hostile.only", "", "only objects whose names begin so")
	draws = flag.Int("hostile.objects", 1, "how many objects a kernel gets, of all")
)

// planners are all engines. What they plan needs no kernel.
func planners(t *testing.T) map[string]proxier.Engine {
	t.Helper()
	made := map[string]proxier.Engine{}
	add := func(name string, p proxier.Engine, err error) {
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		made[name] = p
	}
	nft, err := nftables.NewEngine(nftables.Config{}, v1.IPv4Protocol, proxier.Deps{})
	add("nftables", nft, err)
	ipt, err := iptables.NewEngine(iptables.Config{}, v1.IPv4Protocol, proxier.Deps{})
	add("iptables", ipt, err)
	vs, err := ipvs.NewEngine(ipvs.Config{}, v1.IPv4Protocol, proxier.Deps{})
	add("ipvs", vs, err)
	portals := func(family v1.IPFamily) (proxier.Engine, error) {
		return nftables.NewEngine(nftables.Config{}, family, proxier.Deps{})
	}
	user, err := userspace.NewEngine(userspace.Config{Portals: portals}, v1.IPv4Protocol, proxier.Deps{})
	add("userspace", user, err)
	return made
}

// TestEveryEnginesPlanIsInProportion: what an engine plans, and what it allocates for it, is in proportion to the pairs
// and items of the Update, and the other Service is in it. With the race detector, sync.Pool drops
// a part of what it gets, and an engine allocates half as much again.
func TestEveryEnginesPlanIsInProportion(t *testing.T) {
	const letters, bytes, fixed = 1 << 9, 1 << 13, 1 << 18 // for each item, and for the rest
	for _, o := range all(*part) {
		t.Run(o.name, func(t *testing.T) {
			p := newPlane(t)
			p.take(&o)
			p.Services.Update(nil, neighbour())
			p.Endpoints.EndpointSliceUpdate(neighbourSlice("11.255.0.2"), false)
			u := p.next(t)
			c := costOf(&u)
			items := c.ports + c.frontends + c.denied + c.endpoints + c.pairs + c.sources
			for name, engine := range planners(t) {
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				text, err := engine.Abilities().Plan(u)
				runtime.ReadMemStats(&after)
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
				allocated := int(after.TotalAlloc - before.TotalAlloc)
				t.Logf("%s: %d items, %d letters (%d for each), %d bytes allocated (%d for each)", name, items, len(text), len(text)/items, allocated, allocated/items)
				if len(text) > letters*items+fixed || allocated > bytes*items+fixed {
					t.Errorf("%s plans %d letters and allocates %d bytes for %d items, want %d and %d for each at most", name, len(text), allocated, items, letters, bytes)
				}
				if !strings.Contains(text, "11.255.0.2") {
					t.Errorf("%s does not plan the other Service", name)
				}
			}
		})
	}
}

// factory makes a Provider.
type factory func(proxier.Config, proxier.Deps) (*proxier.Proxier, error)

// kernels are the engines whose rules any kernel takes.
func kernels() map[string]factory {
	ipt := func(variant iptables.Variant) factory {
		return func(c proxier.Config, d proxier.Deps) (*proxier.Proxier, error) {
			return iptables.New(iptables.Config{Config: c, Variant: variant}, d)
		}
	}
	return map[string]factory{
		"nftables": func(c proxier.Config, d proxier.Deps) (*proxier.Proxier, error) {
			return nftables.New(nftables.Config{Config: c}, d)
		},
		"iptables, nft":    ipt(iptables.VariantNFT),
		"iptables, legacy": ipt(iptables.VariantLegacy),
	}
}

// writes are those of the syncs of IPv4 since they were read.
type writes struct {
	mu  sync.Mutex
	sum int
}

func (w *writes) ObserveSync(s proxier.SyncReport) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s.Family == v1.IPv4Protocol {
		w.sum += s.Apply.Writes
	}
}

func (w *writes) read() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	sum := w.sum
	w.sum = 0
	return sum
}

// TestTheKernelTakesTheObjects: in the same sync as a tenant's objects, another Service gets its new endpoint,
// and clients reach it. What the engine writes is in proportion. The same holds when the objects are deleted.
func TestTheKernelTakesTheObjects(t *testing.T) {
	seed := rand.Uint64()
	for name, create := range kernels() {
		t.Run(name, func(t *testing.T) {
			t.Logf("seed %d", seed)
			world := proxiertest.NewTopology(t)
			config := world.Config()
			config.Runner = runner.Options{MinInterval: runner.Unlimited}
			written := &writes{}
			p, err := create(config, proxier.Deps{Observer: written})
			netnstest.Check(t, err)
			ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
			var running sync.WaitGroup
			running.Go(func() {
				if err := p.Run(ctx); err != nil {
					t.Errorf("Run: %v", err)
				}
			})
			t.Cleanup(func() { cancel(); running.Wait() })
			p.OnServiceAdd(neighbour())
			turn := 0
			var was *discovery.EndpointSlice
			// follows gives the other Service an endpoint, and asks it.
			follows := func(what string, c *cost) {
				turn++
				pod := world.LocalPods[turn%2]
				is := neighbourSlice(pod.Addr(v1.IPv4Protocol).String())
				p.OnEndpointSliceUpdate(was, is)
				was = is
				if err := proxiertest.Sync(t.Context(), p); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				answer, err := world.LocalPods[2].Ask(t.Context(), "tcp", netip.MustParseAddrPort(neighbourVIP+":80"), proxiertest.AskOptions{Timeout: 30 * time.Second})
				if err != nil || answer.Server != pod.Name {
					t.Errorf("%s: the other Service is answered by %q, %v; want %s", what, answer.Server, err, pod.Name)
				}
				n := written.read()
				t.Logf("%s: %+v, %d writes", what, *c, n)
				if most := 8*(c.ports+c.frontends+c.denied+c.endpoints+c.pairs+c.sources) + 64; n > most {
					t.Errorf("%s: %d writes for %+v, want %d at most", what, n, *c, most)
				}
			}
			p.OnServiceSynced()
			p.OnEndpointSlicesSynced()
			follows("before", &cost{frontends: 100}) // rules that are always there
			drawn := slices.DeleteFunc(all(*part), func(o objects) bool { return !strings.HasPrefix(o.name, *only) })
			rand.New(rand.NewPCG(seed, 0)).Shuffle(len(drawn), func(i, k int) { drawn[i], drawn[k] = drawn[k], drawn[i] })
			for _, o := range drawn[:min(*draws, len(drawn))] {
				plane := newPlane(t)
				plane.take(&o)
				u := plane.next(t)
				c := costOf(&u)
				for _, s := range o.services {
					p.OnServiceAdd(s)
				}
				for _, s := range o.slices {
					p.OnEndpointSliceAdd(s)
				}
				follows(o.name, &c)
				for _, s := range o.services {
					p.OnServiceDelete(s)
				}
				for _, s := range o.slices {
					p.OnEndpointSliceDelete(s)
				}
				follows(o.name+", deleted", &c)
			}
			if err := proxiertest.Sync(t.Context(), p); err != nil {
				t.Error(err)
			}
		})
	}
}
