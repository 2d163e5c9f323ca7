package cluster

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

var families = [...]v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} // read-only

// node is a machine. Its kernel keeps its objects while proxies come and go, until a reboot.
type node struct {
	sim    *sim
	api    *apiServer
	id     int
	name   string
	zone   string
	kernel [len(families)]*kernel
	proc   *process // nil while no proxy runs
	starts int      // of processes
	up     bool
	newest int // the newest resource version that any of its processes has received

	mu      sync.Mutex // guards all below
	failing failure    // what the kernel does now
	outages int        // how often it began to fail
	slow    time.Time  // until then the kernel is slow
	applies [len(families)]int
}

// process is one run of the proxy.
type process struct {
	node     *node
	provider *proxier.Proxier
	feed     proxier.EventHandler
	cancel   context.CancelFunc
	ended    chan struct{}
	stopped  bool
	written  int // writes to the kernels before the start
	reflect  [kinds]*reflector

	mu       sync.Mutex                     // guards all below
	view     view                           // what the process has received, as the oracle reads it
	rules    map[types.NamespacedName]rules // of Services in the view, as far as computed
	complete [kinds]bool
	dirty    [len(families)]map[types.NamespacedName]bool // Services with events that no successful Apply has seen
	changed  map[types.NamespacedName]time.Time           // when the last event of a Service came
	gone     map[target]time.Time                         // since when an endpoint is not in the view
	pending  [len(families)][]change                      // that are not programmed yet
	failed   [len(families)]time.Time                     // when the last Apply failed as a whole
	broken   [len(families)]bool                          // the last Apply failed as a whole
	failing  [len(families)]map[changetracker.ServicePortName]portFailure
	again    [len(families)]bool // the next Update may be full
	moved    [len(families)]bool // the node is in another zone, which may not be programmed
}

// portFailure is that the last Apply with a service port could not program a rule for it.
type portFailure struct {
	at     time.Time
	wanted *rule
}

// followLimit is how long a change may take from its event to the kernel: a running Apply, the
// interval of the runner, and an Apply of its own.
const followLimit = longestApply + 50*time.Millisecond + longestApply + time.Millisecond

// afterFailure is how long a change waits at most for the next try if everything failed just before.
const afterFailure = time.Second

// target is an endpoint of a Service: its address without a port.
type target struct {
	service types.NamespacedName
	addr    netip.Addr
}

// start runs a proxy, which knows nothing but its node.
func (n *node) start() {
	n.starts++
	n.sim.note(proxyStarted)
	p := &process{
		node: n, ended: make(chan struct{}), view: newView(n.name, n.zone), written: n.written(),
		rules: map[types.NamespacedName]rules{}, changed: map[types.NamespacedName]time.Time{}, gone: map[target]time.Time{},
		again: [len(families)]bool{true, true},
	}
	engines := map[v1.IPFamily]proxier.Engine{}
	for i, family := range families {
		p.dirty[i], p.failing[i] = map[types.NamespacedName]bool{}, map[changetracker.ServicePortName]portFailure{}
		engine := n.sim.quirks.wrapEngine(&engine{node: n, proc: p, family: i})
		engines[family] = &checked{Engine: engine, node: n, proc: p, family: i}
	}
	provider, err := proxier.New(proxier.Config{
		Node:   changetracker.Node{Name: n.name, Zone: n.zone},
		Runner: runner.Options{Retry: runner.Backoff{Jitter: runner.NoJitter}}, // as by default, but the seed decides
	}, proxier.Deps{}, engines)
	if err != nil {
		panic(err)
	}
	p.provider, p.feed = provider, n.sim.quirks.wrapFeed(p, provider)
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel = cancel
	go func() {
		defer close(p.ended)
		if err := provider.Run(ctx); err != nil {
			n.sim.violate("runs", "%s: %v", n.name, err)
		}
	}()
	n.proc = p
	for k := range kinds {
		p.reflect[k] = &reflector{proc: p, kind: k, cache: map[string]metav1.Object{}}
		p.reflect[k].connect(n.replica(n.starts))
		if n.sim.quirks.syncEarly {
			p.announce(k)
		}
	}
}

// replica is where the n-th connection of a node goes.
func (n *node) replica(connection int) *replica {
	return n.api.replicas[n.sim.number("replica", n.id, connection)%uint64(len(n.api.replicas))]
}

// stop ends the proxy, in whatever it does, and waits for it.
func (n *node) stop() {
	p := n.proc
	if p == nil {
		return
	}
	n.proc, p.stopped = nil, true
	for _, f := range p.reflect {
		f.disconnect()
	}
	written := n.written()
	p.cancel()
	<-p.ended
	if n.written() != written {
		n.sim.violate("keeps what it has", "%s: the proxy changes the kernel when it ends", n.name)
	}
}

func (n *node) written() (sum int) {
	for _, k := range n.kernel {
		sum += k.written()
	}
	return sum
}

// restart stops the proxy, and starts another one after a while.
func (n *node) restart(after time.Duration) {
	n.stop()
	n.sim.after(after, func() {
		if n.up && n.proc == nil {
			n.start()
		}
	})
}

// finish notes that the whole first list of a kind was delivered.
func (p *process) finish(k kind) {
	if p.complete[k] {
		return
	}
	if p.node.written() != p.written {
		p.node.sim.violate("keeps what it has", "%s: the proxy changes the kernel before it has both lists", p.node.name)
	}
	p.mu.Lock()
	p.complete[k] = true
	p.mu.Unlock()
	if !p.node.sim.quirks.syncEarly {
		p.announce(k)
	}
}

func (p *process) announce(k kind) {
	if k == servicesKind {
		p.feed.OnServiceSynced()
	} else {
		p.feed.OnEndpointSlicesSynced()
	}
}

func (p *process) synced() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.complete == [kinds]bool{true, true}
}

// observe takes an event into the view before the proxy gets it, and plans what must be true
// some time after.
func (p *process) observe(k kind, key string, objects [2]metav1.Object, c change) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, about := time.Now(), objects[1]
	if about == nil {
		about = objects[0]
	}
	service := serviceOf(k, about)
	before, known := p.rules[service]
	if !known {
		for i, family := range families {
			before[i] = p.view.rules(service, family)
		}
	}
	p.noteRivals(k, service, now)
	p.view.set(k, key, service, objects[1])
	p.noteRivals(k, service, now)
	after := before
	for i, family := range families {
		if k == servicesKind || familyOf(about) == family {
			after[i] = p.view.rules(service, family)
		}
	}
	p.rules[service] = after
	p.changed[service] = now
	if k == slicesKind {
		p.noteGone(service, objects, now)
	}
	for i, family := range families {
		if k == servicesKind || familyOf(about) == family {
			p.dirty[i][service] = true
		}
		p.node.sim.after(p.node.sim.span(0, followLimit, "claim", p.node.id, int(now.UnixNano())), func() { p.checkClaim(i, service) })
		differ := different(before[i], after[i])
		if len(differ) == 0 {
			continue // and if the kernel fails now, the runner need not try again at once
		}
		if p.complete == [kinds]bool{true, true} {
			p.node.sim.after(followLimit, func() { p.checkFollowed(i, service, now) })
		}
		if c != (change{}) {
			p.pending[i] = append(p.pending[i], c)
			p.node.sim.stats.touched[p.node.id] += len(differ)
		}
	}
}

// noteRivals notes that an event of a Service is one of all that claim the same.
func (p *process) noteRivals(k kind, service types.NamespacedName, now time.Time) {
	if k != servicesKind {
		return
	}
	for _, rival := range p.view.rivals(service) {
		p.changed[rival] = now
		delete(p.rules, rival)
		p.node.sim.note(rivals)
		for i := range families {
			p.dirty[i][rival] = true
		}
	}
}

// noteGone notes which endpoints are in no slice of the Service any more.
func (p *process) noteGone(service types.NamespacedName, objects [2]metav1.Object, now time.Time) {
	for _, o := range objects {
		slice, _ := o.(*discovery.EndpointSlice)
		if slice == nil {
			continue
		}
		for i := range slice.Endpoints {
			t := target{service, netip.MustParseAddr(slice.Endpoints[i].Addresses[0])}
			if p.view.has(t) {
				delete(p.gone, t)
			} else if _, known := p.gone[t]; !known {
				p.gone[t] = now
			}
		}
	}
}

// checkFollowed runs a limit after an event that makes a difference: unless the kernel fails,
// it must have followed.
func (p *process) checkFollowed(family int, service types.NamespacedName, since time.Time) {
	if p.stopped || p.node.isSlow() {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch sinceFailure := since.Sub(p.failed[family]); {
	case sinceFailure <= 0:
		return
	case sinceFailure < afterFailure && time.Since(since) <= followLimit:
		p.node.sim.after(afterFailure-sinceFailure, func() { p.checkFollowed(family, service, since) })
		return
	}
	for name, failure := range p.failing[family] {
		// It is tried again after a pause of its own, also if another port changes, or if this one changes and changes back.
		if name.NamespacedName == service && (!failure.at.Before(since) || failure.wanted.equal(p.view.rule(name, families[family]))) {
			return
		}
	}
	kernel, violate := p.node.kernel[family], p.node.sim.violate
	for t, at := range p.gone {
		if t.service != service || at.After(since) {
			continue
		}
		if kernel.sends(t) {
			violate("forgets removed endpoints in time", "%s %s sends %v to %s, gone for %v", p.node.name, families[family], service, t.addr, time.Since(at))
		} else if t.addr.Is4() == (family == 0) {
			delete(p.gone, t)
		}
	}
	if p.changed[service].Equal(since) {
		for _, difference := range kernel.differences(&p.view, family, service) {
			violate("follows in time", "%s %s: %s", p.node.name, families[family], difference)
		}
	}
}

// checkClaim runs some time after an event: if the Status has the versions of everything that
// was received, the kernel has what they say, but for service ports that failed.
func (p *process) checkClaim(family int, service types.NamespacedName) {
	if p.stopped {
		return
	}
	status := p.provider.Status().Families[families[family]]
	want := changetracker.Versions{Services: p.reflect[servicesKind].version(), EndpointSlices: p.reflect[slicesKind].version()}
	if status.Versions != want || slices.ContainsFunc(status.Failed, func(e *proxier.ServiceError) bool { return e.Name.NamespacedName == service }) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.moved[family] = p.moved[family] && !status.PendingSince.IsZero(); p.moved[family] {
		return // a change of the node has no version
	}
	p.node.sim.note(claimed)
	for _, difference := range p.node.kernel[family].differences(&p.view, family, service) {
		p.node.sim.violate("has what it says", "%s %s says that it has %+v: %s", p.node.name, families[family], want, difference)
	}
}

// relabel moves the node to another zone.
func (n *node) relabel(zone string) {
	n.zone = zone
	if p := n.proc; p != nil {
		p.mu.Lock()
		p.view.zone = zone
		p.again, p.moved = [len(families)]bool{true, true}, [len(families)]bool{true, true}
		clear(p.changed) // what the view wants is different now
		clear(p.rules)
		p.mu.Unlock()
		p.feed.OnNodeChange(changetracker.Node{Name: n.name, Zone: zone})
	}
}

// isSlow reports whether the kernel is or was slow not long ago.
func (n *node) isSlow() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return time.Now().Before(n.slow.Add(5 * time.Second))
}
