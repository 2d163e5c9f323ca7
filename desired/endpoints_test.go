package desired

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// Endpoints are what the same operations make of a sorted slice.
func TestEndpointsAreASortedList(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 0))
	addr := func() netip.AddrPort {
		n := random.IntN(600)
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}), 80)
	}
	var list Endpoints
	var model []netip.AddrPort
	longest := 0
	for range 600 {
		was, old := list, model
		more := []netip.AddrPort{addr(), addr(), addr()}
		list, model = list.With(more...), slices.Concat(model, more)
		switch gone, n := []netip.AddrPort{addr(), more[2], addr()}, random.IntN(200); {
		case n < 40:
			list = list.Without(gone...)
			model = slices.DeleteFunc(model, func(at netip.AddrPort) bool { return slices.Contains(gone, at) })
		case n == 40: // short again
			list, model = EndpointsOf(more...), more
		}
		model = slices.Clone(model)
		slices.SortFunc(model, netip.AddrPort.Compare)
		model = slices.Compact(model)
		longest = max(longest, len(model))
		if !slices.Equal(list.Slice(), model) || !slices.Equal(slices.Collect(list.All()), model) || list.Len() != len(model) {
			t.Fatalf("%d endpoints %v, want %d %v", list.Len(), list, len(model), model)
		}
		if other := EndpointsOf(slices.Concat(model[len(model)/2:], model)...); !other.Equal(list) || !list.Equal(other) || was.Equal(list) != slices.Equal(old, model) {
			t.Fatalf("%v is not equal to %v", list, other)
		}
		if at := addr(); list.Has(at) != slices.Contains(model, at) {
			t.Fatalf("Has(%v) is %t in %v", at, list.Has(at), list)
		}
		without := func(a, b []netip.AddrPort) []netip.AddrPort {
			return slices.DeleteFunc(slices.Clone(a), func(at netip.AddrPort) bool { return slices.Contains(b, at) })
		}
		added, removed := list.Changes(was)
		if !slices.Equal(added, without(model, old)) || !slices.Equal(removed, without(old, model)) {
			t.Fatalf("from %v to %v: added %v, removed %v", old, model, added, removed)
		}
	}
	if longest < 200 {
		t.Errorf("never more than %d endpoints, want a long list", longest)
	}
}
