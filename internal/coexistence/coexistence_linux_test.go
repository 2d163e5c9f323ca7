package coexistence

import (
	"flag"
	"slices"
	"testing"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// update makes the test write the table instead of comparing.
var update = flag.Bool("update", false, "rewrite the table of docs/COEXISTENCE.md")

// atOnce is how many cases run at a time, more than there are processors: most of their
// time they wait for packets and repairs.
const atOnce = "8"

func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", atOnce); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// TestBeside: the rules of other programs stay exactly as they are, whatever an engine does,
// and packets fare as docs/COEXISTENCE.md says, whichever chains are registered first (PKT-89).
func TestBeside(t *testing.T) {
	mustRoots(t)
	table := readTable(t)
	programs := slices.DeleteFunc(corpus(), func(f foreign) bool { return f.flowtable })
	if !*update {
		programs = chance.Some(t, len(programs)/3, programs...)
	}
	t.Run("programs", func(t *testing.T) {
		for _, f := range programs {
			for _, e := range engines() {
				t.Run(f.name+"/"+e.name, func(t *testing.T) {
					t.Parallel()
					newWorld(t, f, e).play(table)
				})
			}
		}
	})
	table.check(t)
}

// play is what a node sees in the life of a proxy.
func (w *world) play(table *table) {
	before := w.rules()
	p := w.start(w.engine)
	w.mustKeep(before, "the start")
	want := table.expect(w)
	w.mustFare(want, "the start")
	w.work(p)
	w.mustKeep(before, "changes of Services")

	w.run(w.engine.damage) // no new connection to a Service works until this is repaired
	w.mustRecover(want, "damage")
	w.mustKeep(before, "a repair")
	w.restart()
	w.mustRecover(want, "a restart of "+w.foreign.name)
	if diff := before.withoutHandles().kept(w.rules().withoutHandles()); diff != "" {
		w.t.Fatalf("rules of %s after its restart:\n%s", w.foreign.name, diff)
	}
	if w.foreign.advice+w.foreign.setup != "" {
		w.script(w.foreign.setup + "\n" + w.foreign.advice)
		if w.engine.name == "userspace" && w.foreign.sockets != "" {
			w.run(w.foreign.sockets)
		}
		w.mustFare(w.engine.never(want), "what the table advises")
	}
	before = w.withoutOurs(p)
	w.changeMode(before)
}

// work lets Services come, change and go.
func (w *world) work(p *proxy) {
	w.t.Helper()
	const another = foreignPod + 1
	add(p.Proxier, w.net, another, "pod0")
	add(p.Proxier, w.net, remote, "remote1")
	w.sync(p.Proxier)
	add(p.Proxier, w.net, remote, "remote0")
	p.OnServiceDelete(proxiertest.Service("test", name(another)))
	w.sync(p.Proxier)
}

// withoutOurs stops the engine, and returns what it leaves of the rules.
func (w *world) withoutOurs(p *proxy) rules {
	w.t.Helper()
	p.stop()
	check(w.t, p.Cleanup(w.t.Context()))
	return w.rules()
}

// changeMode starts the engine once more, changes the mode, and cleans up.
func (w *world) changeMode(before rules) {
	w.t.Helper()
	old := w.start(w.engine)
	old.stop()
	next := w.start(engineNamed(w.engine.next))
	check(w.t, old.Cleanup(w.t.Context()))
	w.mustKeep(before, "a change of mode")
	if got := w.outcome(w.t.Context(), probes()[0], v1.IPv4Protocol, proxiertest.AskOptions{}); got != works {
		w.t.Errorf("a Service from the node after a change of mode: %s", got)
	}
	if diff := before.equal(w.withoutOurs(next)); diff != "" {
		w.t.Errorf("rules after clean-up (-before +after):\n%s", diff)
	}
}
