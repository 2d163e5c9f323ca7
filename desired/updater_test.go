package desired

import (
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

func nameOf(text string) changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "test", Name: text}, Protocol: v1.ProtocolTCP}
}

// A service port that gives up a frontend comes before the one that gets it; important
// Services come first among the others.
func TestOneThatGivesUpAFrontendComesFirst(t *testing.T) {
	tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}})
	if err != nil {
		t.Fatal(err)
	}
	updater := NewUpdater(nameOf("b").NamespacedName)
	set := func(name string, addrs ...netip.Addr) {
		port := changetracker.ServicePort{Name: nameOf(name), ClusterIP: netip.AddrFrom4([4]byte{10, 96, 0, name[0]}), Port: 80, ExternalIPs: addrs}
		if _, err := tracker.Services.Set(port.Name.NamespacedName, port); err != nil {
			t.Error(err)
		}
	}
	want := func(when, names string) {
		t.Helper()
		_ = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			got := ""
			for _, c := range updater.Next(delta, Resolver{}, Globals{}, false).Changes {
				got += c.Name.Name
			}
			if got != names {
				t.Errorf("%s: the order is %s, want %s", when, got, names)
			}
			updater.Done(nil)
			return nil, nil
		})
	}
	set("a")
	set("b")
	set("c", vip)
	set("d")
	want("at first", "bacd")
	set("a", vip)
	set("b", externalIP)
	set("c")
	tracker.Services.Delete(nameOf("d").NamespacedName)
	want("c gives its VIP to a", "dcba")
	set("b", externalIP, vip)
	want("the older name has it", "b")
	set("0", vip)
	want("an even smaller name takes it from a", "a0")
}
