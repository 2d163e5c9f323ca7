package cluster

import (
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
	length                time.Duration // of the time in which things happen
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
	workloadOps = []string{"scale", "zero", "roll", "flap", "policy", "ports", "recreate", "hints", "rebalance"}                // read-only
	faultOps    = []string{"stall", "gap", "restart", "crash", "kernel", "slow", "relabel", "resync", "node loss", "zone loss"} // read-only
)

// newScenario makes a small cluster from a seed.
func newScenario(seed uint64) scenario {
	r := rand.New(rand.NewPCG(seed, 1))
	sc := scenario{seed: seed, nodes: 3 + r.IntN(8), apps: 2 + r.IntN(4), replicas: 1 + r.IntN(3), window: 1 + r.IntN(10), length: 30 * time.Second}
	sc.addOps(r, 8+r.IntN(12), workloadOps)
	sc.addOps(r, 4+r.IntN(10), faultOps)
	return sc
}

func (sc *scenario) addOps(r *rand.Rand, count int, kinds []string) {
	for range count {
		sc.ops = append(sc.ops, op{
			index: len(sc.ops), kind: kinds[r.IntN(len(kinds))],
			at: 2*time.Second + time.Duration(r.Int64N(int64(sc.length-2*time.Second))),
		})
	}
}

// result is what a run shows.
type result struct {
	violations []string
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
		s.runUntil(s.begin.Add(sc.length))
		w.heal()
		s.runUntil(s.begin.Add(sc.length + 3*time.Minute))
		w.checkEnd()
		for _, n := range w.nodes {
			n.stop()
		}
		synctest.Wait()
		slices.Sort(s.violations)
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
		w.api.replicas[r.IntN(len(w.api.replicas))].stalled = time.Now().Add(jitter(r, 10*time.Second))
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
	for range 1 + len(w.nodes)/20 {
		w.disturb(o.kind, w.nodes[r.IntN(len(w.nodes))], r)
	}
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
		w.recreate(a, r)
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

// recreate deletes a Service, and its slices a moment later. Then it comes back at other
// addresses.
func (w *world) recreate(a *app, r *rand.Rand) {
	if !a.exists {
		return
	}
	a.exists = false
	w.publishService(a)
	if r.IntN(2) == 0 {
		w.sim.after(jitter(r, time.Second), func() {
			for _, key := range sortedKeys(a.written) {
				if !a.exists {
					w.publishSlice(a, key, nil)
				}
			}
		})
	}
	w.sim.after(jitter(r, 4*time.Second), func() {
		a.exists = true
		a.created++
		w.publishService(a)
		w.publish(a)
	})
}

// disturb plays a fault at one node.
func (w *world) disturb(kind string, n *node, r *rand.Rand) {
	switch kind {
	case "gap":
		w.gap(n, r)
	case "restart":
		n.restart(jitter(r, 3*time.Second))
	case "crash": // soon after a change, which may be in the middle of an Apply
		w.change("flap", w.apps[r.IntN(len(w.apps))], r)
		w.sim.after(jitter(r, 60*time.Millisecond), func() { n.restart(jitter(r, time.Second)) })
	case "kernel":
		n.mu.Lock()
		n.failing = works + 1 + failure(r.IntN(int(failures)-1))
		n.mu.Unlock()
		w.sim.after(jitter(r, 5*time.Second), n.mend)
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
		connection, epoch := int(r.Int32()), f.epoch
		w.sim.after(jitter(r, 5*time.Second), func() {
			if !p.stopped && f.epoch == epoch {
				f.connect(n.replica(connection))
			}
		})
	}
}

func (n *node) mend() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.failing = works
}

// lose takes a node down with its pods, which others replace. It boots later, with nothing in
// its kernel.
func (w *world) lose(n *node, r *rand.Rand) {
	if !n.up {
		return
	}
	n.up = false
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
	for _, n := range w.nodes {
		v := newView(n.name, n.zone)
		for k := range kinds {
			for key, o := range w.api.latest[k] {
				v.set(k, key, serviceOf(k, o), o)
			}
		}
		for i, family := range families {
			services := map[types.NamespacedName]bool{}
			for service := range v.services {
				services[service] = true
			}
			for _, name := range n.kernel[i].names() {
				services[name.NamespacedName] = true
			}
			for service := range services {
				for _, difference := range n.kernel[i].differences(&v, i, service) {
					w.sim.violate("converges", "%s %s: %s", n.name, family, difference)
				}
			}
		}
	}
}
