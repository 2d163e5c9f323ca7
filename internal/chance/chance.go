// Package chance lets tests do a part of their work, drawn by chance, and all of it on request. It has only
// helpers for tests.
package chance

import (
	"hash/fnv"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
)

// AllVariable and SeedVariable are environment variables: with 1, tests do all of their work; and the seed of
// what they draw.
const (
	AllVariable  = "SERVICEPLANE_ALL"
	SeedVariable = "SERVICEPLANE_SEED"
)

// All reports whether tests do all of their work.
func All() bool { return os.Getenv(AllVariable) == "1" }

// Few returns few, or all if tests do all of their work.
func Few(few, all int) int {
	if All() {
		return all
	}
	return few
}

// New returns a source of chance, another one for each test. It logs the seed, which is that of SeedVariable or a new one.
func New(tb testing.TB) *rand.Rand {
	tb.Helper()
	seed := uint64(rand.Uint32())
	if text := os.Getenv(SeedVariable); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			tb.Fatalf("read %s: %v", SeedVariable, err)
		}
	}
	tb.Logf("seed %d; to draw the same again: %s=%d", seed, SeedVariable, seed)
	name := fnv.New64a()
	_, _ = name.Write([]byte(tb.Name()))
	return rand.New(rand.NewPCG(seed, name.Sum64()))
}

// Some returns n of the values by chance, in their order; or all values if tests do all of their work.
func Some[T any](tb testing.TB, n int, values ...T) []T {
	tb.Helper()
	if All() || n >= len(values) {
		return values
	}
	drawn := New(tb).Perm(len(values))[:n]
	slices.Sort(drawn)
	some := make([]T, n)
	for i, at := range drawn {
		some[i] = values[at]
	}
	return some
}
