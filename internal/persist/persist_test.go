package persist

import (
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"testing"
	"testing/quick"
)

// hashes are the ways in which keys may fall together.
func hashes() map[string]func(uint16) uint64 {
	return map[string]func(uint16) uint64{
		"spread":          func(k uint16) uint64 { return uint64(k) * 0x9E3779B97F4A7C15 },
		"one for all":     func(uint16) uint64 { return 42 },
		"top bits only":   func(k uint16) uint64 { return uint64(k%3) << 62 },
		"last level only": func(k uint16) uint64 { return uint64(k%16) << lastShift },
		"two groups":      func(k uint16) uint64 { return uint64(k & 1) },
	}
}

// edit is one step: Set key to the value, or Delete it.
type edit struct {
	Key    uint16
	Value  int
	Delete bool
	// Freeze takes a version after the step.
	Freeze bool
}

// replay runs the steps on a Map and on a Go map beside it, and keeps every
// version that it froze with what it should hold.
func replay(m Map[uint16, int], steps []edit) error {
	type kept struct {
		version Map[uint16, int]
		want    map[uint16]int
	}
	want, e := map[uint16]int{}, m.Edit()
	versions := []kept{{m, map[uint16]int{}}}
	for i, s := range steps {
		if s.Delete {
			_, wantWas := want[s.Key]
			if was := e.Delete(s.Key); was != wantWas {
				return fmt.Errorf("step %d: Delete(%d) = %v, want %v", i, s.Key, was, wantWas)
			}
			delete(want, s.Key)
		} else {
			e.Set(s.Key, s.Value)
			want[s.Key] = s.Value
		}
		if got, ok := e.Get(s.Key); ok == s.Delete || got != want[s.Key] {
			return fmt.Errorf("step %d: Get(%d) = %d, %v, want %d", i, s.Key, got, ok, want[s.Key])
		}
		if s.Freeze {
			versions = append(versions, kept{e.Map(), maps.Clone(want)})
		}
	}
	versions = append(versions, kept{e.Map(), want})
	for i, v := range versions {
		if err := same(v.version, v.want); err != nil {
			return fmt.Errorf("version %d: %w", i, err)
		}
		for _, other := range []int{max(i, 1) - 1, 0} {
			since := versions[other]
			if err := sameChanges(v.version.Changed(since.version, equal), v.want, since.want); err != nil {
				return fmt.Errorf("version %d since version %d: %w", i, other, err)
			}
			if err := sameChanges(since.version.Changed(v.version, equal), v.want, since.want); err != nil {
				return fmt.Errorf("version %d since version %d: %w", other, i, err)
			}
		}
	}
	return nil
}

func equal(a, b int) bool { return a == b }

// sameChanges holds the keys that Changed yielded against two Go maps.
func sameChanges(changed iter.Seq[uint16], a, b map[uint16]int) error {
	want := map[uint16]bool{}
	for _, pair := range [][2]map[uint16]int{{a, b}, {b, a}} {
		for key, value := range pair[0] {
			if other, ok := pair[1][key]; !ok || other != value {
				want[key] = true
			}
		}
	}
	got := map[uint16]bool{}
	for key := range changed {
		if got[key] {
			return fmt.Errorf("Changed yields %d twice", key)
		}
		got[key] = true
	}
	if !maps.Equal(got, want) {
		return fmt.Errorf("Changed = %v, want %v", got, want)
	}
	return nil
}

func same(m Map[uint16, int], want map[uint16]int) error {
	if m.Len() != len(want) {
		return fmt.Errorf("Len = %d, want %d", m.Len(), len(want))
	}
	if got := maps.Collect(m.All()); !maps.Equal(got, want) {
		return fmt.Errorf("All = %v, want %v", got, want)
	}
	for k, v := range want {
		if got, ok := m.Get(k); !ok || got != v {
			return fmt.Errorf("Get(%d) = %d, %v, want %d", k, got, ok, v)
		}
	}
	if _, ok := m.Get(60_000); ok && want[60_000] == 0 {
		return fmt.Errorf("Get of a key that was never set found one")
	}
	return checkShape(m.root, true)
}

// checkShape holds a trie against what node's comment promises.
func checkShape(n *node[uint16, int], root bool) error {
	if !root && len(n.kids) == 0 && len(n.leaves) < 2 {
		return fmt.Errorf("a node below the root holds %d keys", len(n.leaves))
	}
	if n.leafMap&n.kidMap != 0 {
		return fmt.Errorf("a slot is leaf and subtree: %b, %b", n.leafMap, n.kidMap)
	}
	for _, kid := range n.kids {
		if err := checkShape(kid, false); err != nil {
			return err
		}
	}
	return nil
}

func TestMapIsLikeAGoMapAndOldVersionsStay(t *testing.T) {
	for name, hash := range hashes() {
		t.Run(name, func(t *testing.T) {
			law := func(steps []edit, narrow uint8) bool {
				for i := range steps {
					steps[i].Key %= uint16(narrow)%64 + 1 // so that keys meet again
				}
				err := replay(newWithHash[uint16, int](hash), steps)
				if err != nil {
					t.Log(err)
				}
				return err == nil
			}
			if err := quick.Check(law, &quick.Config{MaxCount: 500}); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestLargeMapSurvivesGrowthAndDecay(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	steps := make([]edit, 60_000)
	for i := range steps {
		steps[i] = edit{Key: uint16(r.Uint32()), Value: i, Delete: r.IntN(5) < i/15_000, Freeze: i%20_000 == 0}
	}
	if err := replay(New[uint16, int](), steps); err != nil {
		t.Error(err)
	}
}

func TestContentHasOneShape(t *testing.T) {
	hash := hashes()["spread"]
	direct := newWithHash[uint16, int](hash).Edit()
	detour := newWithHash[uint16, int](hash).Edit()
	for k := range uint16(2_000) {
		detour.Set(k, 1)
	}
	for k := range uint16(2_000) {
		if k%7 == 0 {
			direct.Set(k, 1)
		} else {
			detour.Delete(k)
		}
	}
	if got, want := countNodes(detour.Map().root), countNodes(direct.Map().root); got != want {
		t.Errorf("nodes after a detour = %d, want %d", got, want)
	}
}

func countNodes(n *node[uint16, int]) int {
	sum := 1
	for _, kid := range n.kids {
		sum += countNodes(kid)
	}
	return sum
}

func TestAllStopsWhenAsked(t *testing.T) {
	e := New[int, int]().Edit()
	for i := range 1_000 {
		e.Set(i, i)
	}
	for _, stop := range []int{1, 7, 999} {
		seen := 0
		for range e.Map().All() {
			if seen++; seen == stop {
				break
			}
		}
		if seen != stop {
			t.Errorf("keys seen = %d, want %d", seen, stop)
		}
	}
}

func TestChangedSkipsWhatVersionsShare(t *testing.T) {
	e := New[int, int]().Edit()
	for i := range 10_000 {
		e.Set(i, i)
	}
	before := e.Map()
	e.Set(77, -1)
	compared := 0
	for key := range e.Map().Changed(before, func(a, b int) bool { compared++; return a == b }) {
		if key != 77 {
			t.Errorf("Changed yields %d, want only 77", key)
		}
	}
	if compared == 0 || compared > 32*3 {
		t.Errorf("values compared = %d, want at most those of the nodes on the way to one key", compared)
	}
}

func TestChangedOfOtherMapsIsEverything(t *testing.T) {
	a, b := New[int, int]().Edit(), New[int, int]().Edit()
	a.Set(1, 1)
	b.Set(1, 1)
	b.Set(2, 2)
	for stop, want := range map[int]int{1: 1, 2: 2, 9: 3} {
		seen := 0
		for range a.Map().Changed(b.Map(), equal) {
			if seen++; seen == stop {
				break
			}
		}
		if seen != want {
			t.Errorf("keys seen = %d, want %d", seen, want)
		}
	}
}

func TestDeletingWhatIsNotThereCopiesNothing(t *testing.T) {
	m := New[int, int]()
	e := m.Edit()
	e.Set(1, 1)
	m = e.Map()
	e = m.Edit()
	if e.Delete(2) || e.Map().root != m.root {
		t.Error("Delete of a missing key made a new version")
	}
}

func FuzzMap(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 0x80, 1})
	f.Fuzz(func(t *testing.T, data []byte) {
		data = data[:min(len(data), 4096)] // longer histories only take longer
		var steps []edit
		for i := 0; i+1 < len(data); i += 2 {
			steps = append(steps, edit{
				Key: uint16(data[i]), Value: int(data[i+1]), Delete: data[i+1]&1 != 0, Freeze: data[i+1]&2 != 0,
			})
		}
		for name, hash := range hashes() {
			if err := replay(newWithHash[uint16, int](hash), steps); err != nil {
				t.Errorf("hash %s: %v", name, err)
			}
		}
	})
}

// A change costs the depth of the trie: about 1.3 µs and 1.7 kB at either size.
func BenchmarkOneChangeAmong(b *testing.B) {
	for _, size := range []int{1_000, 30_000} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			e := New[string, int]().Edit()
			keys := make([]string, size)
			for i := range keys {
				keys[i] = fmt.Sprintf("default/service-%d", i)
				e.Set(keys[i], i)
			}
			m := e.Map()
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				e := m.Edit()
				e.Set(keys[i%size], i)
				m = e.Map()
			}
		})
	}
}
