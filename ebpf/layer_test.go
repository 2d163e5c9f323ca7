package ebpf

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// memory is a kernel in memory, with programs that are in the middle of their work.
type memory struct {
	size    capacity
	leads   map[desired.Key]place
	ranges  map[place]endpointRange
	ends    []netip.AddrPort
	readers []*reader
	random  *rand.Rand
	check   func(r *reader, endpoint netip.AddrPort)
	fail    bool // the next change of frontends
}

// reader is a program that translates a socket, in the steps of sockets.c.
type reader struct {
	to    desired.Key
	began int // in the history
	place place
	ends  endpointRange
	step  int
}

func newMemory(random *rand.Rand, size capacity, check func(*reader, netip.AddrPort)) *memory {
	return &memory{size: size, leads: map[desired.Key]place{}, ranges: map[place]endpointRange{}, ends: make([]netip.AddrPort, size.endpoints), random: random, check: check}
}

func (m *memory) capacity() capacity { return m.size }

func (m *memory) frontends() (map[desired.Key]place, error) { return maps.Clone(m.leads), nil }

var errMemory = errors.New("refused")

func (m *memory) refuse() error {
	if m.fail {
		m.fail = false
		return errMemory
	}
	return nil
}

func (m *memory) putFrontends(frontends map[desired.Key]place) error {
	for key, to := range frontends {
		m.run()
		if err := m.refuse(); err != nil {
			return err
		}
		if _, there := m.leads[key]; !there && len(m.leads) == int(m.size.frontends) {
			return errMemory
		}
		m.leads[key] = to
	}
	return nil
}

func (m *memory) removeFrontends(keys []desired.Key) error {
	for _, key := range keys {
		m.run()
		if err := m.refuse(); err != nil {
			return err
		}
		delete(m.leads, key)
	}
	return nil
}

func (m *memory) rangeAt(at place) endpointRange { return m.ranges[at] }

func (m *memory) setRange(at place, p endpointRange) {
	m.run()
	m.ranges[at] = p
}

func (m *memory) setEndpoints(first uint32, endpoints desired.Endpoints) {
	for i, e := range endpoints.Slice() {
		m.run()
		m.ends[int(first)+i] = e
	}
}

func (m *memory) hasEndpoints(first uint32, endpoints desired.Endpoints) bool {
	return slices.Equal(m.ends[first:int(first)+endpoints.Len()], endpoints.Slice())
}

// awaitGracePeriod ends all programs that have begun. New ones begin meanwhile.
func (m *memory) awaitGracePeriod() error {
	for _, r := range slices.Clone(m.readers) {
		for r.step < done {
			m.advance(r)
		}
	}
	m.readers = slices.DeleteFunc(m.readers, func(r *reader) bool { return r.step == done })
	return nil
}

func (m *memory) close() error { return nil }

const done = 3

// run lets some programs go on.
func (m *memory) run() {
	for _, r := range m.readers {
		if m.random.IntN(4) == 0 {
			m.advance(r)
		}
	}
	m.readers = slices.DeleteFunc(m.readers, func(r *reader) bool { return r.step == done })
}

func (m *memory) advance(r *reader) {
	switch r.step {
	case 0:
		to, ok := m.leads[r.to]
		if r.place = to; !ok {
			r.step = done
			return
		}
	case 1:
		if r.ends = m.ranges[r.place]; r.ends.count() == 0 {
			r.step = done
			return
		}
	case 2:
		m.check(r, m.ends[r.ends.block().first+uint32(m.random.IntN(r.ends.count()))])
	}
	r.step++
}

// TestLayerHistories makes random changes, restarts, failures and damage, with maps that are too small
// at first. After each change the maps lead where they should. And whatever a program read
// before or between, it gets an endpoint that the service port of its frontend had in the frontend's
// scope at some time since it began.
func TestLayerHistories(t *testing.T) {
	t.Parallel()
	first := rand.Uint64()
	for seed := first; seed < first+60 && !t.Failed(); seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			playLayer(t, rand.New(rand.NewPCG(seed, 0)))
		})
	}
}

func playLayer(t *testing.T, random *rand.Rand) {
	t.Helper()
	type wish = map[changetracker.ServicePortName]*carried
	wanted := wish{}
	history := []wish{wanted}
	check := func(r *reader, endpoint netip.AddrPort) {
		since := history[r.began:]
		for _, then := range since {
			for name, c := range then {
				scope, has := c.frontends[r.to]
				if has && slices.ContainsFunc(since, func(w wish) bool { return w[name] != nil && w[name].endpoints[scope].Has(endpoint) }) {
					return
				}
			}
		}
		t.Fatalf("a socket to %v gets %v, which is no endpoint of its service port since it began", r.to, endpoint)
	}
	m := newMemory(random, capacity{4, 4, 8}, check)
	newLayer := func() *layer {
		return &layer{
			kernel: m,
			replace: func(size capacity) (kernel, error) {
				next := newMemory(random, size, check)
				next.fail = m.fail
				return next, nil
			},
			activate: func(k kernel) error {
				if random.IntN(4) == 0 {
					return errMemory
				}
				next := k.(*memory)
				next.readers, m = m.readers, next
				for _, r := range next.readers { // they go on with the old maps, and here end there
					r.step = done
				}
				return nil
			},
		}
	}
	l, full, damaged := newLayer(), true, false
	applied := 0 // the last state that the maps had as a whole
	for range 200 {
		next := maps.Clone(wanted)
		var changed []changetracker.ServicePortName
		for range 1 + random.IntN(4) {
			name := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Name: fmt.Sprint("s", random.IntN(12))}}
			if !slices.Contains(changed, name) {
				changed = append(changed, name)
			}
			if delete(next, name); random.IntN(4) > 0 {
				next[name] = anyCarried(random, next)
			}
		}
		history = append(history, next)
		switch random.IntN(12) {
		case 0: // the process dies, the maps stay
			l, full = newLayer(), true
		case 1:
			full = true
		case 2:
			m.fail = true
		case 3: // somebody writes to the maps; the next full sync repairs it
			damage(random, m)
			full, damaged = true, true
		}
		if full {
			changed = slices.Collect(maps.Keys(next))
		}
		for key := range m.leads {
			if !damaged {
				m.readers = append(m.readers, &reader{to: key, began: applied})
			}
		}
		declined, err := update(l, next, changed, full)
		if err != nil {
			full, wanted = true, next
			continue
		}
		if len(declined) > 0 {
			next = maps.Clone(next)
			for _, name := range declined {
				delete(next, name)
			}
		}
		m.fail = false
		wanted, full, damaged, applied = next, false, false, len(history)-1
		mustLead(t, m, wanted)
	}
}

// update is what the engine does. It returns the service ports that are left to the rules.
func update(l *layer, wanted map[changetracker.ServicePortName]*carried, changed []changetracker.ServicePortName, full bool) (declined []changetracker.ServicePortName, err error) {
	if full {
		orphans, err := l.load(wanted)
		if err == nil {
			err = l.remove(orphans)
		}
		if err != nil {
			return nil, err
		}
	}
	for _, name := range changed {
		if err := l.withdraw(name, wanted[name]); err != nil {
			return nil, err
		}
	}
	for _, name := range changed {
		if wanted[name] == nil || l.publish(name, wanted[name]) == nil {
			continue
		}
		if l.services == nil {
			return nil, errMemory
		}
		declined = append(declined, name)
		if err := l.withdraw(name, nil); err != nil {
			return nil, err
		}
	}
	return declined, l.free(true)
}

// anyCarried has frontends that no other service port has.
func anyCarried(random *rand.Rand, others map[changetracker.ServicePortName]*carried) *carried {
	c := &carried{frontends: map[desired.Key]int{}}
	taken := map[desired.Key]bool{}
	for _, o := range others {
		for key := range o.frontends {
			taken[key] = true
		}
	}
	for range 1 + random.IntN(3) {
		key := desired.Key{VIP: netip.AddrFrom4([4]byte{10, 96, 0, byte(random.IntN(20))}), Port: 80, Protocol: []desired.Protocol{desired.TCP, desired.UDP}[random.IntN(2)]}
		scope := random.IntN(scopes)
		if taken[key] {
			continue
		}
		c.frontends[key] = scope
		if c.endpoints[scope].Len() == 0 {
			var all []netip.AddrPort
			for i := range 1 + random.IntN(6) {
				all = append(all, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(random.IntN(200)), byte(i)}), 8080))
			}
			c.endpoints[scope] = desired.EndpointsOf(all...)
		}
	}
	return c
}

func damage(random *rand.Rand, m *memory) {
	m.readers = nil // what they would get is not ours
	for key, to := range m.leads {
		switch random.IntN(5) {
		case 0:
			delete(m.leads, key)
		case 1:
			m.leads[key] = place{random.Uint32N(100), random.Uint32N(4)}
		case 2:
			m.ranges[to] = endpointRange(random.Uint64())
		case 3:
			m.ends[random.IntN(len(m.ends))] = netip.AddrPort{}
		}
	}
}

// mustLead compares the maps with what is wanted.
func mustLead(t *testing.T, m *memory, wanted map[changetracker.ServicePortName]*carried) {
	t.Helper()
	n := 0
	for name, c := range wanted {
		for key, scope := range c.frontends {
			n++
			to, ok := m.leads[key]
			p := m.ranges[to]
			if !ok || int(to.scope) != scope || p.count() != c.endpoints[scope].Len() || !m.hasEndpoints(p.block().first, c.endpoints[scope]) {
				t.Fatalf("%v of %v leads to %+v, %d endpoints; want %v", key, name, to, p.count(), c.endpoints[scope])
			}
		}
	}
	if n != len(m.leads) {
		t.Fatalf("%d frontends, want %d", len(m.leads), n)
	}
}

// TestRestartWritesNothing: a layer that finds what it wants adopts it.
func TestRestartWritesNothing(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	wanted := map[changetracker.ServicePortName]*carried{}
	for i := range 30 {
		wanted[changetracker.ServicePortName{NamespacedName: types.NamespacedName{Name: fmt.Sprint(i)}}] = anyCarried(random, wanted)
	}
	maps.DeleteFunc(wanted, func(_ changetracker.ServicePortName, c *carried) bool { return len(c.frontends) == 0 })
	m := newMemory(random, need(wanted), nil)
	names := slices.Collect(maps.Keys(wanted))
	for _, wants := range []bool{true, false} {
		l := &layer{kernel: m}
		if _, err := update(l, wanted, names, true); err != nil || l.writes > 0 != wants {
			t.Errorf("%d writes, error %v; want writes: %v", l.writes, err, wants)
		}
	}
	mustLead(t, m, wanted)
}

// TestNoWordComesAgain: a socket that has had an endpoint by a word gets another one by the next word, also if the
// process has started again meanwhile.
func TestNoWordComesAgain(t *testing.T) {
	t.Parallel()
	name := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Name: "web"}}
	key := desired.Key{VIP: netip.MustParseAddr("10.96.0.1"), Protocol: desired.TCP, Port: 80}
	wanted := map[changetracker.ServicePortName]*carried{name: {frontends: map[desired.Key]int{key: 0}}}
	m, seen := newMemory(rand.New(rand.NewPCG(1, 2)), capacity{16, 16, 16}, nil), map[endpointRange]bool{}
	for range 5 {
		l := &layer{kernel: m}
		for i := range 4 {
			wanted[name] = &carried{frontends: wanted[name].frontends}
			wanted[name].endpoints[0] = desired.EndpointsOf(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80))
			if _, err := update(l, wanted, []changetracker.ServicePortName{name}, i == 0); err != nil {
				t.Fatal(err)
			}
			for at, p := range m.ranges {
				if at.scope != 0 || p == 0 {
					continue
				}
				if seen[p] {
					t.Errorf("word %x names %v, and another endpoint before", p, wanted[name].endpoints[0])
				}
				seen[p] = true
			}
		}
	}
}
