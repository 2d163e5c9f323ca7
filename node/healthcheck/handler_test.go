package healthcheck

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/proxier"
)

// asked returns the response to a request.
func asked(t *testing.T, handler http.Handler, method, path string) (int, map[string]any) {
	t.Helper()
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, nil))
	if w.Code == http.StatusNotFound {
		return w.Code, nil
	}
	var body map[string]any
	if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
		t.Fatalf("%s: body %q: %v", path, w.Body, err)
	}
	for header, want := range map[string]string{"Content-Type": "application/json", "X-Content-Type-Options": "nosniff"} {
		if got := w.Header().Get(header); got != want {
			t.Errorf("%s: header %s = %q, want %q (HC-28)", path, header, got, want)
		}
	}
	for _, field := range []string{"lastUpdated", "currentTime"} {
		text, _ := body[field].(string)
		if _, err := time.Parse(time.RFC3339Nano, text); err != nil {
			t.Errorf("%s: %s: %v, want a time of RFC 3339 (HC-26)", path, field, err)
		}
	}
	return w.Code, body
}

// TestHealthzAndLivez: HC-25, HC-26, HC-28, HC-30.
func TestHealthzAndLivez(t *testing.T) {
	success := time.Now().Add(-time.Hour)
	healthy := proxier.Status{Families: families{"IPv4": {Synced: true, LastSuccess: success}}}
	draining := healthy
	draining.Node.Draining = "it is being deleted"
	for _, c := range []struct {
		rule         string
		status       proxier.Status
		path, method string
		code         int
		healthy      bool
		eligible     any // nil if not reported
		updated      bool
		reasons      any
	}{
		{"not programmed yet (W-21)", proxier.Status{Families: families{"IPv4": {}}}, HealthzPath, "GET", 503, false, true, false, []any{"IPv4: not programmed yet"}},
		{"not programmed yet (W-21)", proxier.Status{Families: families{"IPv4": {}}}, LivezPath, "GET", 503, false, nil, false, []any{"IPv4: not programmed yet"}},
		{"healthy", healthy, HealthzPath, "GET", 200, true, true, true, nil},
		{"healthy", healthy, LivezPath, "GET", 200, true, nil, true, nil},
		{"any method (HC-25)", healthy, HealthzPath, "POST", 200, true, true, true, nil},
		{"a draining node gets no new connections (HC-30)", draining, HealthzPath, "GET", 503, true, false, false, []any{"node: it is being deleted"}},
		{"a draining node needs its proxy (HC-25)", draining, LivezPath, "GET", 200, true, nil, true, nil},
		{"other paths", healthy, "/", "GET", 404, false, nil, false, nil},
		{"other paths", healthy, "/healthz/more", "GET", 404, false, nil, false, nil},
	} {
		t.Run(fmt.Sprintf("%s%s", c.rule, c.path), func(t *testing.T) {
			var counted []string
			options := HandlerOptions{Answered: func(path string, code int) { counted = append(counted, fmt.Sprint(path, " ", code)) }}
			code, body := asked(t, NewHandler(func() proxier.Status { return c.status }, options), c.method, c.path)
			if code != c.code {
				t.Errorf("code = %d, want %d", code, c.code)
			}
			if body == nil {
				if len(counted) != 0 {
					t.Errorf("counted %v, want nothing", counted)
				}
				return
			}
			if body["healthy"] != c.healthy || body["nodeEligible"] != c.eligible || fmt.Sprint(body["reasons"]) != fmt.Sprint(c.reasons) {
				t.Errorf("body = %v, want healthy %v, nodeEligible %v, reasons %v", body, c.healthy, c.eligible, c.reasons)
			}
			if got := body["lastUpdated"] == body["currentTime"]; got != c.updated {
				t.Errorf("lastUpdated = %v at %v, want now: %v (HC-27)", body["lastUpdated"], body["currentTime"], c.updated)
			}
			if want := []string{fmt.Sprint(c.path, " ", c.code)}; !slices.Equal(counted, want) {
				t.Errorf("counted %v, want %v", counted, want)
			}
		})
	}
}

// HC-27: 503 because of the node has the time of the last update.
func TestAnIneligibleNodeTellsTheLastUpdate(t *testing.T) {
	success := time.Now().Add(-time.Hour).UTC()
	status := proxier.Status{Families: families{"IPv4": {Synced: true, LastSuccess: success}}}
	status.Node.Draining = "tainted"
	_, body := asked(t, NewHandler(func() proxier.Status { return status }, HandlerOptions{}), "GET", HealthzPath)
	if got, want := body["lastUpdated"], success.Format(time.RFC3339Nano); got != want {
		t.Errorf("lastUpdated = %v, want %v", got, want)
	}
}

func TestTheHandlerHasItsOwnThreshold(t *testing.T) {
	status := proxier.Status{Families: families{"IPv4": {Synced: true, StaleSince: time.Now().Add(-10 * time.Second)}}}
	for threshold, want := range map[time.Duration]int{time.Second: 503, time.Minute: 200, 0: 200} {
		for _, path := range []string{HealthzPath, LivezPath} {
			h := NewHandler(func() proxier.Status { return status }, HandlerOptions{Threshold: threshold})
			if got, body := asked(t, h, "GET", path); got != want {
				t.Errorf("%s with threshold %v: code %d, want %d: %v", path, threshold, got, want, strings.TrimSpace(fmt.Sprint(body)))
			}
		}
	}
}
