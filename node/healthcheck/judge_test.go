package healthcheck

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

type families = map[v1.IPFamily]proxier.FamilyStatus

var noon = time.Date(2026, 1, 2, 12, 0, 0, 6, time.UTC)

// TestWhatCountsAsHealthy: HC-23, HC-24 and HC-27, without W-21.
func TestWhatCountsAsHealthy(t *testing.T) {
	early, later := noon.Add(-time.Hour), noon.Add(-time.Second)
	well := proxier.FamilyStatus{Synced: true, LastSuccess: early}
	late, soon, failing, fresh, first := well, well, well, proxier.FamilyStatus{}, proxier.FamilyStatus{}
	late.StaleSince = noon.Add(-time.Minute) // exactly the limit
	soon.StaleSince = noon.Add(-time.Minute + 1)
	failing.LastError = errors.New("the kernel is full")
	first.LastError = errors.New("no such table")
	first.StaleSince = soon.StaleSince
	newer := well
	newer.LastSuccess = later
	contested := proxier.Condition{Type: proxier.ConditionContested, Family: v1.IPv6Protocol, Message: "by nft"}
	settings := proxier.Condition{Type: proxier.ConditionKernelSettings, Message: "read-only"}
	ok, bad := FamilyHealthz{early, true}, FamilyHealthz{early, false}
	for rule, c := range map[string]struct {
		families   families
		conditions []proxier.Condition
		healthy    bool
		updated    time.Time
		status     map[v1.IPFamily]FamilyHealthz
		reasons    []string
	}{
		"healthy": {
			families: families{"IPv4": well, "IPv6": well}, healthy: true, updated: noon,
			status: map[v1.IPFamily]FamilyHealthz{"IPv4": ok, "IPv6": ok},
		},
		"one family is enough": {
			families: families{"IPv6": well}, healthy: true, updated: noon,
			status: map[v1.IPFamily]FamilyHealthz{"IPv6": ok},
		},
		"no family at all": {
			status: map[v1.IPFamily]FamilyHealthz{}, reasons: []string{"no IP family is served"},
		},
		"a change waits for less than the threshold": {
			families: families{"IPv4": soon, "IPv6": well}, healthy: true, updated: noon,
			status: map[v1.IPFamily]FamilyHealthz{"IPv4": ok, "IPv6": ok},
		},
		"a change waits for the threshold": {
			families: families{"IPv4": late, "IPv6": newer}, updated: later,
			status:  map[v1.IPFamily]FamilyHealthz{"IPv4": bad, "IPv6": {later, true}},
			reasons: []string{"IPv4: behind for 1m0s"},
		},
		"both families wait (HC-24)": {
			families: families{"IPv4": late, "IPv6": late}, updated: early,
			status:  map[v1.IPFamily]FamilyHealthz{"IPv4": bad, "IPv6": bad},
			reasons: []string{"IPv4: behind for 1m0s", "IPv6: behind for 1m0s"},
		},
		"not programmed yet (W-21)": {
			families: families{"IPv4": well, "IPv6": fresh}, updated: early,
			status:  map[v1.IPFamily]FamilyHealthz{"IPv4": ok},
			reasons: []string{"IPv6: not programmed yet"},
		},
		"the first attempt failed (W-21)": {
			families: families{"IPv4": first},
			status:   map[v1.IPFamily]FamilyHealthz{},
			reasons:  []string{"IPv4: no such table", "IPv4: not programmed yet"},
		},
		"a recent failure": {
			families: families{"IPv4": failing, "IPv6": well}, healthy: true, updated: noon,
			status:  map[v1.IPFamily]FamilyHealthz{"IPv4": ok, "IPv6": ok},
			reasons: []string{"IPv4: the kernel is full"},
		},
		"conditions are reported only": {
			families: families{"IPv4": well}, conditions: []proxier.Condition{contested, settings}, healthy: true, updated: noon,
			status:  map[v1.IPFamily]FamilyHealthz{"IPv4": ok},
			reasons: []string{"IPv6 Contested: by nft", "KernelSettings: read-only"},
		},
	} {
		t.Run(rule, func(t *testing.T) {
			status := proxier.Status{Families: c.families, Conditions: c.conditions, Node: changetracker.Node{Draining: "ignored"}}
			want := Healthz{LastUpdated: c.updated, CurrentTime: noon, Healthy: c.healthy, Status: c.status, Reasons: c.reasons}
			if diff := cmp.Diff(want, Evaluate(status, time.Minute, noon)); diff != "" {
				t.Errorf("report (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(want, Evaluate(status, 0, noon)); diff != "" {
				t.Errorf("report with the default threshold (-want +got):\n%s", diff)
			}
		})
	}
}

func TestTheThresholdIsTheCallers(t *testing.T) {
	status := proxier.Status{Families: families{"IPv4": {Synced: true, StaleSince: noon.Add(-time.Second)}}}
	for threshold, want := range map[time.Duration]bool{time.Second: false, time.Second + 1: true} {
		if got := Evaluate(status, threshold, noon).Healthy; got != want {
			t.Errorf("healthy = %v after 1s with threshold %v, want %v", got, threshold, want)
		}
	}
}

// HC-26: the names of the fields, and times as RFC 3339 with nanoseconds.
func TestAReportInJSON(t *testing.T) {
	got, err := json.Marshal(Evaluate(proxier.Status{Families: families{"IPv4": {Synced: true, LastSuccess: noon}, "IPv6": {}}}, 0, noon))
	want := `{"lastUpdated":"2026-01-02T12:00:00.000000006Z","currentTime":"2026-01-02T12:00:00.000000006Z","healthy":false,` +
		`"status":{"IPv4":{"lastUpdated":"2026-01-02T12:00:00.000000006Z","healthy":true}},"reasons":["IPv6: not programmed yet"]}`
	if err != nil || string(got) != want {
		t.Errorf("JSON = %s, error %v, want %s", got, err, want)
	}
}
