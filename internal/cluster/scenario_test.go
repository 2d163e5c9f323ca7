package cluster

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// scenario is one run: everything in it follows from the seed and the other fields.
type scenario struct {
	seed                  uint64
	nodes, apps, replicas int
	window                int
	ops                   []op
	quirks                quirks
	bursts                int // in which things happen
}

// op is one thing that happens. Its index decides about its details, so that a scenario with
// fewer ops has the same ones.
type op struct {
	index int
	at    time.Duration
	kind  string
}

// workloadOps change what the API server has; faultOps what the nodes get to know and can do.
var (
	workloadOps = []string{"scale", "zero", "roll", "flap", "policy", "affinity", "ports", "recreate", "swap", "hints", "rebalance"}                     // read-only
	faultOps    = []string{"stall", "gap", "gap", "gap", "restart", "restart", "crash", "kernel", "slow", "relabel", "resync", "node loss", "zone loss"} // read-only
)

// newLargeScenario makes a cluster with many nodes.
func newLargeScenario(seed uint64, nodes int, faults bool) scenario {
	r := rand.New(rand.NewPCG(seed, 2))
	sc := scenario{seed: seed, nodes: nodes, apps: 30, replicas: 3, window: 40, bursts: 6}
	sc.addOps(r, 30, workloadOps)
	if faults {
		sc.addOps(r, 25, faultOps)
	}
	return sc
}

// newScenario makes a small cluster from a seed.
func newScenario(seed uint64) scenario {
	r := rand.New(rand.NewPCG(seed, 1))
	sc := scenario{seed: seed, nodes: 3 + r.IntN(1+r.IntN(8)), apps: 2 + r.IntN(3), replicas: 1 + r.IntN(3), window: 1 + r.IntN(10), bursts: 1 + r.IntN(4)}
	sc.addOps(r, 5+r.IntN(8), workloadOps)
	sc.addOps(r, 4+r.IntN(8), faultOps)
	return sc
}

// burst is how long ops follow each other. Between bursts nothing happens for longer than the
// runner may wait with another try.
const (
	burst      = 10 * time.Second
	burstEvery = 60 * time.Second
)

func (sc *scenario) addOps(r *rand.Rand, count int, kinds []string) {
	for range count {
		sc.ops = append(sc.ops, op{
			index: len(sc.ops), kind: kinds[r.IntN(len(kinds))],
			at: 2*time.Second + time.Duration(r.IntN(sc.bursts))*burstEvery + jitter(r, burst),
		})
	}
}

// result is what a run shows.
type result struct {
	violations []violation
	digest     uint64
	stats      *stats
}

// world is a running scenario.
type world struct {
	*workload

	scenario scenario
}

// run plays a scenario on a fake clock.
func (sc scenario) run(t *testing.T) (res result) {
	t.Helper()
	synctest.Test(t, func(*testing.T) {
		s := &sim{seed: sc.seed, window: sc.window, quirks: sc.quirks, begin: time.Now(), stats: newStats(sc.nodes)}
		w := sc.build(s)
		for _, o := range sc.ops {
			s.at(s.begin.Add(o.at), func() { w.do(o) })
		}
		end := s.begin.Add(time.Duration(sc.bursts) * burstEvery)
		s.runUntil(end)
		w.heal()
		s.runUntil(end.Add(3 * time.Minute))
		w.checkEnd()
		for _, n := range w.nodes {
			n.stop()
		}
		synctest.Wait()
		slices.SortFunc(s.violations, func(a, b violation) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.text, b.text)) })
		res = result{s.violations, s.digest, s.stats}
	})
	return res
}

func (sc scenario) build(s *sim) *world {
	api := newAPIServer(s, sc.replicas)
	var nodes []*node
	for i := range sc.nodes {
		n := &node{sim: s, api: api, id: i, name: fmt.Sprintf("node-%d", i), zone: zone(i), up: true}
		n.kernel = [len(families)]*kernel{newKernel(), newKernel()}
		nodes = append(nodes, n)
	}
	w := &world{newWorkload(s, api, nodes, sc.apps), sc}
	for _, n := range nodes {
		s.after(s.span(time.Millisecond, time.Second, "start", n.id), n.start)
	}
	return w
}

func zone(i int) string { return fmt.Sprintf("zone-%d", i%3) }

// do plays one op.
func (w *world) do(o op) {
	r := rand.New(rand.NewPCG(w.sim.seed, w.sim.number("op", o.index)))
	if slices.Contains(workloadOps, o.kind) {
		w.change(o.kind, w.apps[r.IntN(len(w.apps))], r)
		return
	}
	switch o.kind {
	case "stall":
		w.api.replicas[r.IntN(len(w.api.replicas))].stalled = time.Now().Add(2*time.Second + jitter(r, 8*time.Second))
		for range 3 {
			n := w.nodes[r.IntN(len(w.nodes))]
			w.sim.after(time.Second, func() { n.restart(jitter(r, time.Second)) })
		}
		return
	case "zone loss":
		lost := zone(r.IntN(3))
		for _, n := range w.nodes {
			if n.zone == lost {
				w.lose(n, r)
			}
		}
		return
	}
	if o.kind == "gap" || o.kind == "kernel" || o.kind == "stall" { // something changes meanwhile
		for range 1 + r.IntN(3) {
			missed := workloadOps[r.IntN(len(workloadOps))]
			a := w.apps[r.IntN(len(w.apps))]
			w.sim.after(jitter(r, time.Second), func() { w.change(missed, a, r) })
		}
	}
	var some []*node
	for range 1 + len(w.nodes)/20 {
		some = append(some, w.nodes[r.IntN(len(w.nodes))])
	}
	w.disturb(o.kind, some, r)
}

// change plays an op of the workload on one application.
func (w *world) change(kind string, a *app, r *rand.Rand) {
	switch kind {
	case "scale":
		w.scale(a, r.IntN(9), r)
	case "zero":
		w.scale(a, 0, r)
		w.sim.after(jitter(r, 5*time.Second), func() { w.scale(a, 1+r.IntN(6), r) })
	case "roll":
		w.roll(a, r)
	case "flap":
		w.flap(a, r)
	case "policy":
		a.internal, a.external, a.affinity = r.IntN(2) == 0, r.IntN(2) == 0, r.IntN(2) == 0
		w.publishService(a)
	case "ports":
		a.ports, a.nodePort = 1+r.IntN(3), r.IntN(2) == 0
		w.publishService(a)
		w.sim.after(jitter(r, time.Second), func() { w.publish(a) })
	case "recreate":
		w.recreate(r, a)
	case "swap":
		w.recreate(r, a, w.apps[r.IntN(len(w.apps))])
	case "affinity":
		a.affinity = !a.affinity
		w.publishService(a)
	case "hints":
		a.hints = !a.hints
		w.publish(a)
	case "rebalance":
		w.rebalance(a, r)
	}
}

// flap makes pods fail their readiness probe for a while.
func (w *world) flap(a *app, r *rand.Rand) {
	for _, p := range a.pods {
		if p.state == ready && r.IntN(2) == 0 {
			p.state = starting
			w.sim.after(jitter(r, 3*time.Second), func() {
				if p.state == starting {
					p.state = ready
					w.publish(a)
				}
			})
		}
	}
	w.publish(a)
}

// recreate deletes Services, and their slices a moment later. Then they come back, with
// addresses that may have been those of another one.
func (w *world) recreate(r *rand.Rand, some ...*app) {
	for _, a := range some {
		if !a.exists {
			continue
		}
		w.destroy(a)
		if r.IntN(2) == 0 {
			w.sim.after(jitter(r, time.Second), func() { w.collect(a) })
		}
		w.sim.after(jitter(r, 4*time.Second), func() { w.create(a) })
	}
}

// collect deletes the slices of a Service that does not exist.
func (w *world) collect(a *app) {
	for _, key := range sortedKeys(a.written) {
		if !a.exists {
			w.publishSlice(a, key, nil)
		}
	}
}

// disturb plays a fault at some nodes.
func (w *world) disturb(kind string, some []*node, r *rand.Rand) {
	switch kind {
	case "crash": // soon after a change, which may be in the middle of an Apply
		w.change("flap", w.apps[r.IntN(len(w.apps))], r)
	case "kernel":
		w.outage(append(some, w.nodes[r.IntN(len(w.nodes))]), r)
	case "gap":
		some = append(some, w.nodes[r.IntN(len(w.nodes))])
	}
	for _, n := range some {
		switch kind {
		case "gap":
			w.gap(n, r)
		case "restart":
			n.restart(jitter(r, 3*time.Second))
		case "crash":
			w.sim.after(jitter(r, 60*time.Millisecond), func() { n.restart(jitter(r, time.Second)) })
		case "slow":
			n.mu.Lock()
			n.slow = time.Now().Add(jitter(r, 5*time.Second))
			n.mu.Unlock()
		case "relabel":
			n.relabel(zone(r.IntN(3)))
		case "resync":
			if n.proc != nil {
				n.proc.reflect[r.IntN(int(kinds))].resync()
			}
		case "node loss":
			w.lose(n, r)
		}
	}
}

// outage makes kernels fail. What they took although they failed is undone before the next try.
func (w *world) outage(some []*node, r *rand.Rand) {
	how, until := works+1+failure(r.IntN(int(failures)-1)), jitter(r, 5*time.Second)
	for _, n := range some {
		n.fail(how)
		w.sim.after(until, n.mend)
	}
	a := w.apps[r.IntN(len(w.apps))]
	w.sim.after(until-min(until, jitter(r, 300*time.Millisecond)), func() { w.change("affinity", a, r) })
	w.sim.after(until+jitter(r, 100*time.Millisecond), func() { w.change("affinity", a, r) })
}

// gap cuts one or both watches, which resume at any replica.
func (w *world) gap(n *node, r *rand.Rand) {
	p := n.proc
	if p == nil {
		return
	}
	both := r.IntN(2) == 0
	for k, f := range p.reflect {
		if !both && k != r.IntN(int(kinds)) {
			continue
		}
		f.disconnect()
		w.sim.note(watchBroke)
		connection, epoch := int(r.Int32()), f.epoch
		w.sim.after(jitter(r, 5*time.Second), func() {
			if !p.stopped && f.epoch == epoch {
				f.connect(n.replica(connection))
			}
		})
	}
}

// fail makes the kernel of a node fail.
func (n *node) fail(how failure) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.failing = how
	n.outages++
}

// mend ends that. After the longest pause of the runner everything must be programmed.
func (n *node) mend() {
	n.mu.Lock()
	n.failing = works
	outages, p := n.outages, n.proc
	n.mu.Unlock()
	n.sim.after(30*time.Second+followLimit, func() {
		if p == nil || p.stopped || n.isSlow() || n.outages != outages {
			return
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		for i, broken := range p.broken {
			if failing := len(p.failing[i]); broken || failing > 0 {
				n.sim.violate("recovers in time", "%s %s: since the kernel works again, nothing has succeeded: %t, or not for %d service ports", n.name, families[i], broken, failing)
			}
		}
	})
}

// lose takes a node down with its pods, which others replace. It boots later, with nothing in
// its kernel.
func (w *world) lose(n *node, r *rand.Rand) {
	if !n.up {
		return
	}
	n.up = false
	w.sim.note(nodeLost)
	n.stop()
	w.sim.after(jitter(r, 2*time.Second), func() {
		for _, a := range w.apps {
			w.publish(a) // its pods are not ready any more
		}
	})
	w.sim.after(2*time.Second+jitter(r, 3*time.Second), func() { w.evict(n, r) })
	w.sim.after(5*time.Second+jitter(r, 10*time.Second), func() { w.boot(n) })
}

// evict replaces the pods of a node.
func (w *world) evict(n *node, r *rand.Rand) {
	for _, a := range w.apps {
		for _, p := range slices.Clone(a.pods) {
			if p.node == n {
				w.remove(a, p)
				w.add(a, r).state = ready
			}
		}
		w.publish(a)
	}
}

func (w *world) boot(n *node) {
	if !n.up {
		n.up, n.kernel = true, [len(families)]*kernel{newKernel(), newKernel()}
		n.start()
		for _, a := range w.apps {
			w.publish(a)
		}
	}
}

// heal ends all faults.
func (w *world) heal() {
	for _, n := range w.nodes {
		w.boot(n)
		n.mend()
		if n.proc == nil {
			n.start()
		}
	}
}

// checkEnd compares every kernel with the final state of the API server.
func (w *world) checkEnd() {
	final := newView("", "")
	for k := range kinds {
		for key, o := range w.api.latest[k] {
			final.set(k, key, serviceOf(k, o), o)
		}
	}
	for _, n := range w.nodes {
		final.node, final.zone = n.name, n.zone
		for i, family := range families {
			services := map[types.NamespacedName]bool{}
			for service := range final.services {
				services[service] = true
			}
			for _, name := range n.kernel[i].names() {
				services[name.NamespacedName] = true
			}
			for service := range services {
				for _, difference := range n.kernel[i].differences(&final, i, service) {
					w.sim.violate("converges", "%s %s: %s", n.name, family, difference)
				}
			}
		}
	}
}
