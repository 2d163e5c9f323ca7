package nftables

import (
	"context"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
)

// BenchmarkReading measures reading the endpoints by a dump, by key with one and with two sockets, and by claims: askFrom
// comes from it.
func BenchmarkReading(b *testing.B) {
	sizes := []int{100}
	if os.Getenv(benchFull) == "1" {
		sizes = []int{1000, 3000, 10_000, 30_000}
	}
	for _, n := range sizes {
		sized(b, n, 10, func(b *testing.B, c *cluster) {
			p := newProgrammed(b, c)
			defer p.stop()
			for _, way := range []string{"dump", "by-key", "by-key-with-two", "claims"} {
				e := &Engine{
					config: p.engine.config, family: p.engine.family, kernel: openKernel(b, p.ns), state: p.engine.state, batch: p.engine.batch,
					listeners: newListeners(), stepElements: stepElements, askFrom: either(way == "dump", math.MaxInt, 0),
				}
				defer e.kernel.Close()
				o, err := e.observe(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				switch way {
				case "by-key-with-two":
					o.second = openKernel(b, p.ns)
					defer o.second.Close()
				case "claims":
					o.known = p.engine.state.placed
				}
				if !o.counts() {
					b.Skip("this kernel does not count elements, so all sets are dumped")
				}
				if err := e.observeSets(b.Context(), o, func(s *setSpec) bool { return s.id == setServices }); err != nil {
					b.Fatal(err)
				}
				b.Run(way, func(b *testing.B) {
					measure(3, func() {}, func() {
						if err := e.observeSet(b.Context(), o, &setSpecs[setEndpoints]); err != nil || len(o.element[setEndpoints]) != 10*n {
							b.Fatalf("%d elements, %v", len(o.element[setEndpoints]), err)
						}
					}).report(b)
				})
			}
		})
	}
}

// BenchmarkLarge measures syncs of 100,000 Services with 10 endpoints each.
func BenchmarkLarge(b *testing.B) {
	services := 200
	if os.Getenv(benchFull) == "1" {
		services = 100_000
	}
	sized(b, services, 10, func(b *testing.B, c *cluster) { benchSyncs(b, c, 3) })
}

// TestAReplacementOfALargeTableFits: a table of another program is replaced in one transaction, also
// by 100,000 Services with 10 endpoints each.
func TestAReplacementOfALargeTableFits(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns, m := netnstest.New(t), model{}
		for n := range 100 {
			s := &desired.Service{Name: name(n), Protocol: desired.TCP}
			for i := range 10 {
				s.Cluster = s.Cluster.With(netip.AddrPortFrom(w.addr(244, 10*n+i), 8080))
			}
			w.add(s, desired.Frontend{Kind: desired.ClusterIP, VIP: w.addr(96, n), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNonPod})
			m[s.Name] = s
		}
		mustNFT(t, ns, "add table "+ipKeyword(w.family)+" serviceplane")
		limited, e := w.engine(t, ns), w.engine(t, ns)
		limited.open = func() (kernel, error) {
			s, err := nft.Dial(ns.Path())
			s.Limit = 1000 // as without privileges
			return s, err
		}
		if _, err := limited.Apply(t.Context(), m.full(w)); err == nil || !strings.Contains(err.Error(), "raise net.core.wmem_max") {
			t.Errorf("with a small buffer the error is %v, want advice", err)
		}
		r := mustApply(t, e, m.full(w))
		if r.Transactions != 1 {
			t.Fatalf("%d transactions, want the table replaced in one", r.Transactions)
		}
		if size := 1000 * r.Bytes; size > nft.SendBuffer {
			t.Errorf("100,000 Services need %d bytes, but a transaction holds %d", size, nft.SendBuffer)
		}
		t.Logf("100,000 Services need %d MiB", 1000*r.Bytes>>20)
		mustMatch(t, e, m)
	})
}

// TestAReadingByKeyIsADump: after random changes by another program, an engine that reads by key
// finds what a dump finds, and repairs it. On kernels that count elements it needs no dump for an
// undamaged table, nor after changes that leave the number of elements, and the smaller sets.
func TestAReadingByKeyIsADump(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		e, m := w.engine(t, netnstest.New(t)), model{}
		for n := range 12 {
			m[name(n)] = w.service(n)
			if n%2 == 0 { // enough of them without a table of a consistent hash, and without affinity
				m[name(n)].Port, m[name(n)].Affinity = nil, 0
			}
		}
		mustApply(t, e, m.full(w))
		byKey := w.mustReadAlike(t, e)
		o := w.observed(t, e, 0)
		t.Logf("the kernel counts elements: %v", o.counts())
		if all := o.counts(); all && byKey < len(largeSets()) {
			t.Errorf("%d sets of an undamaged table are read by key, want %d", byKey, len(largeSets()))
		} else if !all && byKey > 0 {
			t.Errorf("%d sets are read by key, although the kernel does not count", byKey)
		}
		for range 4 {
			var done []string
			for range 1 + w.rand.IntN(3) {
				done = append(done, w.change(t, e))
			}
			w.mustReadAlike(t, e)
			e.askFrom = 0
			mustApply(t, e, m.full(w))
			mustMatch(t, e, m)
			e.askFrom = math.MaxInt // what a dump would repair
			mustWriteNothing(t, e, m.full(w), fmt.Sprint("after ", done))
			if t.Failed() {
				return
			}
		}
	})
}

// TestWhatIsKnownIsNotRead: a full update adds again what the engine has written, which changes nothing in the kernel, and asks
// for nothing. It writes what has changed since, also service ports that are gone and frontends that pass to others.
func TestWhatIsKnownIsNotRead(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		const services = 12
		e, m := w.engine(t, netnstest.New(t)), model{}
		mustApply(t, e, m.full(w))
		if !w.observed(t, e, math.MaxInt).counts() {
			return // such a kernel dumps, see TestAReadingByKeyIsADump
		}
		for round := range 6 {
			as := w.rand.Perm(services) // frontends pass on
			for n := range services {
				if delete(m, name(n)); w.rand.IntN(4) > 0 {
					m[name(n)] = w.service(as[n])
					m[name(n)].Name = name(n)
				}
			}
			e.askFrom = 0
			mustApply(t, e, m.full(w))
			mustMatch(t, e, m)
			e.askFrom = math.MaxInt
			mustWriteNothing(t, e, m.full(w), "after changes")
			reads := &countedReads{kernel: e.kernel}
			e.kernel, e.askFrom = reads, 0
			before, err := e.generation(t.Context())
			netnstest.Check(t, err)
			if r := mustApply(t, e, m.full(w)); r.Writes != 0 || r.Transactions != 0 || len(reads.sets) > 0 {
				t.Errorf("round %d: %d writes in %d transactions, reads %v by key; want none", round, r.Writes, r.Transactions, reads.sets)
			}
			if after, err := e.generation(t.Context()); err != nil || after != before {
				t.Errorf("round %d: the kernel had %d transactions, %v, want none", round, after-before, err)
			}
			e.kernel = reads.kernel
		}
	})
}

// TestAClaimOfWhatIsNotThere: another program has replaced an element of a set that the engine does not read, by one with other
// data, or with another key. The first full update repairs it.
func TestAClaimOfWhatIsNotThere(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		e, m := w.engine(t, netnstest.New(t)), model{}
		for n := range 40 {
			m[name(n)] = w.service(n)
		}
		mustApply(t, e, m.full(w))
		for _, id := range largeSets() {
			for _, other := range []string{"data", "key"} {
				if !w.replaceElement(t, e, id, other) {
					continue
				}
				e.askFrom = 0
				if r := mustApply(t, e, m.full(w)); r.Writes == 0 {
					t.Errorf("another %s in %s: nothing is written", other, setName(id))
				}
				mustMatch(t, e, m)
				e.askFrom = math.MaxInt
				mustWriteNothing(t, e, m.full(w), "after another "+other+" in "+setName(id))
			}
		}
	})
}

// replaceElement replaces an element of a map by one with another key, or with other data, as another program would. It
// reports whether it could.
func (w *world) replaceElement(t *testing.T, e *Engine, id setID, other string) bool {
	t.Helper()
	elements := w.observed(t, e, math.MaxInt).element[id]
	if len(elements) == 0 {
		return false
	}
	keys := slices.Sorted(maps.Keys(elements))
	key := keys[w.rand.IntN(len(keys))]
	newKey, newData := elementOf(key), elementOf(elements[key])
	if other == "data" {
		newData.buf[0] ^= 1
	} else if newKey.buf[0] ^= 0x40; elements[keyString(newKey)] != "" {
		return false
	}
	var gone, come encoded
	gone.append(elementOf(key), elementBytes{}, elementBytes{})
	come.append(newKey, elementBytes{}, newData)
	batch := e.newBatch()
	batch.elements(nft.DeleteElements(), &setSpecs[id], gone)
	batch.elements(nft.AddElements(), &setSpecs[id], come)
	if err := e.send(t.Context(), batch); err != nil {
		t.Fatalf("another %s in %s: %v", other, setName(id), err)
	}
	return true
}

// countedReads notes which sets are read by key.
type countedReads struct {
	kernel

	sets []string
}

func (k *countedReads) Query(ctx context.Context, b *nft.Batch, each func(int, []byte)) error {
	if object := b.Messages[0].Object; !strings.HasPrefix(object, "catch-all") {
		k.sets = append(k.sets, object)
	}
	return k.kernel.Query(ctx, b, each)
}

// counts reports whether the kernel counts elements.
func (o *observation) counts() bool { return o.sets[setName(setEndpoints)].counted }

// observed reads the table; sets of the size are read by key.
func (w *world) observed(t *testing.T, e *Engine, askFrom int) *observation {
	t.Helper()
	e.askFrom = askFrom
	o, err := e.observe(t.Context())
	if err == nil {
		err = e.observeElements(t.Context(), o)
	}
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// mustReadAlike returns how many of the large sets are read by key.
func (w *world) mustReadAlike(t *testing.T, e *Engine) (byKey int) {
	t.Helper()
	dumped, o := w.observed(t, e, math.MaxInt), w.observed(t, e, 0)
	if diff := cmp.Diff(dumped.element, o.element); diff != "" {
		t.Errorf("read otherwise than a dump (-dump +by key):\n%s", diff)
	}
	for _, id := range largeSets() {
		switch all, err := e.askSet(t.Context(), o, &setSpecs[id]); {
		case err != nil:
			t.Fatal(err)
		case all:
			byKey++
		}
	}
	return byKey
}

// change changes an element of a map as another program would, and says what.
func (w *world) change(t *testing.T, e *Engine) (what string) {
	t.Helper()
	o := w.observed(t, e, math.MaxInt)
	spec := &setSpecs[0]
	for len(spec.data) == 0 || len(o.element[spec.id]) == 0 {
		spec = &setSpecs[w.rand.IntN(int(numSets))]
	}
	keys := slices.Sorted(maps.Keys(o.element[spec.id]))
	any := func() string { return keys[w.rand.IntN(len(keys))] }
	other := []byte(any())
	other[len(other)-1-w.rand.IntN(len(other))] ^= byte(1 + w.rand.IntN(40))
	batch := e.newBatch()
	write := func(op nft.ElementOp, key string, data elementBytes) {
		var one encoded
		one.append(elementOf(key), elementBytes{}, data)
		batch.elements(op, spec, one)
	}
	_, taken := o.element[spec.id][string(other)]
	key, data, kind := any(), elementOf(o.element[spec.id][any()]), w.rand.IntN(4)
	if kind > 0 {
		what += "removed "
		write(nft.DeleteElements(), key, elementBytes{})
	}
	if kind < 2 && !taken {
		what += "added "
		write(nft.AddElements(), string(other), data)
	}
	if kind > 2 {
		what += "added again "
		write(nft.AddElements(), key, data)
	}
	if err := e.send(t.Context(), batch); err != nil {
		t.Fatalf("%s in %s: %v", what, spec.name, err)
	}
	return what + "in " + spec.name
}
