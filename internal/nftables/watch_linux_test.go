package nftables

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
	"golang.org/x/sys/unix"
)

// watched is a running Provider of a small cluster in its own namespace.
type watched struct {
	*programmed
}

func startWatched(t *testing.T, services int) *watched {
	t.Helper()
	return startWatchedAside(t, services, loadWrites)
}

// startWatchedAside makes the listeners pause during each update with more writes than
// this.
func startWatchedAside(t *testing.T, services, writes int) *watched {
	t.Helper()
	p := startLimited(t, newCluster(services, 10), netnstest.New(t), runner.Options{})
	t.Cleanup(p.stop)
	p.engine.loadWrites = writes
	w := &watched{programmed: p}
	w.load(t)
	return w
}

func (w *listeners) listening() bool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return len(w.listeners) > 0
}

func (w *watched) family() proxier.FamilyStatus { return w.Status().Families[v1.IPv4Protocol] }

// mustNFT runs a script of nft in a namespace.
func mustNFT(t *testing.T, ns *netns.NS, script string) {
	t.Helper()
	nftOutput(t, ns, script)
}

func nftOutput(t *testing.T, ns *netns.NS, args ...string) string {
	t.Helper()
	return netnstest.Run(t, ns, "nft", args...)
}

// canonical is a listing without the order of elements, which depends on a hash, and
// without what belongs to one table.
func canonical(ruleset string) string {
	words := strings.FieldsFunc(ruleset, func(r rune) bool { return strings.ContainsRune(" \t\n,{}", r) })
	slices.Sort(words)
	return strings.Join(words, " ")
}

// TestDamageByOthersIsNoticedAndRepaired changes the table as another program in many ways,
// and a Service afterwards.
func TestDamageByOthersIsNoticedAndRepaired(t *testing.T) {
	t.Parallel()
	for what, command := range damages() {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			w := startWatched(t, 20)
			intact := canonical(mustList(t, w.ns))
			mustNFT(t, w.ns, w.damage(command))
			began := time.Now()
			poll.Until(t, "repair", func() bool { return canonical(mustList(t, w.ns)) == intact })
			t.Logf("repaired and listed again after %v", time.Since(began))
			status := w.family()
			if by := status.LastDamage.By; status.Damaged != 1 || !strings.HasPrefix(by, "nft (process ") {
				t.Errorf("%d damages, last %v; want one by nft and its process", status.Damaged, status.LastDamage)
			}
			w.OnEndpointSliceUpdate(nil, replaced(w.cluster.slices[7], 1))
			w.sync(t)
			if now := canonical(mustList(t, w.ns)); now == intact || !strings.Contains(now, "99.0.0.1") {
				t.Error("a change after the repair is not in the kernel")
			}
		})
	}
}

// What is no damage does not count: our own writes, few or many, writes by packets, and foreign tables.
func TestWhatIsNoDamage(t *testing.T) {
	t.Parallel()
	w := startWatched(t, 2000) // more than loadWrites
	for i := range 50 {
		w.OnEndpointSliceUpdate(nil, replaced(w.cluster.slices[i], i))
		w.sync(t)
	}
	for i := range 1000 { // again more than loadWrites in one sync
		w.Tracker().Endpoints.EndpointSliceUpdate(newSlice(w.cluster.services[i].ObjectMeta, 100000+i*10, 10), false)
	}
	w.sync(t)
	mustNFT(t, w.ns, "add table ip6 serviceplane { chain c { } ; }")
	mustNFT(t, w.ns, "add table ip foreign { chain c { type nat hook prerouting priority 0; }; set s { type mark; elements = { 1, 2 }; }; }")
	mustNFT(t, w.ns, "delete table ip foreign")
	syncs := w.syncs.Load()
	// Notifications arrive in order: after this damage all earlier ones have arrived.
	mustNFT(t, w.ns, "add chain ip serviceplane marker")
	poll.Until(t, "damage noticed", func() bool { return w.family().Damaged > 0 })
	w.sync(t)
	if status := w.family(); status.Damaged != 1 || !strings.HasPrefix(status.LastDamage.Object, "chain marker") {
		t.Errorf("%d damages, the last one %v; want the marker alone", status.Damaged, status.LastDamage)
	}
	if n := w.fullSyncs.Load(); n != 2 {
		t.Errorf("%d of %d syncs were full, want the first one and the repair", n, syncs)
	}
}

// TestDamageDuringALoadIsNoticed deletes elements during a large change, while the listener
// pauses.
func TestDamageDuringALoadIsNoticed(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	c := newCluster(1000, 10)
	p := startLimited(t, c, ns, runner.Options{})
	t.Cleanup(p.stop)
	open := p.engine.open
	var commits atomic.Int64
	p.engine.open = func() (kernel, error) {
		k, err := open()
		return &saboteur{kernel: k, at: 10, commits: &commits, do: func() {
			mustNFT(t, ns, "flush set ip serviceplane cluster-ips")
		}}, err
	}
	p.load(t)
	poll.Until(t, "all ClusterIPs", func() bool {
		list := nftOutput(t, ns, "list", "set", "ip", "serviceplane", "cluster-ips")
		return strings.Count(list, "10.") == len(c.services)
	})
}

// saboteur runs a function between two transactions.
type saboteur struct {
	kernel
	at      int64
	commits *atomic.Int64
	do      func()
}

func (k *saboteur) Commit(ctx context.Context, w *nft.Batch) error {
	if k.commits.Add(1) == k.at {
		k.do()
	}
	return k.kernel.Commit(ctx, w)
}

// TestALoudNeighbourIsNotListenedTo loads a large set as another program. A listener would
// slow it down.
func TestALoudNeighbourIsNotListenedTo(t *testing.T) {
	t.Parallel()
	w := startWatched(t, 20)
	k, err := nft.Dial(w.ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	intact := canonical(nftOutput(t, w.ns, "list", "table", "ip", "serviceplane"))
	spec := setSpec{name: "large", key: []nft.Field{nft.Mark}}
	load := func(first uint32, scaffold bool) {
		b := newWire(unix.NFPROTO_IPV4, "neighbour")
		b.Begin()
		if scaffold {
			b.newTable()
			b.newSet(&spec, 0)
		}
		var elements encoded
		for i := range uint32(1000) {
			elements.append(markData(first+i), elementBytes{}, elementBytes{})
		}
		b.elements(nft.AddElements(), &spec, elements)
		b.Finish()
		if err := k.Commit(t.Context(), &b.Batch); err != nil {
			t.Fatalf("neighbour: %v", err)
		}
	}
	load(1, true)
	checks := countChecks(w.engine)
	for i := range uint32(30) {
		load(1+1000*(i+1), false)
	}
	poll.Until(t, "a check afterwards", func() bool { return checks.Load() > 0 })
	if n := w.family().Damaged; n != 0 {
		t.Errorf("%d damages, want none: the neighbour has a table of his own", n)
	}
	flushes := 0
	poll.Until(t, "a change that is noticed: the neighbour may have been loud twice", func() bool {
		mustNFT(t, w.ns, "flush map ip serviceplane endpoints")
		flushes++
		poll.Until(t, "repair", func() bool {
			return canonical(nftOutput(t, w.ns, "list", "table", "ip", "serviceplane")) == intact
		})
		return w.family().Damaged > 0
	})
	if n := w.family().Damaged; n > flushes {
		t.Errorf("%d damages, want %d flushes or fewer", n, flushes)
	}
}

// TestAWatchThatBeginsLateChecks: a watch that starts after the first write checks the table, an earlier one does not.
func TestAWatchThatBeginsLateChecks(t *testing.T) {
	t.Parallel()
	w := &world{family: v1.IPv4Protocol}
	e := w.engine(t, netnstest.New(t))
	checks := countChecks(e)
	watch := func(until func() bool) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- e.Watch(ctx, func(d proxier.Damage) { t.Errorf("%v, want no damage", d) }) }()
		poll.Until(t, "the watch", until)
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Watch = %v, want nil when ctx ends", err)
		}
	}
	watch(e.listeners.listening)
	if n := checks.Load(); n != 1 {
		t.Errorf("before the first write: %d sockets, want the one that finds no table", n)
	}
	mustApply(t, e, model{}.full(w))
	first := checks.Load() // the engine itself has opened a socket
	watch(func() bool { return checks.Load() > first })
}

// TestNobodyFightsForever deletes the table as soon as it is repaired. The proxy must pause
// between repairs, report it, and repair the table when that ends.
func TestNobodyFightsForever(t *testing.T) {
	t.Parallel()
	w := startWatched(t, 20)
	intact := canonical(mustList(t, w.ns))
	k, err := nft.Dial(w.ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	deleted := 0
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		b := newWire(unix.NFPROTO_IPV4, "serviceplane")
		b.Begin()
		b.DeleteTable()
		b.Finish()
		if k.Commit(t.Context(), &b.Batch) == nil {
			deleted++
		}
		w.OnEndpointSliceUpdate(nil, replaced(w.cluster.slices[deleted%20], deleted)) // events go on
	}
	// Three repairs at once, and then pauses of at least 100 ms.
	if deleted < 4 || deleted > 3+50 {
		t.Errorf("the table was there %d times in 5s, want 4 to 53", deleted)
	}
	conditions := w.Status().Conditions
	if len(conditions) != 1 || conditions[0].Type != proxier.ConditionContested || conditions[0].Family != v1.IPv4Protocol {
		t.Errorf("conditions %+v, want one: contested", conditions)
	}
	if len(conditions) > 0 && !strings.Contains(conditions[0].Message, "of table ip serviceplane") {
		t.Errorf("message %q, want it to name the table", conditions[0].Message)
	}
	poll.Until(t, "the last word", func() bool { return len(canonical(mustList(t, w.ns))) >= len(intact)-100 })
	w.sync(t)
}
