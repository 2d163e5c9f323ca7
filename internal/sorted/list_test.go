package sorted

import (
	"cmp"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
)

type item struct{ key, value int }

func byKey(a, b *item) int { return cmp.Compare(a.key, b.key) }

func items(l *List[item]) (all []item) {
	for i := range l.All {
		all = append(all, *i)
	}
	return all
}

// naive is a list as a sorted slice.
type naive []item

func (n naive) with(edits []Edit[item]) naive {
	n = slices.Clone(n)
	for _, e := range edits {
		i, found := slices.BinarySearchFunc(n, e.Item, func(a, b item) int { return byKey(&a, &b) })
		if found {
			n = slices.Delete(n, i, i+1)
		}
		if !e.Remove {
			n = slices.Insert(n, i, e.Item)
		}
	}
	return n
}

func (n naive) check(t *testing.T, l List[item]) {
	t.Helper()
	if l.Len() != len(n) || !slices.Equal(items(&l), n) || !slices.Equal(l.Slice(), n) {
		t.Fatalf("list of %d items %v, want %d %v", l.Len(), items(&l), len(n), n)
	}
	for key := -1; key < 4; key++ {
		at := key * len(n) / 2
		var want *item
		if i := slices.IndexFunc(n, func(i item) bool { return i.key >= at }); i >= 0 {
			want = &n[i]
		}
		if got := l.Find(func(i *item) bool { return i.key < at }); (got == nil) != (want == nil) || got != nil && *got != *want {
			t.Fatalf("the first item from %d on is %v, want %v", at, got, want)
		}
	}
	if l.chunks == nil {
		return
	}
	for i, c := range l.chunks.list {
		if len(c.items) == 0 || len(c.items) > most || i > 0 && len(c.items)+len(l.chunks.list[i-1].items) <= most/2 {
			t.Fatalf("chunk %d of %d items after one of %d", i, len(c.items), len(l.chunks.list[max(i-1, 0)].items))
		}
	}
}

// checkWalk compares what Walk visits with the naive difference, and returns how many items it
// visits.
func checkWalk(t *testing.T, a, b List[item], before, after naive) (visits int) {
	t.Helper()
	was, is := map[int]int{}, map[int]int{}
	for _, i := range before {
		was[i.key] = i.value
	}
	for _, i := range after {
		is[i.key] = i.value
	}
	last := item{key: -1 << 60}
	Walk(&a, &b, byKey, func(x, y *item) {
		if visits++; x == nil && y == nil || x != nil && y != nil && x.key != y.key {
			t.Fatalf("Walk visits %v and %v", x, y)
		}
		for list, i := range map[*map[int]int]*item{&was: x, &is: y} {
			if i == nil {
				continue
			}
			if value, ok := (*list)[i.key]; !ok || value != i.value || i.key < last.key {
				t.Fatalf("Walk visits %v after %v", i, last)
			}
			delete(*list, i.key)
		}
		last = *cmp.Or(x, y)
	})
	if len(was) != len(is) {
		t.Fatalf("Walk leaves out %v and %v", was, is)
	}
	for key, value := range was {
		if other, ok := is[key]; !ok || other != value {
			t.Fatalf("Walk leaves out item %d, which differs", key)
		}
	}
	return visits
}

// edit makes random edits about neighbouring keys, or keys anywhere.
func edit(random *rand.Rand, about int) (edits []Edit[item]) {
	n, from, width := random.IntN(4), random.IntN(about), about
	if random.IntN(4) == 0 {
		n, width = random.IntN(300), 400
	}
	removes := random.IntN(4)
	for range n {
		edits = append(edits, Edit[item]{Item: item{key: from + random.IntN(width), value: random.IntN(3)}, Remove: random.IntN(3) < removes})
	}
	byItem := func(a, b Edit[item]) int { return byKey(&a.Item, &b.Item) }
	slices.SortFunc(edits, byItem)
	return slices.CompactFunc(edits, func(a, b Edit[item]) bool { return byItem(a, b) == 0 })
}

// FuzzList compares lists after random edits with sorted slices, older versions included.
func FuzzList(f *testing.F) {
	for seed := range uint64(8) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		random := rand.New(rand.NewPCG(seed, 0))
		about := []int{20, 200, 2000, 5000}[seed%4]
		var lists []List[item]
		var models []naive
		model := naive(nil)
		for key := range random.IntN(about) {
			model = append(model, item{key: key})
		}
		list := Of(slices.Clone([]item(model)))
		for range 60 {
			model.check(t, list)
			lists, models = append(lists, list), append(models, model)
			edits := edit(random, about)
			list, model = list.With(edits, byKey), model.with(edits)
			other := random.IntN(len(lists))
			checkWalk(t, lists[other], list, models[other], model)
			checkWalk(t, list, lists[other], model, models[other])
		}
		for i := range lists {
			models[i].check(t, lists[i])
		}
	})
}

// What an edit copies, and what a comparison visits, does not grow with the list, apart from the
// references to its chunks.
func TestAnEditCostsAChunk(t *testing.T) {
	for _, size := range []int{5_000, 50_000} {
		var all []item
		for key := range size {
			all = append(all, item{key: 2 * key})
		}
		list := Of(slices.Clone(all))
		for n, e := range []Edit[item]{
			{Item: item{key: size, value: 1}},
			{Item: item{key: size + 1}},
			{Item: item{key: size}, Remove: true},
			{Item: item{key: -1}},
			{Item: item{key: 3 * size}},
			{Item: item{key: 0}, Remove: true},
		} {
			next := list.With([]Edit[item]{e}, byKey)
			if visits := checkWalk(t, list, next, all, naive(all).with([]Edit[item]{e})); visits > 2*most {
				t.Errorf("edit %d among %d: a comparison visits %d items, want at most %d", n, size, visits, 2*most)
			}
			bytes := bytesOf(func() { _ = list.With([]Edit[item]{e}, byKey) })
			if limit := int64(3*most*16 + 16*size/most*2); bytes > limit {
				t.Errorf("edit %d among %d allocates %d bytes, want at most %d", n, size, bytes, limit)
			}
		}
	}
}

// bytesOf returns what a call allocates, on average.
func bytesOf(call func()) int64 {
	const calls = 100
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range calls {
		call()
	}
	runtime.ReadMemStats(&after)
	return int64(after.TotalAlloc-before.TotalAlloc) / calls
}

func TestSame(t *testing.T) {
	short, long := Of([]item{{key: 1}}), Of(make([]item, 2*most))
	for _, l := range []List[item]{{}, short, long} {
		if !l.Same(&l) {
			t.Errorf("a list of %d is not the same as itself", l.Len())
		}
	}
	if short.Same(&long) || long.Same(&short) || short.Same(&List[item]{}) {
		t.Error("different lists are the same")
	}
}
