package metrics_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/serviceplane/serviceplane/node/metrics"
)

// fakeTransport answers each request after its time, with the status code in its path.
type fakeTransport struct{ after time.Duration }

func (f fakeTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	time.Sleep(f.after)
	if r.URL.Path == "/refused" {
		return nil, errors.New("connection refused")
	}
	return &http.Response{StatusCode: http.StatusForbidden, Body: http.NoBody}, nil
}

// Client requests are counted and measured, and a watch has no duration.
func TestClientRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry := prometheus.NewRegistry()
		wrap, err := metrics.NewClientRequests(registry)
		if err != nil {
			t.Fatal(err)
		}
		wrapped := wrap(fakeTransport{3 * time.Second})
		for _, ask := range []string{"GET /", "GET /refused", "POST /", "GET /?watch=true", "GET /?watch=false"} {
			method, path, _ := strings.Cut(ask, " ")
			response, err := wrapped.RoundTrip(httptest.NewRequestWithContext(t.Context(), method, "https://api.example:6443"+path, nil))
			if err == nil {
				_ = response.Body.Close()
			}
			if (err == nil) == (path == "/refused") {
				t.Errorf("%s: error %v", ask, err)
			}
		}
		families := scrape(t, registry)
		const requests, host = "rest_client_requests_total", "host=api.example:6443"
		for labels, want := range map[string]float64{"403 GET": 3, "<error> GET": 1, "403 POST": 1} {
			code, method, _ := strings.Cut(labels, " ")
			if got := value(t, families, requests, "code="+code, "method="+method, host); got != want {
				t.Errorf("%s: %v requests, want %v", labels, got, want)
			}
		}
		for verb, want := range map[string]uint64{"GET": 3, "POST": 1} {
			for _, m := range families["rest_client_request_duration_seconds"].GetMetric() {
				if h := m.GetHistogram(); m.GetLabel()[1].GetValue() == verb && (h.GetSampleCount() != want || h.GetSampleSum() != 3*float64(want)) {
					t.Errorf("%s: %d requests of %v seconds, want %d of 3 each", verb, h.GetSampleCount(), h.GetSampleSum(), want)
				}
			}
		}
		if got := len(families["rest_client_request_duration_seconds"].GetMetric()); got != 2 {
			t.Errorf("%d series of durations, want 2", got)
		}
		if _, err := metrics.NewClientRequests(registry); err == nil {
			t.Error("a registry takes the metrics twice")
		}
		if inner, ok := wrapped.(interface{ WrappedRoundTripper() http.RoundTripper }); !ok || inner.WrappedRoundTripper() != (fakeTransport{3 * time.Second}) {
			t.Error("client-go does not find the transport")
		}
	})
}
