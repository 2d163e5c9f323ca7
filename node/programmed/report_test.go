package programmed_test

import (
	"encoding/json"
	"errors"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	web   = types.NamespacedName{Namespace: "shop", Name: "web"}
	began = time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)
)

func portOf(service types.NamespacedName) changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: service, Port: "http", Protocol: v1.ProtocolTCP}
}

// What a node lacks, by its Status. Each entry changes a node that has the change in IPv4.
func TestMissing(t *testing.T) {
	long := strings.Repeat("9", 30)
	for name, test := range map[string]struct {
		edit func(*proxier.FamilyStatus)
		want changetracker.Versions
		err  string // empty: the node has the change
	}{
		"it has the version":            {want: changetracker.Versions{Services: "20", EndpointSlices: "100"}},
		"it has a later version":        {want: changetracker.Versions{EndpointSlices: "99"}},
		"it has another kind's version": {want: changetracker.Versions{Services: "21"}, err: "IPv4: Services are those of version 20, want 21"},
		"it is behind":                  {want: changetracker.Versions{EndpointSlices: "101"}, err: "IPv4: EndpointSlices are those of version 100, want 101"},
		"versions longer than any integer": {
			edit: func(s *proxier.FamilyStatus) { s.Versions.EndpointSlices = long },
			want: changetracker.Versions{EndpointSlices: "1" + long}, err: "want 1" + long,
		},
		"nothing is programmed": {
			edit: func(s *proxier.FamilyStatus) { *s = proxier.FamilyStatus{} },
			want: changetracker.Versions{EndpointSlices: "1"}, err: "nothing is programmed yet",
		},
		"the last sync failed": {
			edit: func(s *proxier.FamilyStatus) {
				s.Versions, s.LastError = changetracker.Versions{}, errors.New("no memory")
			},
			want: changetracker.Versions{EndpointSlices: "1"}, err: "the last sync failed: no memory",
		},
		"damage": {
			edit: func(s *proxier.FamilyStatus) {
				s.Versions, s.Damaged, s.Repairing = changetracker.Versions{}, 1, true
				s.LastDamage = proxier.Damage{Object: "table ip kube-proxy", By: "nft"}
			},
			want: changetracker.Versions{EndpointSlices: "1"}, err: "not repaired yet: table ip kube-proxy, changed by nft",
		},
		"an old damage": {
			edit: func(s *proxier.FamilyStatus) { s.Versions, s.Damaged = changetracker.Versions{}, 1 },
			want: changetracker.Versions{EndpointSlices: "1"}, err: "does not call OnVersion",
		},
		"events of the kernel were lost": {
			edit: func(s *proxier.FamilyStatus) { s.Versions, s.Repairing = changetracker.Versions{}, true },
			want: changetracker.Versions{EndpointSlices: "1"}, err: "another program may have changed our kernel objects",
		},
		"parts of a change are left": {
			edit: func(s *proxier.FamilyStatus) { s.Versions, s.PendingSince = changetracker.Versions{}, began },
			want: changetracker.Versions{EndpointSlices: "1"}, err: "changes are being programmed, since 2026-11-01T12:00:00Z",
		},
		"the versions have no order": {
			edit: func(s *proxier.FamilyStatus) { s.Versions.EndpointSlices = "a1" },
			want: changetracker.Versions{Services: "1"}, err: "IPv4: this API server's versions cannot be compared",
		},
		"only the other kind has versions": {
			edit: func(s *proxier.FamilyStatus) { s.Versions.EndpointSlices = "" },
			want: changetracker.Versions{EndpointSlices: "1"}, err: "no version of EndpointSlices is known",
		},
		"no source says versions": {
			edit: func(s *proxier.FamilyStatus) { s.Versions = changetracker.Versions{} },
			want: changetracker.Versions{EndpointSlices: "1"}, err: "does not call OnVersion",
		},
		"the Service fails": {
			edit: func(s *proxier.FamilyStatus) {
				s.Failed = []*proxier.ServiceError{{Name: portOf(web), Err: errors.New("no room"), Since: began}}
			},
			want: changetracker.Versions{EndpointSlices: "1"}, err: `IPv4: port "http" (TCP) fails since 2026-11-01T12:00:00Z: no room`,
		},
		"another Service fails": {
			edit: func(s *proxier.FamilyStatus) {
				other := types.NamespacedName{Namespace: "shop", Name: "other"}
				s.Failed = []*proxier.ServiceError{{Name: portOf(other), Err: errors.New("no room"), Since: began}}
			},
			want: changetracker.Versions{EndpointSlices: "1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := proxier.FamilyStatus{Synced: true, LastSuccess: began, Versions: changetracker.Versions{Services: "20", EndpointSlices: "100"}}
			if test.edit != nil {
				test.edit(&s)
			}
			report := programmed.NewReport("n", provider{proxier.Status{Families: map[v1.IPFamily]proxier.FamilyStatus{v1.IPv4Protocol: s}}}, began)
			err := report.Missing(programmed.ServiceChange{Service: web, Versions: test.want})
			if test.err == "" && err != nil || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
				t.Errorf("Missing = %v, want %q", err, test.err)
			}
		})
	}
	if err := new(programmed.NodeReport).Missing(programmed.ServiceChange{Service: web}); err == nil {
		t.Error("a node without families has the change")
	}
}

// The JSON of a node says itself why its versions are off.
func TestTheReportSaysWhyVersionsAreOff(t *testing.T) {
	s := proxier.FamilyStatus{Synced: true, LastSuccess: began, Versions: changetracker.Versions{Services: "x", EndpointSlices: "100"}}
	server := httptest.NewServer(programmed.Handler("n", provider{proxier.Status{Families: map[v1.IPFamily]proxier.FamilyStatus{v1.IPv4Protocol: s}}}))
	t.Cleanup(server.Close)
	answer, err := server.Client().Get(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	var report map[string]any
	if err := json.NewDecoder(answer.Body).Decode(&report); err != nil {
		t.Fatal(err)
	}
	families, _ := report["families"].(map[string]any)
	family, _ := families["IPv4"].(map[string]any)
	if why, _ := family["error"].(string); !strings.Contains(why, "cannot be compared") || len(family) != 2 || len(family["sends"].([]any)) != 0 {
		t.Errorf("the answer has %v, want only why there is no version", family)
	}
}

// A real Provider behind a real HTTP server: a change, an engine that refuses one Service, one
// that fails, and a version that never comes.
func TestANodeIsAsked(t *testing.T) {
	engine := &proxiertest.RecordingEngine{}
	p, err := proxier.New(proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	if err != nil {
		t.Fatal(err)
	}
	proxiertest.Run(t, p)
	server := httptest.NewServer(programmed.Handler("node-1", p))
	t.Cleanup(server.Close)
	ask := programmed.OverHTTP(server.Client(), func(string) string { return server.URL })
	missing := func(version string) string {
		change := programmed.ServiceChange{Service: web, Versions: changetracker.Versions{Services: version}}
		report, err := ask(t.Context(), "node-1", change)
		if err != nil || report.Node != "node-1" {
			t.Fatalf("report %+v, %v, want one of node-1", report, err)
		}
		if err := report.Missing(change); err != nil {
			return err.Error()
		}
		return ""
	}
	eventually := func(version, want string) {
		t.Helper()
		poll.Until(t, want, func() bool { got := missing(version); return got == want || want != "" && strings.Contains(got, want) })
	}
	change := func(name, ip, version string) {
		p.OnServiceAdd(proxiertest.Service("shop", name, proxiertest.ClusterIPs(ip), proxiertest.Port("http", v1.ProtocolTCP, 80)))
		p.OnVersion(changetracker.InputServices, version)
	}
	eventually("1", "does not call OnVersion")
	change("web", "10.96.0.1", "5")
	eventually("5", "")
	eventually("6", "are those of version 5")
	engine.Refuse(portOf(web), errors.New("no room"))
	change("web", "10.96.0.2", "6")
	eventually("6", "no room")
	engine.Refuse(portOf(web), nil)
	eventually("6", "")
	engine.Refuse(portOf(types.NamespacedName{Namespace: "shop", Name: "other"}), errors.New("no room"))
	change("other", "10.96.0.3", "7")
	eventually("7", "")
	engine.Fail(errors.New("no kernel"))
	change("web", "10.96.0.4", "8")
	eventually("5", "no kernel")
	engine.Fail(nil)
	eventually("8", "")
}

// TestLimitKeepsCharactersWhole: an error is shortened between two characters.
func TestLimitKeepsCharactersWhole(t *testing.T) {
	for length, want := range map[int]string{0: "", 1: "a", 2: "a", 3: "aé", 4: "aé", 5: "aé", 6: "aé€", 7: "aé€b", 8: "aé€b"} {
		r := programmed.NodeReport{Families: map[v1.IPFamily]programmed.Family{v1.IPv4Protocol: {Error: "aé€b", Failed: []programmed.Failure{{Error: "aé€b"}}}}}
		r.Limit(1, length)
		if f := r.Families[v1.IPv4Protocol]; f.Error != want || f.Failed[0].Error != want {
			t.Errorf("%d bytes: %q and %q, want %q", length, f.Error, f.Failed[0].Error, want)
		}
	}
}
