package changetracker

import (
	"fmt"
	"net/netip"
	"testing"
)

// TestAHealthPortPassesInOnePart: a health check node port passes from a Service to one that is in an earlier part otherwise.
// Two Services that want it at once cannot both listen, and the second one tries again after a pause.
func TestAHealthPortPassesInOnePart(t *testing.T) {
	const port = 32000
	health := func(p *ServicePort) {
		p.HealthCheckNodePort, p.ExternalPolicyLocal = port, true
		p.LoadBalancerVIPs = []netip.Addr{vipOf(50_000 + len(p.Name.Namespace))}
	}
	tracker := mustTracker(t)
	setPort(t, tracker, "big/old", 1, health)
	applyPart(t, tracker, Part{})
	if users := tracker.healthUsers(t, port); len(users) != 1 {
		t.Fatalf("%v have the port, want one", users)
	}
	for i := range 100 {
		setPort(t, tracker, fmt.Sprintf("big/%d", i), 100+i)
	}
	if _, err := tracker.Services.Set(nameIn("big/old")); err != nil {
		t.Fatal(err)
	}
	setPort(t, tracker, "small/new", 2, health)
	for part := 0; ; part++ {
		delta, _ := applyPart(t, tracker, Part{Size: 10})
		var users []string
		for name := range delta.After.ByHealthCheckNodePort(port) {
			users = append(users, name.String())
		}
		if len(users) != 1 {
			t.Errorf("part %d: %v have the health check node port, want one", part, users)
		}
		if !delta.More {
			break
		}
	}
}

func (t *Tracker) healthUsers(tb testing.TB, port uint16) (users []string) {
	tb.Helper()
	delta, _ := applyPart(tb, t, Part{})
	for name := range delta.After.ByHealthCheckNodePort(port) {
		users = append(users, name.String())
	}
	return users
}
