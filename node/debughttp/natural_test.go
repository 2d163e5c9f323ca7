package debughttp

import (
	"slices"
	"testing"
)

func TestNumbersAreOrderedByValue(t *testing.T) {
	want := []string{"", "-", "0", "00", "1", "2", "10", "10a", "99999999999999999999", "100000000000000000000", "a", "a-1-b", "a-1-c", "a-02", "a-2", "a-2-a", "a-10", "b"}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortFunc(got, compareNatural)
	if !slices.Equal(got, want) {
		t.Errorf("the order is %q, want %q", got, want)
	}
}

// FuzzNaturalOrder: the order is total, whatever the texts are.
func FuzzNaturalOrder(f *testing.F) {
	f.Add("web-2", "web-10", "web-02")
	f.Add("a00", "a0", "a")
	f.Fuzz(func(t *testing.T, a, b, c string) {
		if (compareNatural(a, b) == 0) != (a == b) {
			t.Errorf("%q and %q compare as %d", a, b, compareNatural(a, b))
		}
		texts := []string{a, b, c}
		slices.SortFunc(texts, compareNatural)
		for i, x := range texts {
			for j, y := range texts {
				if got := compareNatural(x, y); got != -compareNatural(y, x) || i < j && got > 0 {
					t.Errorf("%q and %q compare as %d in the order %q", x, y, got, texts)
				}
			}
		}
	})
}
