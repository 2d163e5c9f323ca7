package changetracker

import (
	"errors"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// Applied follows what was heard: at once if there is nothing to apply, otherwise when an Apply
// that began later has succeeded, also if it failed for single service ports.
func TestVersionsAreApplied(t *testing.T) {
	tracker := mustTracker(t)
	services := func(version string) { tracker.Heard(InputServices, version) }
	slices := func(version string) { tracker.Heard(InputEndpointSlices, version) }
	want := func(when, services, slices string) {
		t.Helper()
		if got := tracker.Applied(v1.IPv4Protocol); got != (Versions{services, slices}) {
			t.Errorf("%s: applied %+v, want Services %q and EndpointSlices %q", when, got, services, slices)
		}
	}
	apply := func(err error, failed ...ServicePortName) {
		_ = tracker.Apply(v1.IPv4Protocol, func(Delta) ([]ServicePortName, error) { return failed, err })
	}
	services("1")
	slices("2")
	want("before the first Apply", "", "")
	apply(errors.New("no"))
	services("3")
	want("after an Apply that failed", "", "")
	apply(nil)
	want("after the first Apply", "3", "2")
	services("4")
	slices("5")
	want("after versions without a change", "4", "5")

	add := func(name, ip string) ServicePortName {
		t.Helper()
		s := ServicePort{Name: portName("http", v1.ProtocolTCP), ClusterIP: netip.MustParseAddr(ip), Port: 80}
		s.Name.Name = name
		if _, err := tracker.Services.Set(s.Name.NamespacedName, s); err != nil {
			t.Fatal(err)
		}
		return s.Name
	}
	a := add("a", "10.0.0.1")
	services("6")
	slices("7")
	want("after a change", "4", "5")
	apply(errors.New("no"))
	slices("8")
	want("after a change whose Apply failed", "4", "5")
	_ = tracker.Apply(v1.IPv4Protocol, func(Delta) ([]ServicePortName, error) {
		services("9")
		want("during an Apply", "4", "5")
		return nil, nil
	})
	want("after an Apply in which versions came without a change", "9", "8")
	_ = tracker.Apply(v1.IPv4Protocol, func(Delta) ([]ServicePortName, error) {
		add("b", "10.0.0.2")
		services("10")
		return nil, nil
	})
	want("after an Apply in which a change came", "9", "8")
	apply(nil)
	want("after its Apply", "10", "8")

	add("a", "10.0.0.3")
	services("11")
	apply(nil, a)
	want("after an Apply that failed for a service port", "11", "8")
	services("12")
	want("while the service port fails", "12", "8")
	tracker.SetNode(Node{Name: "n"})
	services("13")
	want("after the node changed", "12", "8")
	apply(nil)
	want("after the full Apply", "13", "8")
	tracker.Heard(InputNode, "14")
	want("after a version of an input without versions", "13", "8")
	if got := tracker.Applied("IPv5"); got != (Versions{}) {
		t.Errorf("applied %+v of an unknown family, want none", got)
	}
}
