package leastconnections

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/pause"
)

// Balancer balances the connections of one Provider. Its methods may be called from several goroutines at once.
type Balancer struct {
	options Options

	mu       sync.Mutex // guards all below
	begun    bool
	readings Readings
}

// Readings is what a Balancer has read, and done.
type Readings struct {
	// Ports is the number of service ports with the policy LeastConnections and usable endpoints, over both families;
	// AtRandom is how many of them have no weights by connections, see the package documentation.
	Ports, AtRandom int
	// Passed and Failed count readings of the connections of a family. Overrides counts new ones, and ends of them. All
	// count since the start.
	Passed, Failed, Overrides uint64
	// Took is the duration of the last reading, of both families if both have Ports. Connections is how many it found
	// that are open to endpoints of Ports.
	Took        time.Duration
	Connections int
}

// New returns a Balancer. It starts nothing. The error names every invalid option.
func New(options Options) (*Balancer, error) {
	if err := options.Validate(); err != nil {
		return nil, fmt.Errorf("least connections: %w", err)
	}
	return &Balancer{options: options.withDefaults()}, nil
}

// Readings returns what the Balancer has read, and done.
func (b *Balancer) Readings() Readings {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.readings
}

// note changes the Readings.
func (b *Balancer) note(change func(*Readings)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change(&b.readings)
}

// Run balances until ctx ends. It returns nil after it has removed its Overrides. Run may be called once.
func (b *Balancer) Run(ctx context.Context, source Proxy) error {
	b.mu.Lock()
	isFirst := !b.begun
	b.begun = true
	b.mu.Unlock()
	if !isFirst {
		return errors.New("least connections: Run was called twice: make one Balancer for each Provider")
	}
	r := &run{Balancer: b, source: source}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		r.families = append(r.families, &familyRun{run: r, name: family, services: map[types.NamespacedName][]*port{}})
	}
	for wait := b.options.Pause; pause.For(ctx, wait); {
		wait = r.work(ctx)
	}
	for _, f := range r.families {
		f.release()
	}
	r.trigger()
	return nil
}

// run is what the goroutine of Run works with.
type run struct {
	*Balancer
	source   Proxy
	families []*familyRun
	changed  bool // an Override that no sync was requested for
	warned   time.Time
}

const (
	// patience is how long the State may take to have Overrides. Then they are removed, and the service port stays at
	// random for shortestRest, twice as long each time, up to longestRest.
	patience                  = 10 * time.Second
	shortestRest, longestRest = time.Minute, 10 * time.Minute
	// longest is the longest pause, unless readings take a tenth of it.
	longest = time.Minute
	// looks is how often the State is looked at in a Pause.
	looks     = 20
	warnEvery = 10 * time.Minute
)

// work reads, changes weights, and waits until some of them are programmed. It returns the pause until the next call.
func (r *run) work(ctx context.Context) (wait time.Duration) {
	begin, sum, limit := time.Now(), Readings{}, longest
	for _, f := range r.families {
		f.follow()
		if len(f.turns) == 0 {
			f.failures = 0
			continue
		}
		f.read(ctx, &sum)
	}
	took := time.Since(begin)
	if !slices.ContainsFunc(r.families, (*familyRun).isFailing) {
		limit = max(longest, workShare*took)
	}
	r.note(func(now *Readings) {
		now.Ports, now.AtRandom, now.Connections = sum.Ports, sum.AtRandom, sum.Connections
		if sum.Ports > 0 {
			now.Took = took
		}
	})
	if r.trigger() {
		r.await(ctx)
		r.trigger() // for what has ended meanwhile
	}
	return max(r.options.Pause, min(workShare*time.Since(begin), limit))
}

// trigger requests a sync if an Override has changed.
func (r *run) trigger() (changed bool) {
	if changed, r.changed = r.changed, false; changed {
		r.source.Trigger()
	}
	return changed
}

// await waits until a State has Overrides that were due, for as long as patience. So it takes about as long as the sync.
func (r *run) await(ctx context.Context) {
	due := func() (n int) {
		for _, f := range r.families {
			f.follow()
			for _, p := range f.turns {
				if !p.due.IsZero() {
					n++
				}
			}
		}
		return n
	}
	began := time.Now()
	for before := due(); before > 0 && due() >= before; {
		if time.Since(began) > patience || !pause.For(ctx, r.options.Pause/looks) {
			return
		}
	}
}

// familyRun is a run in one family.
type familyRun struct {
	*run
	name      v1.IPFamily
	state     *changetracker.State
	services  map[types.NamespacedName][]*port
	turns     []*port // of all Services, the next to change first
	readings  int     // that passed
	failures  int     // readings in a row
	newcomers newcomers
}

// endpointKey identifies an endpoint, for all service ports that have it.
type endpointKey struct {
	protocol v1.Protocol
	addr     netip.AddrPort
}

// count is what a reading has found for an endpoint.
type count struct{ open, fresh int }

// follow takes over the State.
func (f *familyRun) follow() {
	before, state := f.state, f.source.Programmed(f.name)
	if state == nil {
		return
	}
	f.state = state
	defer f.lookAgain()
	if state == before {
		return
	}
	if before != nil && (before.Node().Name != state.Node().Name || before.Node().Zone != state.Node().Zone) {
		for name := range f.services {
			f.take(name)
		}
	}
	for name := range state.Changed(before) {
		f.take(name)
	}
	f.turns = slices.DeleteFunc(f.turns, func(p *port) bool { return p.gone })
}

// lookAgain looks whether the State has the weights that it did not have.
func (f *familyRun) lookAgain() {
	for _, p := range f.turns {
		if of, ok := f.state.Service(p.name); ok && (p.scaled || !p.due.IsZero()) {
			f.update(p, of)
		}
	}
}

// take takes over a Service.
func (f *familyRun) take(service types.NamespacedName) {
	var now []*port
	for _, name := range f.state.ServicePorts(service) {
		of, ok := f.state.Service(name)
		if !ok || of.Balancing != changetracker.LeastConnections {
			continue
		}
		p := &port{name: name, set: map[netip.AddrPort]uint16{}, decided: f.readings}
		if i := slices.IndexFunc(f.services[service], p.sameName); i >= 0 {
			p = f.services[service][i]
		} else {
			f.turns = append(f.turns, p)
		}
		f.update(p, of)
		now = append(now, p)
	}
	for _, p := range f.services[service] {
		if !slices.Contains(now, p) {
			f.override(p, nil)
			p.gone = true
		}
	}
	if f.services[service] = now; len(now) == 0 {
		delete(f.services, service)
	}
}

// read reads the connections and changes weights. It adds up what the family has.
func (f *familyRun) read(ctx context.Context, sum *Readings) {
	counts := map[endpointKey]*count{}
	for _, p := range f.turns {
		for _, addr := range p.addrs {
			if key := (endpointKey{p.name.Protocol, addr}); counts[key] == nil {
				counts[key] = &count{}
			}
		}
	}
	f.newcomers.begin()
	connections := 0
	err := f.options.List(ctx, f.name, func(id uint64, protocol v1.Protocol, endpoint netip.AddrPort) {
		if c := counts[endpointKey{protocol, endpoint}]; c != nil {
			connections++
			c.open, c.fresh = c.open+1, c.fresh+f.newcomers.see(id)
		}
	})
	if err != nil {
		f.failed(ctx, err)
	} else {
		f.failures = 0
		f.readings++
		f.note(func(now *Readings) { now.Passed++ })
		f.decide(counts)
		sum.Connections += connections
	}
	for _, p := range f.turns {
		if p.usable > 0 {
			sum.Ports++
		}
		if p.usable > 0 && (!p.balanced() || f.failures >= failuresInARow) {
			sum.AtRandom++
		}
	}
}

// failuresInARow is after how many readings that fail all weights are as slices say.
const failuresInARow = 2

func (f *familyRun) isFailing() bool { return f.failures > 0 }

func (f *familyRun) failed(ctx context.Context, err error) {
	f.newcomers.undo()
	if ctx.Err() != nil {
		return
	}
	f.note(func(now *Readings) { now.Failed++ })
	if time.Since(f.warned) > warnEvery {
		f.warned = time.Now()
		f.options.Logger.Warn("open connections cannot be read: least-connections chooses by the last counts, and if that lasts at random; it is tried again",
			zap.String("family", string(f.name)), zap.Error(err))
	}
	if f.failures++; f.failures == failuresInARow {
		f.release()
	}
}

// decide changes the weights of service ports, as many as Changes allows. A service port that waits for its Overrides
// keeps them, unless that takes too long.
func (f *familyRun) decide(counts map[endpointKey]*count) {
	left, done := f.options.Changes, 0
	for _, p := range f.turns {
		wanted := p.wanted(counts, f.readings)
		changes := p.changes(wanted)
		if !p.due.IsZero() {
			wanted, changes = nil, time.Now().After(p.due)
		}
		if changes && p.cost > left && left < f.options.Changes {
			break
		}
		if p.decided = f.readings; changes {
			left -= p.cost
			p.giveUp()
			f.override(p, wanted)
		}
		done++
	}
	f.turns = append(slices.Clone(f.turns[done:]), f.turns[:done]...)
}

// release removes all Overrides.
func (f *familyRun) release() {
	for _, p := range f.turns {
		f.override(p, nil)
	}
}
