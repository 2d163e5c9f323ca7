package chance_test

import (
	"slices"
	"testing"

	"github.com/serviceplane/serviceplane/internal/chance"
)

func TestSome(t *testing.T) {
	t.Setenv(chance.AllVariable, "")
	values := []int{1, 2, 3, 4, 5, 6, 7, 8}
	t.Setenv(chance.SeedVariable, "7")
	first := chance.Some(t, 3, values...)
	if again := chance.Some(t, 3, values...); len(first) != 3 || !slices.IsSorted(first) || !slices.Equal(first, again) {
		t.Errorf("the seed draws %v, then %v; want the same three values in order", first, again)
	}
	t.Setenv(chance.SeedVariable, "")
	seen := map[int]bool{}
	for range 200 { // misses one of the values with probability 2e-11
		for _, v := range chance.Some(t, 1, values...) {
			seen[v] = true
		}
	}
	if len(seen) != len(values) {
		t.Errorf("new seeds draw %v, want each of %v at some time", seen, values)
	}
	t.Setenv(chance.AllVariable, "1")
	if all := chance.Some(t, 1, values...); !slices.Equal(all, values) || chance.Few(1, 9) != 9 {
		t.Errorf("all are %v and %d, want %v and 9", all, chance.Few(1, 9), values)
	}
}
