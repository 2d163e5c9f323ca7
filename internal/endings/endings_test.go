package endings_test

import (
	"testing"

	"github.com/serviceplane/serviceplane/internal/endings"
)

// TestPairs: few Endings have every pair of values.
func TestPairs(t *testing.T) {
	seen := func(all []*endings.Ending) map[[2]string]bool {
		pairs := map[[2]string]bool{}
		for _, e := range all {
			values := []string{"policy " + e.Policy, e.Topology, e.Clients, "others " + e.Others, "pod " + e.Pod, e.Objects}
			for i, a := range values {
				for _, b := range values[:i] {
					pairs[[2]string{a, b}] = true
				}
			}
		}
		return pairs
	}
	all, some := endings.All(), endings.Pairs()
	if len(all) != 4*3*2*11*4*5 || len(some) > 80 || len(seen(some)) != len(seen(all)) {
		t.Errorf("%d of %d Endings have %d pairs, want at most 80 of 5280 with %d", len(some), len(all), len(seen(some)), len(seen(all)))
	}
}
