package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/serviceplane/serviceplane/desired"
)

// TestCountsOverHistories: over random histories of endpoints, frontends that move to another
// Service, readings, full syncs and restarts, no connection is lost or counted twice. The kernel
// keeps the counters of some deleted real servers.
func TestCountsOverHistories(t *testing.T) {
	for seed := range uint64(100) {
		h := &countsHistory{t: t, dice: rand.New(rand.NewPCG(seed, 0)), n: newFakeNode(), sent: map[string]uint64{}, services: map[string]*desired.Service{}}
		h.restart()
		for range 60 {
			if h.step(); t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
	}
}

type countsHistory struct {
	t        *testing.T
	dice     *rand.Rand
	n        *node
	e        *engine
	services map[string]*desired.Service
	sent     map[string]uint64 // by name, since the last restart
}

// restart finds no real servers that the kernel keeps for connections: a successor would count
// what they had.
func (h *countsHistory) restart() {
	k := h.n.kernel
	clear(k.kept)
	maps.DeleteFunc(k.counted, func(c counterKey, _ uint32) bool {
		v := k.virtuals[c.server]
		return v == nil || !slices.Contains(slices.Collect(maps.Keys(v.reals)), c.real)
	})
	h.e, h.sent = h.n.engine(h.t, func(c *Config) { c.CountConnections = true }), map[string]uint64{}
	mustApply(h.t, h.e, full(slices.Collect(maps.Values(h.services))...))
}

// draw is a service port with random endpoints. Two names share a VIP, which only one has.
func (h *countsHistory) draw(name string, vip int, protocol desired.Protocol) *desired.Service {
	var endpoints []string
	for i := range 5 {
		if h.dice.IntN(2) == 0 {
			endpoints = append(endpoints, fmt.Sprintf("192.0.2.%d:8080", 10+i))
		}
	}
	s := service(name, fmt.Sprintf("198.51.100.%d", vip), endpoints...)
	s.Protocol = protocol
	if h.dice.IntN(2) == 0 {
		s = withFrontend(s, desired.ExternalIP, fmt.Sprintf("203.0.113.%d", vip), 80)
	}
	return s
}

func (h *countsHistory) step() {
	const pairs = 3
	pair := h.dice.IntN(pairs)
	protocol := []desired.Protocol{desired.TCP, desired.UDP}[pair%2]
	mine, others := fmt.Sprintf("web-%d", pair), fmt.Sprintf("other-%d", pair)
	if h.dice.IntN(2) == 0 {
		mine, others = others, mine
	}
	switch h.dice.IntN(8) {
	case 0, 1, 2: // another set of endpoints, perhaps of the other Service
		u := partial(h.draw(mine, pair, protocol))
		h.services[mine] = u.Changes[0].After
		if h.services[others] != nil {
			u.Changes = append(u.Changes, removal(others).Changes...)
			delete(h.services, others)
			delete(h.sent, others)
		}
		mustApply(h.t, h.e, u)
	case 3:
		mustApply(h.t, h.e, removal(mine))
		delete(h.services, mine)
		delete(h.sent, mine)
	case 4:
		mustApply(h.t, h.e, full(slices.Collect(maps.Values(h.services))...))
	case 5:
		deleteDrainedAfter(h.e, statsDelay)
	case 6:
		if h.dice.IntN(4) == 0 {
			h.restart()
		}
	default:
		h.check()
	}
	h.connect()
}

func (h *countsHistory) connect() {
	for name, s := range h.services {
		for i := range s.Frontends {
			key := keyOf(s.Protocol, netip.AddrPortFrom(s.Frontends[i].VIP, s.Frontends[i].Port))
			for _, real := range s.Cluster.Slice() {
				for range h.dice.IntN(3) {
					h.n.kernel.connect(key, real)
					h.sent[name]++
				}
				h.n.kernel.kept[counterKey{key, real}] = h.dice.IntN(2) == 0
				if h.dice.IntN(2) == 0 {
					h.n.kernel.hangUp(key, real)
				}
			}
		}
	}
	if h.dice.IntN(3) == 0 {
		h.check()
	}
}

func (h *countsHistory) check() {
	h.t.Helper()
	got, err := h.e.Counts(h.t.Context())
	if err != nil || got.Since.IsZero() {
		h.t.Fatalf("counts since %v: %v", got.Since, err)
	}
	have := map[string]uint64{}
	for _, p := range got.ServicePorts {
		have[p.Name.Name] = p.Connections
		for _, e := range p.Endpoints {
			if s := h.services[p.Name.Name]; s == nil || !s.Cluster.Has(e.Endpoint) {
				h.t.Errorf("%s has connections to %v, which is not its endpoint", p.Name, e.Endpoint)
			}
		}
	}
	maps.DeleteFunc(have, func(_ string, n uint64) bool { return n == 0 })
	want := maps.Clone(h.sent)
	maps.DeleteFunc(want, func(_ string, n uint64) bool { return n == 0 })
	if !maps.Equal(have, want) {
		h.t.Errorf("counted %v, want %v", have, want)
	}
}

func TestWithoutTheSettingNothingIsCounted(t *testing.T) {
	e := newFakeNode().engine(t)
	mustApply(t, e, full(service("web", "198.51.100.1", "192.0.2.10:8080")))
	if _, err := e.Counts(t.Context()); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("counts = %v, want ErrUnsupported", err)
	}
}

func TestCountersWrapAndBeginAgain(t *testing.T) {
	for _, c := range []struct {
		last  uint64
		value uint32
		want  uint64
	}{
		{0, 5, 5},
		{5, 9, 9},
		{9, 3, 3},
		{math.MaxUint32 - 1, 4, 1<<32 + 4},
		{1<<32 + 4, 6, 1<<32 + 6},
		{1<<33 - 1, 0, 1 << 33},
		{1<<33 + 8, 2, 2},
	} {
		if got := widen(c.last, c.value); got != c.want {
			t.Errorf("%d after %d = %d, want %d", c.value, c.last, got, c.want)
		}
	}
}
