package desired

import (
	"slices"
	"testing"
	"testing/quick"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Claims have a total order, and the name decides only between Services of one age.
func TestClaimsHaveOneOrder(t *testing.T) {
	type raw struct{ Kind, Age, UID, Name uint8 }
	from := func(r raw) claim {
		c := claim{Kind: Kind(1 + r.Kind%3), UID: types.UID(rune('a' + r.UID%3))}
		c.Name = changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "ns", Name: string(rune('a' + r.Name%3))}}
		if age := r.Age % 3; age > 0 {
			c.Created = time.Unix(int64(age), 0).UTC()
		}
		return c
	}
	law := func(x, y, z raw) bool {
		a, b, c := from(x), from(y), from(z)
		sameAge := a.Kind == b.Kind && a.Created.Equal(b.Created) && a.UID == b.UID
		renamed := b
		renamed.Name.Name = "0"
		return a.compare(b) == -b.compare(a) && (a.compare(b) == 0) == (a == b) &&
			(a.compare(b) > 0 || b.compare(c) > 0 || a.compare(c) <= 0) &&
			(sameAge || a.compare(b) == a.compare(renamed))
	}
	if err := quick.Check(law, &quick.Config{MaxCount: 5000}); err != nil {
		t.Error(err)
	}
}

func TestClaimsInTheirOrder(t *testing.T) {
	at := func(kind Kind, seconds int64, uid types.UID, name string) claim {
		c := claim{Kind: kind, UID: uid, Name: changetracker.ServicePortName{NamespacedName: types.NamespacedName{Name: name}}}
		if seconds > 0 {
			c.Created = time.Unix(seconds, 0)
		}
		return c
	}
	want := []claim{
		at(ClusterIP, 0, "", "z"), at(LoadBalancer, 9, "", "z"), at(ExternalIP, 1, "b", "z"), at(ExternalIP, 2, "a", "z"),
		at(ExternalIP, 2, "b", "x"), at(ExternalIP, 2, "b", "y"), at(ExternalIP, 0, "a", "a"),
	}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortFunc(got, claim.compare)
	if !slices.Equal(got, want) {
		t.Errorf("sorted: %v, want %v", got, want)
	}
	nodePort := at(NodePort, 5, "m", "m")
	for _, c := range []struct {
		vip  claim
		want bool
	}{
		{at(ClusterIP, 9, "m", "z"), false},
		{at(LoadBalancer, 9, "m", "a"), true},
		{at(ExternalIP, 9, "m", "a"), true},
		{at(ExternalIP, 1, "m", "z"), false},
		{at(ExternalIP, 0, "m", "a"), true},
		{at(ExternalIP, 5, "n", "a"), true},
		{at(ExternalIP, 5, "m", "a"), false},
		{at(ExternalIP, 5, "m", "m"), false}, // its own
	} {
		if got := c.vip.yieldsTo(nodePort); got != c.want {
			t.Errorf("%v yields to a node port: %t, want %t", c.vip, got, c.want)
		}
	}
}
