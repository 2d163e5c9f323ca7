package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// hookedTool runs hooks of the test beside the real programs: each hook runs once, before a
// program starts or after it has ended.
type hookedTool struct {
	*tool

	hooks *hooks
}

type hooks struct {
	all sync.Map // of func() by moment
	// saves counts the reads of tables.
	saves atomic.Int32
	// told counts the reports of damage.
	told   atomic.Int32
	engine *engine
}

// readsOfChanges lets Watch compare no texts any more, and returns the function that counts the
// reads of tables from now on.
func (h *hooks) readsOfChanges() func() int32 {
	h.engine.mu.Lock()
	defer h.engine.mu.Unlock()
	if w, ok := h.engine.guard.watcher.(*legacyWatcher); ok {
		w.confirmation = confirmation{at: time.Now(), took: time.Hour}
	}
	before := h.saves.Load()
	return func() int32 { return h.saves.Load() - before }
}

func (h *hooks) set(moment string, do func()) { h.all.Store(moment, do) }

func (h *hooks) run(moment string) {
	if hook, ok := h.all.LoadAndDelete(moment); ok {
		hook.(func())()
	}
}

func (t *hookedTool) save(ctx context.Context, table string) ([]byte, error) {
	t.hooks.saves.Add(1)
	defer t.hooks.run("after save")
	return t.tool.save(ctx, table)
}

func (t *hookedTool) restore(ctx context.Context, input []byte) error {
	t.hooks.run("before restore")
	defer t.hooks.run("after restore")
	return t.tool.restore(ctx, input)
}

// anonymous does not report who did the damage, so that no backoff delays repairs.
type anonymous struct {
	*engine

	told *atomic.Int32
}

func (a *anonymous) Abilities() proxier.Abilities {
	can := a.engine.Abilities()
	can.Watch = func(ctx context.Context, damaged func(proxier.Damage)) error {
		return a.Watch(ctx, func(proxier.Damage) {
			a.told.Add(1)
			damaged(proxier.Damage{})
		})
	}
	return can
}

// startHooked runs a Provider of both families; the hooks are for IPv4.
func (w *world) startHooked() (*proxier.Proxier, *hooks) {
	w.t.Helper()
	config, h := w.config().WithDefaults(), &hooks{}
	p, err := lightdeps.Provider(config.Config, proxier.Deps{}, func(family v1.IPFamily) (*anonymous, error) {
		e, err := newEngine(config, family, proxier.Deps{})
		if err != nil {
			return nil, err
		}
		e.watchPeriod /= 50
		if family != v1.IPv4Protocol {
			return &anonymous{e, new(atomic.Int32)}, nil
		}
		h.engine = e
		open := e.open
		e.open = func(ctx context.Context) (kernel, error) {
			k, err := open(ctx)
			if err != nil {
				return nil, err
			}
			return &hookedTool{k.(*tool), h}, nil
		}
		return &anonymous{e, &h.told}, nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	poll.Background(w.t, p.Run)
	add(p, 0, 6)
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	w.sync(p)
	return p, h
}

// saved4 returns the rules of both IPv4 tables, sorted by chain, without the chain LOST.
func (w *world) saved4() string {
	var lines []string
	for _, table := range []string{"nat", "filter"} {
		for line := range strings.Lines(w.run("iptables-"+string(w.variant)+"-save", "-t", table)) {
			line, _, _ = strings.Cut(strings.TrimSpace(line), " [")
			if (strings.HasPrefix(line, ":") || strings.HasPrefix(line, "-A ")) && !strings.Contains(line, "LOST") {
				lines = append(lines, table+" "+line)
			}
		}
	}
	chain := func(line string) string {
		fields := strings.Fields(line)
		return fields[0] + strings.TrimPrefix(fields[1], ":") + fields[min(2, len(fields)-1)]
	}
	slices.SortStableFunc(lines, func(a, b string) int { return cmp.Compare(chain(a), chain(b)) })
	return strings.Join(lines, "\n")
}

// change replaces the endpoint of a Service that the damage does not concern.
func (w *world) change(p *proxier.Proxier, to string) error {
	p.OnEndpointSliceAdd(slice("web-5", discovery.AddressTypeIPv4, to))
	return p.Sync(w.t.Context())
}

// TestDamageBesideASyncIsRepaired: any damage, at any moment of a sync of another Service,
// is repaired and reported.
func TestDamageBesideASyncIsRepaired(t *testing.T) {
	n := chainNames{proxier.DefaultNames().ChainPrefix}
	web := n.cluster(identity(portName("test", "web-0", "http")))
	damages := []struct {
		what string
		do   [][]string
	}{
		{"a table is flushed", [][]string{{"-t", "nat", "-F"}}},
		{"the other table is flushed", [][]string{{"-F"}}},
		{"all is deleted", [][]string{{"-t", "nat", "-F"}, {"-t", "nat", "-X"}}},
		{"a chain is flushed", [][]string{{"-t", "nat", "-F", web}}},
		{"a chain is deleted", [][]string{{"-t", "nat", "-F", n.mark()}, {"-t", "nat", "-F", n.services()}, {"-t", "nat", "-F", n.nodePorts()}}},
		{"a rule is deleted", [][]string{{"-t", "nat", "-D", n.postrouting(), "1"}}},
		{"a rule is added", [][]string{{"-t", "nat", "-A", n.mark(), "-j", "RETURN"}}},
		{"a jump is deleted", [][]string{{"-t", "nat", "-D", "PREROUTING", "1"}}},
		{"a rule is replaced", [][]string{{"-t", "nat", "-R", web, "1", "-j", "RETURN"}}},
		{"a rule is replaced by one of its size", [][]string{{"-t", "nat", "-R", n.mark(), "1", "-j", "MARK", "--or-mark", "0x1"}}},
		{"a rule of the tree is replaced", [][]string{{"-t", "nat", "-R", n.services(), "1", "-j", "RETURN"}}},
		{"a rule goes, and one of its size comes", [][]string{{"-t", "nat", "-D", n.mark(), "1"}, {"-t", "nat", "-A", n.mark(), "-j", "MARK", "--or-mark", "0x1"}}},
		{"a jump is replaced", [][]string{{"-t", "nat", "-R", "PREROUTING", "1", "-p", "sctp", "-j", n.services()}}},
		{"a jump leads elsewhere", [][]string{{"-t", "nat", "-R", "OUTPUT", "1", "-j", n.mark()}}},
		{"a rule of the other table is replaced", [][]string{{"-R", n.forward(), "1", "-j", "RETURN"}}},
		{"a chain is renamed", [][]string{{"-t", "nat", "-E", web, "LOST"}}},
	}
	moments := map[string]func(h *hooks, damage, change func()){
		"before":                  func(_ *hooks, damage, change func()) { damage(); change() },
		"between check and write": func(h *hooks, damage, change func()) { h.set("before restore", damage); change() },
		"between write and check": func(h *hooks, damage, change func()) { h.set("after restore", damage); change() },
		"after":                   func(_ *hooks, damage, change func()) { change(); damage() },
		"before, and after":       func(_ *hooks, damage, change func()) { damage(); change(); damage() },
		"on both sides of the write": func(h *hooks, damage, change func()) {
			h.set("before restore", damage)
			h.set("after restore", damage)
			change()
		},
		"within the repair": func(h *hooks, damage, change func()) { // after the repair has read, and again after it has written
			damage()
			h.set("after save", damage)
			h.set("after restore", damage)
			change()
		},
	}
	for _, variant := range variants(t) {
		for moment, order := range moments {
			t.Run(string(variant)+"/"+moment, func(t *testing.T) {
				t.Parallel()
				w := &world{t, netnstest.New(t), variant, proxier.DefaultNames()}
				p, h := w.startHooked()
				ends := [2]string{"10.244.5.8", "10.244.5.9"}
				var want [2]string
				for i, end := range ends {
					if err := w.change(p, end); err != nil {
						t.Fatal(err)
					}
					want[i] = w.saved4()
				}
				for i, d := range damages {
					told := h.told.Load()
					var done atomic.Bool
					do := func() {
						for _, args := range d.do {
							if err := w.try(args...); err == nil { // fails for what is already deleted
								done.Store(true)
							}
						}
					}
					order(h, do, func() {
						if err := w.change(p, ends[i%2]); err != nil {
							t.Logf("%s: sync: %v", d.what, err) // it is retried
						}
					})
					w.becomes(d.what, want[i%2])
					if done.Load() && !poll.Soon(func() bool { return h.told.Load() > told }) {
						t.Fatalf("%s: repaired, but not reported", d.what)
					}
				}
			})
		}
	}
}

func (w *world) try(args ...string) error {
	return w.ns.Do(func() error {
		o, err := (toolConfig{timeout: time.Minute}).run(w.t.Context(), 0, nil, append([]string{"iptables-" + string(w.variant), "-w"}, args...)...)
		return errors.Join(err, o.err)
	})
}

// becomes waits until the tables are repaired.
func (w *world) becomes(after, want string) {
	w.t.Helper()
	if !poll.Soon(func() bool { return w.saved4() == want }) {
		w.t.Fatalf("%s: not repaired (-want +now):\n%s", after, gocmp.Diff(want, w.saved4()))
	}
}

// TestChangesAreWrittenWithoutReading: without interference no change reads a table,
// although the engine of the other family writes to nf_tables at the same time.
func TestChangesAreWrittenWithoutReading(t *testing.T) {
	for _, variant := range variants(t) {
		t.Run(string(variant), func(t *testing.T) {
			w := &world{t, netnstest.New(t), variant, proxier.DefaultNames()}
			p, h := w.startHooked()
			reads := h.readsOfChanges()
			for i := range 10 {
				add(p, 6+3*i, 9+3*i)
				w.sync(p)
			}
			for i := range 20 {
				p.OnServiceDelete(proxiertest.Service("test", fmt.Sprintf("web-%d", i)))
				w.sync(p)
			}
			if more := reads(); more != 0 {
				t.Errorf("tables were read %d times, want 0", more)
			}
		})
	}
}

// TestOthersCauseNoFullSync: changes of other programs to their own rules, during and
// between the engine's writes, cause no read of a table.
func TestOthersCauseNoFullSync(t *testing.T) {
	for _, variant := range variants(t) {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			w := &world{t, netnstest.New(t), variant, proxier.DefaultNames()}
			four, six := "iptables-"+string(variant), "ip6tables-"+string(variant)
			w.run(four, "-t", "nat", "-N", "OTHER")
			p, h := w.startHooked()
			reads := h.readsOfChanges()
			for i, command := range [][]string{
				{four, "-t", "nat", "-A", "OTHER", "-p", "tcp", "-j", "RETURN"},
				{four, "-t", "nat", "-R", "OTHER", "1", "-p", "udp", "-j", "RETURN"},
				{four, "-t", "nat", "-A", "OTHER", "-j", chainNames{w.names.ChainPrefix}.mark()},
				{four, "-t", "nat", "-I", "PREROUTING", "1", "-j", "OTHER"},
				{four, "-t", "nat", "-I", "PREROUTING", "1", "-p", "tcp", "-j", "ACCEPT"},
				{four, "-t", "nat", "-D", "PREROUTING", "1"},
				{four, "-t", "nat", "-N", "OTHER-2"},
				{four, "-t", "nat", "-X", "OTHER-2"},
				{four, "-P", "FORWARD", "DROP"},
				{four, "-t", "mangle", "-N", "SPL-SERVICES"},
				{six, "-t", "nat", "-N", "OTHER"},
				{six, "-t", "nat", "-A", "OTHER", "-j", "RETURN"},
				{"nft", "add table ip other { set s { type mark; elements = { 1, 2 }; }; chain SPL-SERVICES { accept; }; }"},
				{"nft", "flush table ip other; delete table ip other"},
			} {
				do := func() { w.run(command[0], command[1:]...) }
				moments := []string{"before restore", "after restore"}
				if h.set(moments[i%2], do); i%3 == 0 {
					h.run(moments[i%2]) // between the writes
				}
				if err := w.change(p, fmt.Sprintf("10.244.5.%d", 20+i)); err != nil {
					t.Fatal(err)
				}
				if more := reads(); more != 0 {
					t.Fatalf("%s: tables were read %d times, want 0", command, more)
				}
			}
		})
	}
}
