package chaos

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/serviceplane/serviceplane/internal/poll"
)

// The defaults are a short run of every engine.
var (
	engineFlag  = flag.String("engine", "", "only this engine: nftables, iptables-nft, iptables-legacy, userspace, ebpf or ipvs")
	eventFlag   = flag.String("event", "", "only events whose names begin so")
	seedFlag    = flag.Uint64("seed", 0, "the seed of the events; 0 for a new one")
	duration    = flag.Duration("for", 24*time.Second, "how long events happen, of all engines together")
	connections = flag.Int("connections", 300, "how many connections there are at least while an event happens")
	services    = flag.Int("services", 20, "how many more Services there are than those with clients; at most 200")
	before      = flag.String("before", "HEAD~1", "the commit of the version before, for git")
	programs    = flag.String("programs", inVM, "a directory with programs nodeproxy and nodeproxy.before; what it has is not built")
)

func TestMain(m *testing.M) {
	flag.Parse()
	goleak.VerifyTestMain(m)
}

// TestChaos: what each event promises to clients holds.
func TestChaos(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	var some []engine
	for _, e := range engines() {
		switch {
		case *engineFlag != "" && *engineFlag != e.name:
		case e.missing() == "":
			some = append(some, e)
		case *engineFlag != "":
			t.Fatalf("%s: %s", e.name, e.missing())
		default:
			t.Logf("%s: not here: %s", e.name, e.missing())
		}
	}
	made := newBuilds(t)
	for _, e := range some {
		t.Run(e.name, func(t *testing.T) {
			t.Logf("seed %d: again with -engine %s -seed %d -for %v -connections %d -services %d", seed, e.name, seed, *duration, *connections, *services)
			g := newGame(t, made, e, seed)
			g.play(*duration / time.Duration(len(some)))
			if e.sockets && !t.Failed() {
				mustHaveTranslated(t, g.bpffs)
			}
		})
	}
}

// game is a run of one engine.
type game struct {
	*world

	engine  engine
	builds  *builds
	seed    uint64
	dir     string
	path    string
	bpffs   string
	flags   []string   // beside those of the engine
	dice    *rand.Rand // of the current event
	proxy   *proxy
	starts  int
	leaving []*proxy // which were asked to end
}

func newGame(t *testing.T, b *builds, e engine, seed uint64) *game {
	t.Helper()
	g := &game{world: newWorld(t, e), engine: e, builds: b, seed: seed, dir: t.TempDir(), path: toolPath(t, e.variant)}
	g.layOut(g.LocalPods)
	g.start(b.this())
	g.mustFollow()
	return g
}

// play lets events happen for a time, one at least.
func (g *game) play(howLong time.Duration) {
	g.clients.start(g.t.Context())
	g.t.Cleanup(g.clients.working.Wait)
	g.mustServe(1)
	end := time.Now().Add(howLong)
	for n := uint64(0); ; {
		round := g.events()
		rand.New(rand.NewPCG(g.seed, n)).Shuffle(len(round), func(i, k int) { round[i], round[k] = round[k], round[i] })
		for _, e := range round {
			if n++; n > 1 && time.Now().After(end) || g.t.Context().Err() != nil {
				sum, _, _ := g.clients.ledger.read()
				g.t.Logf("%s: %d events, %d connections", g.engine.name, n-1, sum.connections)
				return
			}
			g.dice = rand.New(rand.NewPCG(g.seed, n))
			g.happen(e)
		}
	}
}

// events are those that can happen here.
func (g *game) events() []event {
	return slices.DeleteFunc(allEvents(g.engine), func(e event) bool {
		return !strings.HasPrefix(e.name, *eventFlag) || e.missing != nil && e.missing() != ""
	})
}

// happen plays an event, and judges what became of the clients meanwhile.
func (g *game) happen(e event) {
	g.t.Helper()
	earlier := g.clients.ledger.begin()
	start := time.Now()
	g.t.Logf("%s %s", start.Format("15:04:05.000"), e.name)
	e.play(g)
	g.mustFollow()
	follows := time.Since(start)
	rounds := 0
	if !e.promise.moved { // otherwise the next event seems to move clients
		g.clients.renew()
		rounds = 1
	}
	g.mustServe(rounds)
	for last, more := 0, true; more; {
		more = !poll.Soon(func() bool { // or as long as it takes
			sum, _, _ := g.clients.ledger.read()
			return sum.since(earlier).connections >= *connections
		})
		sum, _, _ := g.clients.ledger.read()
		if more && sum.connections == last {
			g.t.Fatalf("no client has made a connection within %v", poll.Timeout)
		}
		last = sum.connections
	}
	sum, disturbed, notes := g.clients.ledger.read()
	o := outcome{counts: sum.since(earlier), follows: follows}
	if disturbed.After(start) {
		o.repaired = disturbed.Sub(start)
	}
	g.t.Logf("%s: %v", e.name, o)
	if broken := e.promise.broken(o.counts); broken != "" {
		g.t.Errorf("%s: %s, which must not be (seed %d)\n%s\nthe proxy:\n%s", e.name, broken, g.seed, strings.Join(notes, "\n"), tail(g.proxy.log))
	}
	g.leave()
}

// mustServe waits until every client has made some requests after another that succeed.
func (g *game) mustServe(rounds int) {
	g.t.Helper()
	g.clients.beginRounds()
	if !poll.Soon(func() bool { return g.clients.interrupted(rounds) == nil }) {
		_, _, notes := g.clients.ledger.read()
		g.t.Fatalf("not every client's requests succeed again within %v: %s\n%s\nthe proxy:\n%s",
			poll.Timeout, g.clients.interrupted(rounds).name, strings.Join(notes, "\n"), tail(g.proxy.log))
	}
}

// outcome is what became of the clients during an event.
type outcome struct {
	counts

	repaired time.Duration // until no client was disturbed any more
	follows  time.Duration // until the proxy programmed changes again
}

func (o outcome) String() string {
	return fmt.Sprintf("%d connections, %d answers, %d failed, %d reset, %d moved, %d deaf, %d sent again, repaired after %v, follows after %v",
		o.connections, o.answers, o.failed, o.reset, o.moved, o.deaf, o.again, o.repaired.Round(time.Millisecond), o.follows.Round(time.Millisecond))
}

// promise says which counts an event leaves 0.
type promise struct{ failed, reset, moved, deaf bool }

// broken says what a promise does not allow.
func (p promise) broken(c counts) string {
	var all []string
	for _, one := range []struct {
		promised bool
		n        int
		what     string
	}{{p.failed, c.failed, "connections failed"}, {p.reset, c.reset, "open connections were reset"}, {p.moved, c.moved, "clients with session affinity changed their endpoint"}, {p.deaf, c.deaf, "clients of UDP got no answer, however often they sent again"}} {
		if one.promised && one.n > 0 {
			all = append(all, fmt.Sprintf("%d %s", one.n, one.what))
		}
	}
	return strings.Join(all, ", ")
}
