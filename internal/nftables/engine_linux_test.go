package nftables

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/maglev"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world draws random service ports of one family.
type world struct {
	rand   *rand.Rand
	family v1.IPFamily
}

func (w *world) addr(net byte, n int) netip.Addr {
	if w.family == v1.IPv4Protocol {
		return netip.AddrFrom4([4]byte{10, net, byte(n >> 8), byte(n)})
	}
	return netip.AddrFrom16([16]byte{0: 0xfd, 7: net, 14: byte(n >> 8), 15: byte(n)})
}

func (w *world) endpoints(most int) desired.Endpoints {
	var list []netip.AddrPort
	for range w.rand.IntN(most + 1) {
		list = append(list, netip.AddrPortFrom(w.addr(244, w.rand.IntN(40)), uint16(8080+w.rand.IntN(2))))
	}
	return desired.EndpointsOf(list...)
}

// service draws the nth service port. Its identity and its ClusterIP are the same in each
// draw.
func (w *world) service(n int) *desired.Service { return w.draw(n, false) }

// draw returns a service port. A rare one may have endpoints without a slot, of a scope without
// frontends, or no frontends at all.
func (w *world) draw(n int, rare bool) *desired.Service {
	s := &desired.Service{
		Name:     name(n),
		Protocol: []desired.Protocol{desired.TCP, desired.UDP, desired.SCTP}[n%3],
		Cluster:  w.endpoints(6),
	}
	if w.rand.IntN(3) == 0 {
		s.Affinity = []time.Duration{time.Hour, 3 * time.Hour}[w.rand.IntN(2)]
	}
	for i, e := range s.Cluster.Slice() {
		if i%2 == 0 {
			s.Local = s.Local.With(e)
		}
	}
	if rare && w.rand.IntN(4) == 0 { // terminating ones, which only the node still uses
		s.Local = w.endpoints(3)
	}
	w.balance(s, rare)
	if rare && w.rand.IntN(6) == 0 {
		s.Port.ClientLimit = changetracker.ClientLimit{PerSecond: uint32(w.rand.IntN(3)), Open: 10, Drop: w.rand.IntN(2) == 0}
	}
	if n%10 > 0 { // a table is large
		s.Port.Balancing = changetracker.Random
	}
	if s.Cluster.Len() > 0 {
		s.OnNode = []netip.Addr{s.Cluster.Slice()[0].Addr()}
	}
	if !rare || w.rand.IntN(5) > 0 { // other service ports may have taken it, and the others too
		w.add(s, desired.Frontend{Kind: desired.ClusterIP, VIP: w.addr(96, n), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNonPod})
	}
	if w.rand.IntN(2) == 0 {
		w.add(s, desired.Frontend{Kind: desired.NodePort, Port: uint16(30000 + n), Scope: desired.ScopeLocal, Masquerade: desired.MasqueradeNone, ShortCircuit: true})
	}
	if w.rand.IntN(2) == 0 {
		ranges := []netip.Prefix{netip.PrefixFrom(w.addr(1, 0), w.addr(0, 0).BitLen()-8), netip.PrefixFrom(w.addr(2, 0), w.addr(0, 0).BitLen()-8)}
		w.add(s, desired.Frontend{
			Kind: desired.LoadBalancer, VIP: w.addr(200, n), Port: 80, Scope: desired.ScopeCluster,
			Masquerade: desired.MasqueradeAll, Restricted: true, SourceRanges: ranges[:w.rand.IntN(3)],
		})
	}
	if w.rand.IntN(2) == 0 {
		w.add(s, desired.Frontend{Kind: desired.ExternalIP, VIP: w.addr(201, n), Port: 80, Scope: desired.ScopeLocal, Masquerade: desired.MasqueradeNone, ShortCircuit: true})
	}
	slices.SortFunc(s.Frontends, func(a, b desired.Frontend) int { return s.Key(&a).Compare(s.Key(&b)) })
	return s
}

// balance draws weights and a load balancing policy. With rare weights some endpoints have no slot.
func (w *world) balance(s *desired.Service, rare bool) {
	s.Port = &changetracker.ServicePort{Balancing: changetracker.Random, MaxSlots: []uint16{0, 0, 8, 64}[w.rand.IntN(4)]}
	if w.rand.IntN(3) == 0 {
		s.ClusterWeights, s.LocalWeights = w.weights(s.Cluster.Len(), rare), w.weights(s.Local.Len(), rare)
	}
	if w.rand.IntN(20) == 0 || s.Cluster.Len() < 3 || s.Port.MaxSlots > 0 { // other tables are large
		s.Port.Balancing = changetracker.Balancing(w.rand.IntN(4))
	}
}

// weights draws different ones, as desired.Service has them.
func (w *world) weights(n int, rare bool) (list []uint16) {
	if n < 2 {
		return nil
	}
	most := []int{3, 1000}
	if rare {
		most = append(most, 60000)
	}
	for i := range n {
		list = append(list, uint16(i+1+w.rand.IntN(most[w.rand.IntN(len(most))])))
	}
	if slices.Min(list) == slices.Max(list) {
		return nil
	}
	return list
}

func (w *world) add(s *desired.Service, f desired.Frontend) {
	switch {
	case s.Cluster.Len() == 0:
		f.Action = desired.Reject
	case s.Endpoints(f.Scope).Len() == 0:
		f.Action = desired.Drop
	default:
		f.Action = desired.Forward
	}
	f.ShortCircuit = f.ShortCircuit && f.Action != desired.Reject
	s.Frontends = append(s.Frontends, f)
}

func name(n int) changetracker.ServicePortName {
	return changetracker.ServicePortName{
		NamespacedName: types.NamespacedName{Namespace: "test", Name: fmt.Sprintf("service-%d", n)},
		Port:           "web", Protocol: []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP}[n%3],
	}
}

func (w *world) globals() desired.Globals {
	any4or6 := netip.PrefixFrom(w.addr(0, 0), 0).Masked()
	return desired.Globals{
		ServiceCIDRs:      []netip.Prefix{netip.PrefixFrom(w.addr(96, 0), 16).Masked()},
		NodePortAddresses: []netip.Prefix{any4or6},
		PodCIDRs:          []netip.Prefix{netip.PrefixFrom(w.addr(244, 0), w.addr(0, 0).BitLen()/2).Masked()},
	}
}

// model is the wanted content of an engine.
type model map[changetracker.ServicePortName]*desired.Service

func (m model) full(w *world) desired.Update {
	u := desired.Update{Family: w.family, Full: true, Globals: w.globals()}
	for _, s := range m {
		u.Changes = append(u.Changes, desired.Change{Name: s.Name, After: s})
	}
	slices.SortFunc(u.Changes, func(a, b desired.Change) int { return a.Name.Compare(b.Name) })
	return u
}

// step changes some service ports of the model and returns the update for it.
func (m model) step(w *world, services, changes int) desired.Update {
	u := desired.Update{Family: w.family, Globals: w.globals()}
	var there []desired.Change
	for _, n := range w.rand.Perm(services)[:changes] {
		if m[name(n)] != nil && w.rand.IntN(4) == 0 {
			delete(m, name(n))
			u.Changes = append(u.Changes, desired.Change{Name: name(n)})
			continue
		}
		m[name(n)] = w.draw(n, true)
		there = append(there, desired.Change{Name: name(n), After: m[name(n)]})
	}
	u.Changes = append(u.Changes, there...)
	return u
}

func (w *world) engine(tb testing.TB, ns *netns.NS) *Engine {
	tb.Helper()
	e, err := NewEngine(Config{Config: proxier.Config{NetNS: ns.Path()}}, w.family, proxier.Deps{})
	if err != nil {
		tb.Fatalf("new engine: %v", err)
	}
	if w.rand == nil || w.rand.IntN(2) == 0 {
		e.askFrom = 0
	}
	tb.Cleanup(func() {
		if err := e.Close(); err != nil {
			tb.Errorf("close engine: %v", err)
		}
	})
	return e
}

func eachFamily(t *testing.T, test func(t *testing.T, w *world)) {
	t.Parallel()
	for _, family := range chance.Some(t, 1, v1.IPv4Protocol, v1.IPv6Protocol) {
		t.Run(string(family), func(t *testing.T) {
			t.Parallel()
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			test(t, &world{rand: rand.New(rand.NewPCG(seed, 0)), family: family})
		})
	}
}

func mustApply(t *testing.T, e *Engine, u desired.Update) proxier.ApplyReport {
	t.Helper()
	if _, err := e.Apply(t.Context(), u); err != nil {
		t.Fatalf("apply: %v", err)
	}
	return e.report
}

func mustWriteNothing(t *testing.T, e *Engine, u desired.Update, when string) {
	t.Helper()
	if r := mustApply(t, e, u); r.Writes != 0 || r.Transactions != 0 {
		t.Errorf("%s: %d writes in %d transactions, want none", when, r.Writes, r.Transactions)
	}
	if u.Full {
		if r := mustVerify(t, e, u); len(r.Differences) > 0 {
			t.Errorf("%s: Verify has %d differences: %v", when, len(r.Differences), r.Differences[:min(len(r.Differences), 5)])
		}
	}
}

func mustVerify(t *testing.T, e *Engine, u desired.Update) proxier.Verification {
	t.Helper()
	r, err := e.Verify(t.Context(), u)
	if err != nil {
		t.Fatalf("verify: %v", err)
	}
	return r
}

// TestAnyHistoryEndsInTheSameTable compares incremental with full syncs: after every
// change, a full sync of the engine and of a new one finds nothing to write.
func TestAnyHistoryEndsInTheSameTable(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns := netnstest.New(t)
		e := w.engine(t, ns)
		m := model{}
		always := w.limited(99, changetracker.ClientLimit{PerSecond: 7}) // a full sync without a limit removes their sets
		m[always.Name] = always
		mustApply(t, e, m.full(w))
		for range 40 {
			u := m.step(w, 30, 1+w.rand.IntN(8))
			mustApply(t, e, u)
			mustWriteNothing(t, e, u, "the same update again")
			mustMatch(t, e, m)
			mustWriteNothing(t, e, m.full(w), "full sync")
			mustWriteNothing(t, w.engine(t, ns), m.full(w), "restart")
		}
		mustList(t, ns)
		m.step(w, 30, 10)
		restarted := w.engine(t, ns)
		mustApply(t, restarted, m.full(w))
		mustMatch(t, restarted, m)
		mustWriteNothing(t, restarted, m.full(w), "after a restart with changes")
	})
}

// TestAServicePortWithoutFrontendsHasNoElements: other Services have taken them all. When it gets one again, records
// of session affinity lead to the same endpoints as before.
func TestAServicePortWithoutFrontendsHasNoElements(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns := netnstest.New(t)
		e, with := w.engine(t, ns), w.balanced(3, changetracker.Random)
		with.Affinity = time.Hour
		without := *with
		without.Frontends = nil
		elements := func() (numbers map[string]string, others int) {
			o := w.observed(t, e, e.askFrom)
			return o.element[setAffinityEndpoints], len(o.element[setAffinityCounts]) + len(o.element[setAffinityKeys])
		}
		// A plan from scratch would give another number.
		mustApply(t, e, model{name(1): w.service(1), with.Name: with}.full(w))
		mustApply(t, e, model{with.Name: with}.full(w))
		before, _ := elements()
		hidden := model{without.Name: &without}.full(w)
		change := func(s *desired.Service) {
			mustApply(t, e, desired.Update{Family: w.family, Globals: w.globals(), Changes: []desired.Change{{Name: s.Name, After: s}}})
		}
		change(&without)
		if numbers, others := elements(); len(numbers)+others > 0 {
			t.Errorf("without frontends: %d endpoints have numbers, and there are %d other elements of affinity, want none", len(numbers), others)
		}
		mustWriteNothing(t, e, hidden, "full sync")
		mustWriteNothing(t, w.engine(t, ns), hidden, "restart")
		change(with)
		if after, _ := elements(); len(after) == 0 || !maps.Equal(before, after) {
			t.Errorf("with a frontend again: numbers %x, want those of before, %x", after, before)
		}
		mustWriteNothing(t, w.engine(t, ns), model{with.Name: with}.full(w), "restart")
	})
}

// mustMatch reads the kernel and compares the endpoints of every frontend.
func mustMatch(t *testing.T, e *Engine, m model) {
	t.Helper()
	o, err := e.observe(t.Context())
	if err == nil {
		err = e.observeElements(t.Context(), o)
	}
	if err != nil {
		t.Fatalf("observe: %v", err)
	}
	frontends := 0
	for _, s := range m {
		for i := range s.Frontends {
			f := &s.Frontends[i]
			frontends++
			for scope := range 2 {
				want := slots(s, indexScope(scope))
				uses := f.Action == desired.Forward && scopeIndex(f.Scope) == scope || f.ShortCircuit && scope == 0
				if !uses {
					want = nil
				}
				if got := o.endpointsUnder(s, f, scope); !slices.Equal(got, want) {
					t.Errorf("%s %v scope %d: endpoints %v, want %v", s.Name, s.Key(f), scope, got, want)
				}
			}
		}
	}
	if got := len(o.element[setServices]) + len(o.element[setNodePorts]); got != frontends {
		t.Errorf("%d frontends in the kernel, want %d", got, frontends)
	}
}

// slots are what the kernel should hold: in order with a consistent hash, else sorted.
func slots(s *desired.Service, scope desired.Scope) (list []netip.AddrPort) {
	endpoints, weights := s.Endpoints(scope).Slice(), s.Weights(scope)
	switch {
	case len(endpoints) < 2, choiceOf(s, desired.Traits{}) == atRandom && weights == nil:
		return endpoints
	case choiceOf(s, desired.Traits{}) == atRandom:
		for i, n := range shares(weights, s.MaxSlots()) {
			list = append(list, slices.Repeat(endpoints[i:i+1], int(n))...)
		}
	default:
		for _, i := range maglev.Table(endpoints, weights, s.MaxSlots()) {
			list = append(list, endpoints[i])
		}
	}
	return list
}

func (o *observation) endpointsUnder(s *desired.Service, f *desired.Frontend, scope int) []netip.AddrPort {
	key, affinity := s.Key(f), o.affinityKey(s.Key(f)) != 0
	x := indexed{in: forKind(key, setEndpoints, setNodePortEndpoints), from: offset(indexScope(scope))}
	if affinity {
		x.in, x.from = forKind(key, setAffinityPicks, setNodePortAffinityPicks), x.from|ownBit
	}
	var list []netip.AddrPort
	for i := range maxEndpoints {
		data, ok := o.element[x.in][keyString(x.key(key, i))]
		if !ok {
			break
		}
		if affinity {
			data = o.element[setAffinityEndpoints][data]
		}
		addr, _ := parseAddrPort(data)
		list = append(list, addr)
	}
	if choiceOf(s, desired.Traits{}) == atRandom || s.Endpoints(indexScope(scope)).Len() < 2 {
		slices.SortFunc(list, netip.AddrPort.Compare)
	}
	return list
}

// mustList lists all tables. While the kernel resizes a hash table, for a while after many
// additions, a listing has elements twice, and may lack others: then it lists again.
func mustList(t *testing.T, ns *netns.NS) (listing string) {
	t.Helper()
	poll.Until(t, "a listing without an element twice", func() bool {
		listing = nftOutput(t, ns, "list", "ruleset")
		return !listsTwice(listing)
	})
	return listing
}

func listsTwice(listing string) bool {
	sets := strings.Split(listing, "elements = {")
	for _, set := range sets[1:] {
		elements, _, _ := strings.Cut(set, "}")
		seen := map[string]bool{}
		for element := range strings.SplitSeq(elements, ",") {
			element = strings.TrimSpace(element)
			if seen[element] {
				return true
			}
			seen[element] = true
		}
	}
	return false
}

// faultyKernel makes the kernel reject one message of the batches, or fails a dump.
type faultyKernel struct {
	kernel
	failAt *atomic.Int64 // counts messages and dumps down; the one that makes it 0 fails
}

// makeFaulty replaces every kernel that the engine opens by a faulty one, and returns their
// common countdown.
func (e *Engine) makeFaulty() *atomic.Int64 {
	failAt, open := &atomic.Int64{}, e.open
	e.open = func() (kernel, error) {
		k, err := open()
		return &faultyKernel{kernel: k, failAt: failAt}, err
	}
	return failAt
}

var errInjected = errors.New("injected")

// loadingKernel does not know expressions in the first transactions that have them, as while their
// modules are loading.
type loadingKernel struct {
	kernel
	left map[string]int // such transactions, by the expression's name
}

func (k loadingKernel) Commit(ctx context.Context, w *nft.Batch) error {
	for name, left := range k.left {
		if i := bytes.Index(w.Buf, []byte(name+"\x00")); i >= 0 && left > 0 && !strings.HasSuffix(w.Table, "-probe") {
			k.left[name]--
			w.Buf[i]++
		}
	}
	return k.kernel.Commit(ctx, w)
}

// TestAModuleThatIsLoadingIsWaitedFor: a first sync does not fail because the kernel loads modules for the
// other family or another process. One that is never there is an error.
func TestAModuleThatIsLoadingIsWaitedFor(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		for _, c := range []struct {
			loading map[string]int
			works   bool
		}{
			{map[string]int{"numgen": 1}, true},
			{map[string]int{"numgen": 100}, false},
			{map[string]int{"reject": 1}, true},
			{map[string]int{"numgen": 1, "reject": 1, "masq": 1}, true},
			{map[string]int{"numgen": 100, "masq": 1}, false},
		} {
			e, m, left := w.engine(t, netnstest.New(t)), w.udp(5), maps.Clone(c.loading)
			open := e.open
			e.open = func() (kernel, error) {
				k, err := open()
				return loadingKernel{k, left}, err
			}
			_, err := e.Apply(t.Context(), m.full(w))
			if (err == nil) != c.works || maps.Equal(left, c.loading) || err != nil && !errors.Is(err, unix.ENOENT) {
				t.Errorf("%v transactions with an unknown expression: error %v, %v left", c.loading, err, left)
			}
			if c.works {
				mustMatch(t, e, m)
			}
		}
	})
}

func (k *faultyKernel) Commit(ctx context.Context, w *nft.Batch) error {
	if strings.HasSuffix(w.Table, "-probe") { // a refused message means that the kernel lacks something
		return k.kernel.Commit(ctx, w)
	}
	for i := range w.Messages {
		if k.failAt.Add(-1) == 0 {
			// An unknown message type: the kernel rejects it and rolls the transaction
			// back.
			binary.NativeEndian.PutUint16(w.Buf[w.Messages[i].Start+4:], unix.NFNL_SUBSYS_NFTABLES<<8|0xff)
		}
	}
	return k.kernel.Commit(ctx, w)
}

func (k *faultyKernel) Dump(ctx context.Context, w *nft.Batch, reset func(), each func([]byte)) error {
	if k.failAt.Add(-1) == 0 {
		return errInjected
	}
	return k.kernel.Dump(ctx, w, reset, each)
}

func (k *faultyKernel) Query(ctx context.Context, w *nft.Batch, each func(int, []byte)) error {
	if k.failAt.Add(-1) == 0 {
		return errInjected
	}
	return k.kernel.Query(ctx, w, each)
}

// TestAnyFailedMessageIsMadeUpFor makes each netlink message of a load and of a
// change fail in turn, or after the first ones some by chance. The next full sync must bring the
// table to the wanted state, and the one after it must write nothing.
func TestAnyFailedMessageIsMadeUpFor(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		draw := chance.New(t)
		e := w.engine(t, netnstest.New(t))
		failAt := e.makeFaulty()
		m := model{}
		load := func() desired.Update { return m.full(w) }
		change := func() desired.Update { return m.step(w, 10, 4) }
		for what, next := range map[string]func() desired.Update{"load": load, "change": change} {
			failed, at := 0, 1
			for {
				for n := range 10 {
					m[name(n)] = w.service(n)
				}
				mustApply(t, e, m.full(w))
				if what == "load" {
					if err := e.Cleanup(t.Context()); err != nil {
						t.Fatalf("clean up: %v", err)
					}
				}
				failAt.Store(int64(at))
				_, err := e.Apply(t.Context(), next())
				left := failAt.Swap(0)
				if left > 0 {
					break // all messages have had their turn
				}
				failed++
				if err == nil {
					t.Fatalf("%s: message %d failed and Apply did not notice", what, at)
				}
				mustApply(t, e, m.full(w))
				mustMatch(t, e, m)
				mustWriteNothing(t, e, m.full(w), fmt.Sprintf("%s: after failure at message %d", what, at))
				if at++; at > 16 {
					at += draw.IntN(chance.Few(16, 1))
				}
			}
			t.Logf("%s: %d messages failed in turn", what, failed)
			if failed < 5 {
				t.Errorf("%s: only %d messages failed, want at least 5", what, failed)
			}
		}
	})
}

// TestUnusedClassesGo uses many endpoint counts: a sync deletes all unused classes when
// there are too many, without a full sync.
func TestUnusedClassesGo(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		e := w.engine(t, netnstest.New(t))
		m := model{name(0): w.service(0)}
		mustApply(t, e, m.full(w))
		most, taken := 0, 0 // classes so far, and how often they were taken away
		for n := range 2 * spareClasses {
			s := *w.service(0)
			s.Affinity, s.Local, s.Cluster, s.Frontends = 0, desired.Endpoints{}, desired.Endpoints{}, nil
			s.ClusterWeights, s.LocalWeights, s.Port = nil, nil, nil
			for i := range n + 1 {
				s.Cluster = s.Cluster.With(netip.AddrPortFrom(w.addr(244, i), 80))
			}
			w.add(&s, desired.Frontend{Kind: desired.ClusterIP, VIP: w.addr(96, 0), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNone})
			m[s.Name] = &s
			mustApply(t, e, desired.Update{Family: w.family, Changes: desired.ChangesTo(&s), Globals: w.globals()})
			if len(e.state.classes.users) < most {
				taken++
				mustCount(t, e, len(e.state.layout.chains())+1)
			}
			most = len(e.state.classes.users)
		}
		if taken == 0 {
			t.Errorf("%d classes have come and none has gone", 2*spareClasses)
		}
		mustApply(t, e, m.full(w))
		mustMatch(t, e, m)
		mustCount(t, e, len(e.state.layout.chains())+1+spareClasses)
		mustWriteNothing(t, e, m.full(w), "full sync")
	})
}

func TestCleanupTakesOnlyItsOwnTable(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns := netnstest.New(t)
		before := mustList(t, ns)
		e := w.engine(t, ns)
		if err := e.Cleanup(t.Context()); err != nil {
			t.Fatalf("clean up of nothing: %v", err)
		}
		names, err := proxier.NamesFor("other")
		if err != nil {
			t.Fatal(err)
		}
		other, err := NewEngine(Config{Config: proxier.Config{NetNS: ns.Path(), Names: names}}, w.family, proxier.Deps{})
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		m := model{name(0): w.service(0)}
		mustApply(t, e, m.full(w))
		mustApply(t, other, m.full(w))
		if err := e.Cleanup(t.Context()); err != nil {
			t.Fatalf("clean up: %v", err)
		}
		if list := mustList(t, ns); strings.Contains(list, "table "+ipKeyword(w.family)+" serviceplane {") || !strings.Contains(list, "serviceplane-other") {
			t.Errorf("after cleaning up one of two instances:\n%s", list)
		}
		mustWriteNothing(t, other, m.full(w), "the other instance")
		if err := other.Cleanup(t.Context()); err != nil {
			t.Fatalf("clean up: %v", err)
		}
		if after := mustList(t, ns); after != before {
			t.Errorf("ruleset after clean-up:\n%s\nwant as before:\n%s", after, before)
		}
	})
}

func ipKeyword(family v1.IPFamily) string {
	if family == v1.IPv4Protocol {
		return "ip"
	}
	return "ip6"
}

// TestDamageIsRepairedByAFullSync damages the table in many ways.
func TestDamageIsRepairedByAFullSync(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns := netnstest.New(t)
		e := w.engine(t, ns)
		m := model{}
		for n := 1; n < 10; n++ { // none with a large table
			m[name(n)] = w.service(n)
		}
		mustApply(t, e, m.full(w))
		for what, command := range damages() {
			mustNFT(t, ns, damageTo(ns, command, w.family, w.addr(96, 1), w.addr(96, 99)))
			if r := mustApply(t, e, m.full(w)); r.Writes == 0 {
				t.Errorf("%s: full sync wrote nothing", what)
			}
			mustMatch(t, e, m)
			mustWriteNothing(t, e, m.full(w), what)
		}
	})
}

// TestAReplacedTableTakesChanges replaces a table whose only global is the pods'
// interface, which is in no set, and then changes a Service.
func TestAReplacedTableTakesChanges(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns := netnstest.New(t)
		e := w.engine(t, ns)
		m := model{name(0): w.service(0), name(1): w.service(1)}
		full := m.full(w)
		full.Globals = desired.Globals{PodInterface: "veth*"}
		mustApply(t, e, full)
		command := "add rule " + ipKeyword(w.family) + " serviceplane pick drop"
		if err := ns.Do(func() error { return exec.Command("nft", command).Run() }); err != nil {
			t.Fatalf("nft %s: %v", command, err)
		}
		mustApply(t, e, full)
		change := m.step(w, 2, 2)
		change.Globals = full.Globals
		mustApply(t, e, change)
		mustMatch(t, e, m)
		change.Globals = w.globals()
		if _, err := e.Apply(t.Context(), change); !errors.Is(err, proxier.ErrNotFull) {
			t.Errorf("a partial update that tells pods by address now = %v, want proxier.ErrNotFull", err)
		}
	})
}
