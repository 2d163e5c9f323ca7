package maglev_test

import (
	"hash/fnv"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/serviceplane/serviceplane/internal/maglev"
)

func endpoints(n int) (list []netip.AddrPort) {
	for i := range n {
		list = append(list, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)}), 8080))
	}
	return list
}

// shares counts the slots of each endpoint.
func shares(table []uint16, n int) []int {
	counts := make([]int, n)
	for _, e := range table {
		counts[e]++
	}
	return counts
}

// Shares follow the weights within one slot of the exact share, or 2 %, whichever is more.
func TestSharesFollowWeights(t *testing.T) {
	t.Parallel()
	for title, weights := range map[string][]uint16{
		"one endpoint": {1}, "two": {1, 1}, "equal": slices.Repeat([]uint16{7}, 10), "different": {1, 2, 5},
		"far apart": {1, 100}, "greatest": {65535, 65535, 32768}, "hundred": slices.Repeat([]uint16{1}, 100), "thousand": slices.Repeat([]uint16{3}, 1000),
	} {
		t.Run(title, func(t *testing.T) {
			t.Parallel()
			table := maglev.Table(endpoints(len(weights)), weights, 0)
			total := 0
			for _, w := range weights {
				total += int(w)
			}
			for i, got := range shares(table, len(weights)) {
				want := float64(len(table)) * float64(weights[i]) / float64(total)
				if d := float64(got) - want; max(d, -d) > max(1, 0.02*want) {
					t.Errorf("endpoint %d has %d of %d slots, want %.1f", i, got, len(table), want)
				}
			}
		})
	}
	if got := maglev.Table(nil, nil, 0); len(got) != 0 {
		t.Errorf("a table of %d slots without endpoints", len(got))
	}
}

// TestTheMostEndpoints: each has a slot, and those above the limit have none.
func TestTheMostEndpoints(t *testing.T) {
	t.Parallel()
	for _, n := range []int{maglev.MaxEndpoints, maglev.MaxEndpoints + 1, 1 << 16} {
		for endpoint, slots := range shares(maglev.Table(endpoints(n), nil, 0), n) {
			if want := 1; endpoint < maglev.MaxEndpoints && slots != want || endpoint >= maglev.MaxEndpoints && slots != 0 {
				t.Fatalf("endpoint %d of %d has %d slots", endpoint, n, slots)
			}
		}
	}
}

// TestABoundOfSlots: a table has at most so many, unless there are more endpoints.
func TestABoundOfSlots(t *testing.T) {
	t.Parallel()
	for endpoints, sizes := range map[int]map[int]int{
		1:      {0: 251, 8: 7, 64: 61, 256: 251, 1 << 15: 251},
		10:     {0: 4093, 8: 13, 64: 61, 2048: 1021, 1 << 15: 4093},
		161:    {0: 65521, 8: 251, 256: 251, 2048: 1021, 1 << 15: 16381},
		20_000: {0: 65521, 8: 65521, 1 << 15: 65521},
	} {
		for most, want := range sizes {
			if got := maglev.Size(endpoints, most); got != want {
				t.Errorf("%d endpoints and at most %d slots: a table of %d, want %d", endpoints, most, got, want)
			}
		}
	}
}

// TestEqualWeightsAreNoWeights: the table is the same.
func TestEqualWeightsAreNoWeights(t *testing.T) {
	t.Parallel()
	if !slices.Equal(maglev.Table(endpoints(9), nil, 0), maglev.Table(endpoints(9), slices.Repeat([]uint16{3}, 9), 0)) {
		t.Error("the tables differ")
	}
}

// TestDisruption: when one of N endpoints goes, its slots move, and at most 2 % of the
// others (the paper's figure 12).
func TestDisruption(t *testing.T) {
	t.Parallel()
	for _, n := range []int{4, 10, 16, 100, 160, 500} {
		all := endpoints(n)
		before := maglev.Table(all, nil, 0)
		for _, gone := range []int{0, n / 2, n - 1} {
			rest := slices.Delete(slices.Clone(all), gone, gone+1)
			if maglev.Size(n, 0) != maglev.Size(n-1, 0) {
				t.Fatalf("%d endpoints: another size", n)
			}
			after, moved := maglev.Table(rest, nil, 0), 0
			for slot := range before {
				if was := all[before[slot]]; was != all[gone] && was != rest[after[slot]] {
					moved++
				}
			}
			if share := float64(moved) / float64(len(before)); share > 0.02 {
				t.Errorf("%d endpoints, without number %d: %.1f %% of all slots move between others, want at most 2 %%", n, gone, 100*share)
			}
		}
	}
}

// TestTablesNeverChange: nodes with different versions of this library agree.
func TestTablesNeverChange(t *testing.T) {
	t.Parallel()
	six := []netip.AddrPort{netip.MustParseAddrPort("[fd00::1]:53"), netip.MustParseAddrPort("[fd00::2]:53"), netip.MustParseAddrPort("[fd00::2]:54")}
	for title, c := range map[string]struct {
		list    []netip.AddrPort
		weights []uint16
		most    int
		want    uint64
	}{
		"IPv4": {endpoints(7), nil, 0, 0x1b06701a36747f51}, "IPv6": {six, nil, 0, 0xebb408e7ecef345},
		"weights": {endpoints(3), []uint16{1, 2, 5}, 0, 0x9734490821c7f104}, "many": {endpoints(200), nil, 0, 0xe841f69c9c717205}, "bounded": {endpoints(7), nil, 64, 0x920b80af6b8d37b9},
	} {
		h := fnv.New64a()
		for _, e := range maglev.Table(c.list, c.weights, c.most) {
			_, _ = h.Write([]byte{byte(e >> 8), byte(e)})
		}
		if got := h.Sum64(); got != c.want {
			t.Errorf("%s: the table's checksum is %#x, want %#x", title, got, c.want)
		}
	}
}

func FuzzTable(f *testing.F) {
	f.Add(uint64(1), uint16(3), true)
	f.Add(uint64(2), uint16(300), false)
	f.Fuzz(func(t *testing.T, seed uint64, n uint16, weighted bool) {
		random, count := rand.New(rand.NewPCG(seed, 0)), int(n%2000)+1
		var weights []uint16
		if weighted {
			for range count {
				weights = append(weights, uint16(random.Uint32()>>(random.Uint32()%16+16))|1)
			}
		}
		table := maglev.Table(endpoints(count), weights, 0)
		if len(table) != maglev.Size(count, 0) {
			t.Fatalf("%d slots, want %d", len(table), maglev.Size(count, 0))
		}
		for slot, e := range table {
			if int(e) >= count {
				t.Fatalf("slot %d has endpoint %d of %d", slot, e, count)
			}
		}
	})
}

func BenchmarkTable(b *testing.B) {
	for _, c := range []struct {
		name string
		n    int
	}{{"10", 10}, {"100", 100}, {"1000", 1000}} {
		list := endpoints(c.n)
		b.Run(c.name+"_endpoints", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				maglev.Table(list, nil, 0)
			}
		})
	}
}
