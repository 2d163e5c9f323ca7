package main

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// TestWhatCountsAsHealthy: HC-23, HC-24 with W-21 mended.
func TestWhatCountsAsHealthy(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	success := now.Add(-time.Hour)
	well := proxier.FamilyStatus{Synced: true, LastSuccess: success}
	late, soon, failing, fresh := well, well, well, proxier.FamilyStatus{}
	late.PendingSince = now.Add(-time.Minute) // exactly the limit
	soon.PendingSince = now.Add(-time.Minute + 1)
	failing.LastError = errors.New("the kernel is full")
	contested := proxier.Condition{Type: proxier.ConditionContested, Family: v1.IPv6Protocol, Message: "by nft"}
	for rule, c := range map[string]struct {
		v4, v6     proxier.FamilyStatus
		conditions []proxier.Condition
		healthy    bool
		v4Healthy  bool
		reasons    []string
	}{
		"all is well":                       {v4: well, v6: well, healthy: true, v4Healthy: true},
		"a change that waits not long":      {v4: soon, v6: well, healthy: true, v4Healthy: true},
		"a change that waits":               {v4: late, v6: well, reasons: []string{"IPv4: a change waits for 1m0s to be programmed"}},
		"the other family waits (HC-24)":    {v4: well, v6: late, v4Healthy: true, reasons: []string{"IPv6: a change waits for 1m0s to be programmed"}},
		"not programmed yet (W-21)":         {v4: well, v6: fresh, v4Healthy: true, reasons: []string{"IPv6: not programmed yet"}},
		"a failure that is young":           {v4: failing, v6: well, healthy: true, v4Healthy: true, reasons: []string{"IPv4: the kernel is full"}},
		"conditions are told, nothing else": {v4: well, v6: well, conditions: []proxier.Condition{contested}, healthy: true, v4Healthy: true, reasons: []string{"IPv6 Contested: by nft"}},
	} {
		t.Run(rule, func(t *testing.T) {
			h := &health{timeout: time.Minute, status: func() proxier.Status {
				return proxier.Status{Families: map[v1.IPFamily]proxier.FamilyStatus{v1.IPv4Protocol: c.v4, v1.IPv6Protocol: c.v6}, Conditions: c.conditions}
			}}
			got := h.report(now)
			want := healthReport{LastUpdated: success, CurrentTime: now, Healthy: c.healthy, Reasons: c.reasons, Status: map[v1.IPFamily]familyHealth{
				v1.IPv4Protocol: {success, c.v4Healthy},
			}}
			if !c.v6.LastSuccess.IsZero() {
				want.Status[v1.IPv6Protocol] = familyHealth{success, c.v6.PendingSince.IsZero()}
			}
			if c.healthy {
				want.LastUpdated = now // HC-27
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("report (-want +got):\n%s", diff)
			}
		})
	}
}

// TestHealthAnswers: HC-25, HC-26, HC-28 and the counters MET-13 and MET-14.
func TestHealthAnswers(t *testing.T) {
	status := proxier.Status{Families: map[v1.IPFamily]proxier.FamilyStatus{v1.IPv4Protocol: {}}}
	m := newMetrics()
	handler := (&health{timeout: time.Minute, status: func() proxier.Status { return status }, answered: m.answered}).handler()
	ask := func(path string) *http.Response {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		return w.Result()
	}
	expect := func(path string, want int, healthy bool) {
		t.Helper()
		answer := ask(path)
		var body map[string]any
		if err := json.NewDecoder(answer.Body).Decode(&body); err != nil || answer.StatusCode != want || body["healthy"] != healthy {
			t.Errorf("%s: code %d, body %v, error %v, want %d and healthy %v", path, answer.StatusCode, body, err, want, healthy)
		}
		for _, field := range []string{"lastUpdated", "currentTime"} {
			text, _ := body[field].(string)
			if _, err := time.Parse(time.RFC3339Nano, text); err != nil {
				t.Errorf("%s: %s: %v, want a time of RFC 3339", path, field, err)
			}
		}
		for header, want := range map[string]string{"Content-Type": "application/json", "X-Content-Type-Options": "nosniff"} {
			if got := answer.Header.Get(header); got != want {
				t.Errorf("%s: header %s = %q, want %q", path, header, got, want)
			}
		}
	}
	expect("/healthz", http.StatusServiceUnavailable, false)
	expect("/livez", http.StatusServiceUnavailable, false)
	status.Families[v1.IPv4Protocol] = proxier.FamilyStatus{Synced: true, LastSuccess: time.Now()}
	expect("/healthz", http.StatusOK, true)
	expect("/healthz", http.StatusOK, true)
	if got := ask("/other").StatusCode; got != http.StatusNotFound {
		t.Errorf("/other: code %d, want 404", got)
	}
	text := scrape(t, m)
	for _, want := range []string{
		`kubeproxy_proxy_healthz_total{code="200"} 2`, `kubeproxy_proxy_healthz_total{code="503"} 1`, `kubeproxy_proxy_livez_total{code="503"} 1`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("metrics lack %q", want)
		}
	}
}
