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

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/pause"
)

// owner is the Owner of all Overrides.
const owner = "leastconnections"

// Balancer balances the connections of one Provider. Its methods may be called from several goroutines at once.
type Balancer struct {
	options Options

	mu      sync.Mutex // guards all below
	begun   bool
	readings Readings
}

// Readings is what a Balancer has read, and done.
type Readings struct {
	// Ports is the number of service ports with the policy LeastConnections, over both families.
	Ports int
	// Made counts readings of the open connections of a family, Failed the ones that failed. Changes counts the
	// weights that were changed. All count since the start.
	Made, Failed, Changes uint64
	// Took is the duration of the last reading, of both families if both have Ports. Connections is how many it found that are open to endpoints of Ports.
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

// Run balances until ctx ends. It returns nil after its Overrides are removed. Run may be called once.
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
		r.families = append(r.families, &familyRun{run: r, name: family, ports: map[changetracker.ServicePortName]*port{}})
	}
	for wait := b.options.Pause; pause.For(ctx, wait); {
		took := r.read(ctx)
		wait = max(b.options.Pause, readingShare*took)
	}
	for _, f := range r.families {
		f.release()
	}
	r.sync()
	return nil
}

// run is what the goroutine of Run works with.
type run struct {
	*Balancer
	source   Proxy
	families []*familyRun
	changed  bool // an Override that no sync was requested for
}

// familyRun is a run in one family.
type familyRun struct {
	*run
	name      v1.IPFamily
	state     *changetracker.State
	reading   uint64
	ports     map[changetracker.ServicePortName]*port
	turns     []*port // the ports, the next to change first
	newcomers newcomers
	failures  int // readings in a row
}

// endpointKey identifies an endpoint, for all service ports that have it.
type endpointKey struct {
	protocol v1.Protocol
	addr     netip.AddrPort
}

// count is what a reading has found for an endpoint.
type count struct{ open, fresh int }

// port is a service port with the policy.
type port struct {
	name      changetracker.ServicePortName
	read      uint64                     // the reading of the State that saw it last
	of        *changetracker.ServicePort // as it was then
	endpoints []changetracker.Endpoint
	addrs     []netip.AddrPort // of the endpoints that the node may use, sorted
	weights   []float64
	set       []uint16 // nil: no Override
	// renewed means that there are other endpoints since the Overrides, so some may have ended.
	renewed bool
}

// read reads the connections of the families that have service ports with the policy, and changes weights.
func (r *run) read(ctx context.Context) (took time.Duration) {
	ports, connections, begin := 0, 0, time.Now()
	for _, f := range r.families {
		f.follow()
		ports += len(f.ports)
		if len(f.ports) > 0 {
			connections += f.balance(ctx)
		}
	}
	took = time.Since(begin)
	r.note(func(r *Readings) {
		r.Ports, r.Connections = ports, connections
		if ports > 0 {
			r.Took = took
		}
	})
	r.sync()
	return took
}

// sync requests a sync if an Override has changed.
func (r *run) sync() {
	if r.changed {
		r.changed = false
		r.source.Trigger()
	}
}

// follow takes over the State, if it is another one than before.
func (f *familyRun) follow() {
	state := f.source.Programmed(f.name)
	if state == nil || state == f.state {
		return
	}
	moved := f.state != nil && (f.state.Node().Name != state.Node().Name || f.state.Node().Zone != state.Node().Zone)
	f.state = state
	f.reading++
	for name, p := range state.All() {
		if p.Balancing == changetracker.LeastConnections {
			f.take(name, p, moved)
		}
	}
	f.turns = slices.DeleteFunc(f.turns, func(p *port) bool {
		if p.read == f.reading {
			return false
		}
		f.override(p, nil)
		delete(f.ports, p.name)
		return true
	})
}

// take takes over a service port of the State.
func (f *familyRun) take(name changetracker.ServicePortName, of *changetracker.ServicePort, moved bool) {
	p := f.ports[name]
	if p == nil {
		p = &port{name: name}
		f.ports[name], f.turns = p, append(f.turns, p)
	}
	p.read = f.reading
	endpoints := f.state.Endpoints(name)
	if of == p.of && same(endpoints, p.endpoints) && !moved {
		return
	}
	p.of, p.endpoints = of, endpoints
	plain := map[netip.AddrPort]uint16{}
	for _, e := range f.state.Merged(name) {
		plain[e.Addr] = e.Weight
	}
	selected := changetracker.Select(of, endpoints, f.state.Node()).All
	addrs, weights, before := make([]netip.AddrPort, len(selected)), make([]float64, len(selected)), p.addrs
	for i := range selected {
		addrs[i], weights[i] = selected[i].Addr, float64(max(plain[selected[i].Addr], 1))
	}
	p.addrs, p.weights = addrs, weights
	p.renewed = p.renewed || p.set != nil
	if slices.Equal(addrs, before) {
		return
	}
	for _, addr := range before {
		if _, has := slices.BinarySearchFunc(addrs, addr, netip.AddrPort.Compare); !has {
			f.tell(p, addr, 0)
		}
	}
	p.set = nil
}

// same reports whether two lists are one in memory: a State never changes a list.
func same(a, b []changetracker.Endpoint) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// balance reads the connections, changes weights, and returns how many connections are open to the endpoints.
func (f *familyRun) balance(ctx context.Context) (connections int) {
	counts := map[endpointKey]*count{}
	for _, p := range f.turns {
		for _, addr := range p.addrs {
			counts[endpointKey{p.name.Protocol, addr}] = &count{}
		}
	}
	f.newcomers.begin()
	f.note(func(r *Readings) { r.Made++ })
	err := f.options.List(ctx, f.name, func(id uint64, protocol v1.Protocol, server netip.AddrPort) {
		if c := counts[endpointKey{protocol, server}]; c != nil {
			connections++
			c.open, c.fresh = c.open+1, c.fresh+f.newcomers.see(id)
		}
	})
	if ctx.Err() != nil {
		return connections
	}
	if f.failed(err) {
		return connections
	}
	left, done := f.options.Changes, 0
	for _, p := range f.turns {
		changes := f.change(p, counts, left)
		if changes < 0 {
			break
		}
		left -= changes
		done++
	}
	f.turns = append(slices.Clone(f.turns[done:]), f.turns[:done]...)
	return connections
}

// patience is how many readings may fail in a row until all weights are as slices say.
const patience = 5

// failed takes over how a reading ended.
func (f *familyRun) failed(err error) bool {
	if err == nil {
		f.failures = 0
		return false
	}
	f.newcomers.undo()
	f.note(func(r *Readings) { r.Failed++ })
	if f.failures++; f.failures == 1 {
		f.options.Logger.Warn("open connections cannot be read: least-connections chooses by the last counts, and after some failures at random; it is tried again",
			zap.String("family", string(f.name)), zap.Error(err))
	}
	if f.failures == patience {
		for _, p := range f.turns {
			f.override(p, nil)
		}
	}
	return true
}

// change gives the endpoints of a service port the weights that they should have, and returns how many weights it
// changed; less than 0 if it would change more than are left, and has changed none.
func (f *familyRun) change(p *port, counts map[endpointKey]*count, left int) int {
	loads, fresh := make([]load, len(p.addrs)), 0
	for i, addr := range p.addrs {
		c := counts[endpointKey{p.name.Protocol, addr}]
		loads[i] = load{p.weights[i], c.open}
		fresh += c.fresh
	}
	wanted := scales(loads, fresh)
	switch {
	case !near(wanted, p.set, len(loads)):
	case !p.renewed:
		return 0
	case p.set != nil:
		wanted = p.set
	}
	if len(p.addrs) > left && left < f.options.Changes {
		return -1
	}
	return f.override(p, wanted)
}

// override replaces the Overrides of a service port, and returns their number.
func (f *familyRun) override(p *port, wanted []uint16) int {
	if wanted == nil && p.set == nil && !p.renewed {
		return 0
	}
	for i, addr := range p.addrs {
		scale := uint16(0)
		if wanted != nil {
			scale = wanted[i]
		}
		f.tell(p, addr, scale)
	}
	p.set, p.renewed = wanted, false
	return len(p.addrs)
}

// tell overrides one endpoint.
func (f *familyRun) tell(p *port, addr netip.AddrPort, scale uint16) {
	if f.source.Tracker().Override(p.name, addr, changetracker.Override{Owner: owner, Scale: scale}) {
		f.changed = true
		f.note(func(r *Readings) { r.Changes++ })
	}
}

// release removes all Overrides.
func (f *familyRun) release() {
	for _, p := range f.turns {
		f.override(p, nil)
	}
}
