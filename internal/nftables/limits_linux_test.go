package nftables

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// TestLimitClasses: the class of any limit has its numbers, rounded up to the next step, and its name is read back.
func TestLimitClasses(t *testing.T) {
	t.Parallel()
	rand := chance.New(t)
	const most = 10_000
	for range 10_000 {
		want := changetracker.ClientLimit{
			PerSecond: rand.Uint32N(most + 1), Burst: rand.Uint32N(most + 1), Open: rand.Uint32N(1001),
			IPv4Bits: uint8(rand.UintN(33)), IPv6Bits: uint8(rand.UintN(129)), Drop: rand.IntN(2) == 0,
		}
		v6, namespace, asked := rand.IntN(2) == 0, fmt.Sprint("namespace-", rand.IntN(5000)), want
		c := limitClass(namespace, asked, v6)
		if want.Open > 0 { // the kernel notes each connection
			want.PerSecond, want.Burst = min(cmp.Or(want.PerSecond, mostWithOpen), mostWithOpen), min(want.Burst, 2*mostWithOpen)
		}
		got := c.limit(v6)
		switch {
		case !c.isLimit() || c.isGate() || c.isDraw() || c.isTimeout() || !c.isCounted():
			t.Fatalf("%+v: class %#x is of another kind", want, uint32(c))
		case got.perSecond < want.PerSecond || got.open < want.Open || want.PerSecond > 0 && 2*got.perSecond > 5*want.PerSecond, want.Open > 0 && 2*got.open > 5*want.Open:
			t.Fatalf("%+v is %+v", want, got)
		case want.PerSecond > 0 && got.burst < min(want.Burst, 100*got.perSecond), got.perSecond > 0 && got.burst < got.perSecond:
			t.Fatalf("%+v has burst %d", want, got.burst)
		case got.bits < want.Bits(v6) || got.drops != want.Drop:
			t.Fatalf("%+v is %+v, class %#x", want, got, uint32(c))
		}
		if back, ok := parseClass(c.chain()); !ok || back != c {
			t.Fatalf("chain %s is read back as %#x, %v, want %#x", c.chain(), uint32(back), ok, uint32(c))
		}
	}
	for _, gate := range []class{gateClass(false), gateClass(true)} {
		if back, ok := parseClass(gate.chain()); !ok || back != gate || !gate.isGate() || gate.isLimit() || !gate.isCounted() {
			t.Errorf("chain %s is read back as %#x, %v", gate.chain(), uint32(back), ok)
		}
	}
	for _, other := range []string{"limit-", "limit-1-1-1-0", "limit-1-1-0-zzzzzzzz", "limited-", "limit-5-5-5-80000001"} {
		if c, ok := parseLimit(other); ok {
			t.Errorf("chain %s of another program is class %#x", other, uint32(c))
		}
	}
}

// TestLimitsHaveRoom: a namespace gets a few different limits, and all namespaces together a few more. The service ports that
// get none are named, and get theirs when others are gone.
func TestLimitsHaveRoom(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		e, m := w.engine(t, netnstest.New(t)), model{}
		add := func(namespace string, n int) {
			s := w.limited(n, changetracker.ClientLimit{PerSecond: limitSteps()[n%30+1]})
			s.Name.Namespace = namespace
			m[s.Name] = s
		}
		for n := range mostLimitsOfTenant + 3 {
			add("greedy", n)
		}
		add("modest", 50)
		result, err := e.Apply(t.Context(), m.full(w))
		netnstest.Check(t, err)
		for _, limited := range result.Limited {
			if limited.Name.Namespace != "greedy" {
				t.Errorf("%v: %v", limited.Name, limited.Err)
			}
		}
		if n := len(result.Limited); n != 3 {
			t.Errorf("%d service ports have no limit, want 3", n)
		}
		mustWriteNothing(t, e, m.full(w), "again")
		var waiting []changetracker.ServicePortName
		for _, limited := range result.Limited {
			waiting = append(waiting, limited.Name)
		}
		for of := range m { // others than those that wait
			if of.Namespace == "greedy" && !slices.Contains(waiting, of) && len(m) > mostLimitsOfTenant+1 {
				delete(m, of)
			}
		}
		mustApply(t, e, m.full(w))
		if result, err = e.Apply(t.Context(), m.full(w)); err != nil || len(result.Limited) > 0 {
			t.Errorf("when others are gone: %v, %v, want room for all", result.Limited, err)
		}
		mustWriteNothing(t, e, m.full(w), "when others are gone")
	})
}

func (w *world) limited(n int, limit changetracker.ClientLimit) *desired.Service {
	s := &desired.Service{Name: name(n), Protocol: desired.TCP, Port: &changetracker.ServicePort{ClientLimit: limit}}
	s.Cluster = s.Cluster.With(endpointOf(w, n))
	w.add(s, desired.Frontend{Kind: desired.ExternalIP, VIP: w.addr(200, n), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeAll})
	return s
}

// TestLimitsAfterARestart: another process takes over the classes with their sets, and writes nothing; what is damaged is
// repaired, and what nobody uses goes.
func TestLimitsAfterARestart(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns, m := netnstest.New(t), model{}
		for n := range 5 {
			s := w.limited(n, changetracker.ClientLimit{PerSecond: uint32(n), Open: 10 * uint32(n%2+1), Drop: n == 3})
			m[s.Name] = s
		}
		mustApply(t, w.engine(t, ns), m.full(w))
		mustWriteNothing(t, w.engine(t, ns), m.full(w), "after a restart")
		e := w.engine(t, ns)
		mustApply(t, e, m.full(w))
		table := ipKeyword(w.family) + " serviceplane"
		chain := limitClass(name(2).Namespace, m[name(2)].Port.ClientLimit, e.state.layout.rules.v6).chain()
		for _, damage := range []string{
			"flush chain " + table + " " + chain,
			"flush chain " + table + " " + chain + "; delete set " + table + " " + chain + newConnections,
			"flush chain " + table + " " + chain + "; delete set " + table + " " + chain + newConnections +
				"; add set " + table + " " + chain + newConnections + " { type mark; flags dynamic; }",
			"flush map " + table + " classes",
			"flush map " + table + " client-limits",
			"flush map " + table + " limit-classes",
			"add set " + table + " limit-1-1-1-a0000000-new { type mark; }",
			"flush map " + table + " firewalled",
		} {
			mustNFT(t, ns, damage)
			if len(mustVerify(t, e, m.full(w)).Differences) == 0 {
				t.Errorf("%s: Verify has no difference", damage)
			}
			mustApply(t, e, m.full(w))
			mustWriteNothing(t, e, m.full(w), damage)
		}
		clear(m)
		mustApply(t, w.engine(t, ns), m.full(w))
		mustWriteNothing(t, w.engine(t, ns), m.full(w), "without limits")
		netnstest.Check(t, e.Cleanup(t.Context()))
	})
}

// TestAKernelWithoutLimits: client limits have no effect, Traits say it, and all else is programmed. A full update asks again.
func TestAKernelWithoutLimits(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		e, m := w.engine(t, netnstest.New(t)), model{}
		met := e.lack("connlimit")
		m[name(0)] = w.service(0)
		m[name(0)].Port.ClientLimit = changetracker.ClientLimit{}
		mustApply(t, e, m.full(w))
		if *met != 0 || !e.Traits(nil).ClientLimits {
			t.Errorf("the kernel is asked %d times before anybody asks for a limit", *met)
		}
		s := w.limited(1, changetracker.ClientLimit{PerSecond: 5})
		m[s.Name] = s
		mustApply(t, e, m.full(w))
		if asked := *met; asked == 0 || e.Traits(nil).ClientLimits {
			t.Errorf("the kernel is asked %d times, Traits say %v", asked, e.Traits(nil).ClientLimits)
		}
		mustMatch(t, e, m)
		mustWriteNothing(t, e, m.full(w), "again")
	})
}

// TestATableHasLimitsWhileSomebodyAsks: a table without limits has no sets for them. The first one brings them, and after the
// last one a full update removes them.
func TestATableHasLimitsWhileSomebodyAsks(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns := netnstest.New(t)
		e, m := w.engine(t, ns), model{}
		m[name(0)] = w.service(0)
		m[name(0)].Port.ClientLimit = changetracker.ClientLimit{}
		mustApply(t, e, m.full(w))
		for n := range 2 {
			s := w.limited(1+n, changetracker.ClientLimit{PerSecond: 5, Open: uint32(n)})
			mustApply(t, e, desired.Update{Family: w.family, Globals: w.globals(), Changes: desired.ChangesTo(s)})
			m[s.Name] = s
			mustWriteNothing(t, e, m.full(w), "with limits")
		}
		for n := range 2 {
			delete(m, name(1+n))
		}
		for _, e := range []*Engine{e, w.engine(t, ns)} {
			mustApply(t, e, m.full(w))
			mustWriteNothing(t, e, m.full(w), "without limits")
			if list := mustList(t, ns); strings.Contains(list, "limit") || strings.Contains(list, "refused") {
				t.Errorf("chains or sets of limits stay:\n%s", list)
			}
		}
	})
}

// TestEachClassHasItsChain: whatever a service port has, the class that a map gives to a packet is one that the next verdict map
// has: behind source ranges, client limits and the traffic policy, also without endpoints elsewhere.
func TestEachClassHasItsChain(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		e, m, next := w.engine(t, netnstest.New(t)), model{}, map[setID]setID{
			setServices: setClasses, setNodePorts: setClasses, setFirewalled: setFirewalledClasses, setLimits: setLimitClasses,
			setLocals: setLocalClasses, setNodePortLocals: setLocalClasses,
			setShortCircuits: setShortCircuitClasses, setNodePortShortCircuits: setShortCircuitClasses,
		}
		for n := range 300 {
			s := w.draw(n, true)
			if s.Local.Len() > 0 && n%2 == 0 { // proxier.Config.EditSelection may leave out all endpoints elsewhere
				s.Cluster, s.ClusterWeights, s.OnNode = desired.Endpoints{}, nil, nil
				for i := range s.Frontends {
					f := &s.Frontends[i]
					if f.Scope, f.ShortCircuit = desired.ScopeLocal, false; f.Kind != desired.ClusterIP {
						f.Masquerade = desired.MasqueradeNone
					}
				}
			}
			m[s.Name] = s
		}
		mustApply(t, e, m.full(w))
		verdicts, seen := wantedVerdicts(e.state.classes.sorted()), map[setID]int{}
		for name, p := range e.state.placed {
			for i := range p.frontends {
				for _, v := range p.frontends[i].values() {
					to, ok := next[v.in]
					if !ok || v.value == 0 {
						continue
					}
					seen[v.in]++
					if verdicts[to][v.value].chain == "" {
						t.Errorf("%v, %v: %s has class %#x, %s has no chain for it", name, p.frontends[i].key, setName(v.in), v.value, setName(to))
					}
				}
			}
		}
		if len(seen) != len(next) {
			t.Errorf("elements of sets %v, want some of each of %v", seen, next)
		}
	})
}
