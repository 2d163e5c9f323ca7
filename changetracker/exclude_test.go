package changetracker

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// Exclusions agree with Select over random endpoints: the reason is empty exactly for
// those that are selected.
func TestExclusionsAgreeWithSelect(t *testing.T) {
	dice := rand.New(rand.NewPCG(1, 2))
	seen := map[Exclusion]int{}
	node := Node{Name: "here", Zone: "a"}
	// Both policies are Local, and traffic from outside is short-circuited, so that
	// Select answers for both scopes.
	port := &ServicePort{NodePort: 30000, InternalPolicyLocal: true, ExternalPolicyLocal: true}
	for range 5000 {
		endpoints := make([]Endpoint, dice.IntN(6))
		for i := range endpoints {
			endpoints[i] = randomEndpoint(dice, i)
		}
		selection := Select(port, endpoints, node)
		cluster, _ := ExplainCluster(port, endpoints, node)
		local, _ := ExplainLocal(port, endpoints, node)
		for i := range endpoints {
			for scope, c := range map[string]struct {
				why      Exclusion
				selected []Endpoint
			}{"cluster": {cluster[i], selection.Cluster}, "local": {local[i], selection.Local}} {
				seen[c.why]++
				isSelected := slices.ContainsFunc(c.selected, func(e Endpoint) bool { return e.Addr == endpoints[i].Addr })
				if isSelected != (c.why == "") {
					t.Fatalf("%s: %+v among %+v: reason %q, selected %v", scope, endpoints[i], endpoints, c.why, isSelected)
				}
			}
		}
	}
	for _, reason := range []Exclusion{
		ExcludedNotReady, ExcludedNotServing, ExcludedDraining, ExcludedElsewhere, ExcludedByNodeHint, ExcludedByZoneHint, ExcludedEjected,
		ExcludedMaintenance, ExcludedStandby,
	} {
		if seen[reason] == 0 {
			t.Errorf("reason %q never came up", reason)
		}
	}
}

func randomEndpoint(dice *rand.Rand, i int) Endpoint {
	e := Endpoint{Addr: addrPort([]string{"10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1", "10.0.0.5:1"}[i]), Ready: true, Serving: true}
	if dice.IntN(2) == 0 {
		e.Node = "here"
	}
	e.Priority = uint8(max(0, dice.IntN(5)-2))
	if e.Maintenance = dice.IntN(8) == 0; e.Maintenance {
		e.tidy()
		return e
	}
	switch dice.IntN(5) {
	case 0:
		e.Ready, e.Terminating = false, true
	case 1:
		e.Ready, e.Serving = false, false
		e.Terminating, e.Ejected = dice.IntN(2) == 0, dice.IntN(3) == 0
	}
	if dice.IntN(4) > 0 {
		e.ZoneHints = []string{[]string{"a", "b"}[dice.IntN(2)]}
	}
	if dice.IntN(3) == 0 {
		e.NodeHints = []string{[]string{"here", "there"}[dice.IntN(2)]}
	}
	return e
}
