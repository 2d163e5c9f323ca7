package debughttp_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/node/debughttp"
)

const traced = "trace?protocol=TCP&source=10.244.0.1&destination=10.96.0.10:80&origin=pod"

// askWith sends a request to a handler, with headers as pairs.
func askWith(t *testing.T, handler http.Handler, method, path string, headers ...string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, "http://localhost/"+path, nil)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	return w
}

// TestTraceAnswersInJSON: the parameters reach the function, and its answer the client.
func TestTraceAnswersInJSON(t *testing.T) {
	t.Parallel()
	var got debughttp.TraceRequest
	handler := debughttp.Handler(newProxy(t), debughttp.WithTracer(func(_ context.Context, r debughttp.TraceRequest) (debughttp.TraceAnswer, error) {
		got = r
		return debughttp.TraceAnswer{
			Steps:   []debughttp.TraceStep{{Family: "inet", Table: "firewall", Chain: "forward", Hook: "forward", Rule: "drop", Handle: 7, Verdict: "drop"}},
			Verdict: "dropped", By: "a rule", Reasons: []string{"why"}, Sent: "no answer",
			Explanation: desired.Explanation{Packet: r.Packet, Verdict: desired.VerdictForward},
		}, nil
	}))
	w := askWith(t, handler, http.MethodPost, traced+"&packets=3&timeout=2s&send=true&netns=pod-1")
	want := debughttp.TraceRequest{
		Packet: desired.Packet{
			Protocol: desired.TCP, Source: netip.MustParseAddr("10.244.0.1"), Destination: netip.MustParseAddrPort("10.96.0.10:80"), Origin: desired.FromPod,
		},
		Packets: 3, Timeout: 2 * time.Second, Send: true, NetNS: "pod-1",
	}
	if got != want {
		t.Errorf("request %+v, want %+v", got, want)
	}
	var answer map[string]any
	if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil || w.Code != http.StatusOK {
		t.Fatalf("status %d, %v in %s", w.Code, err, w.Body)
	}
	wantAt(t, answer, `"TCP"`, "packet", "protocol")
	wantAt(t, answer, `[{"chain":"forward","family":"inet","handle":7,"hook":"forward","ours":false,"rule":"drop","table":"firewall","verdict":"drop"}]`, "steps")
	wantAt(t, answer, `"dropped"`, "verdict")
	wantAt(t, answer, `"a rule"`, "by")
	wantAt(t, answer, `["why"]`, "reasons")
	wantAt(t, answer, `"no answer"`, "sent")
	wantAt(t, answer, `"forward"`, "explain", "verdict")
	wantAt(t, answer, `false`, "agrees")
}

// A trace is refused without the option, from pages of other sites, and with invalid parameters.
func TestTracesAreRefused(t *testing.T) {
	t.Parallel()
	tracer := debughttp.WithTracer(func(context.Context, debughttp.TraceRequest) (debughttp.TraceAnswer, error) {
		return debughttp.TraceAnswer{}, errors.New("no nf_tables")
	})
	for name, test := range map[string]struct {
		options      []debughttp.Option
		method, path string
		headers      []string
		status       int
		text         string
	}{
		"without the option": {nil, "POST", traced, nil, 404, "no such page"},
		"GET":                {[]debughttp.Option{tracer}, "GET", traced, nil, 405, "want method POST"},
		"POST elsewhere":     {[]debughttp.Option{tracer}, "POST", "status", nil, 405, "want method GET"},
		"another site":       {[]debughttp.Option{tracer}, "POST", traced, []string{"Sec-Fetch-Site", "cross-site"}, 403, "another origin"},
		"another origin":     {[]debughttp.Option{tracer}, "POST", traced, []string{"Origin", "https://example.com"}, 403, "another origin"},
		"the own page":       {[]debughttp.Option{tracer}, "POST", traced, []string{"Sec-Fetch-Site", "same-origin"}, 500, "no nf_tables"},
		"no packet":          {[]debughttp.Option{tracer}, "POST", "trace?protocol=TCP", nil, 400, "parameter source"},
		"timeout":            {[]debughttp.Option{tracer}, "POST", traced + "&timeout=1h", nil, 400, "parameter timeout: want a duration such as 5s, up to 5m0s"},
		"packets":            {[]debughttp.Option{tracer}, "POST", traced + "&packets=101", nil, 400, "parameter packets"},
		"send":               {[]debughttp.Option{tracer}, "POST", traced + "&send=maybe", nil, 400, "parameter send"},
		"send SCTP":          {[]debughttp.Option{tracer}, "POST", strings.Replace(traced, "TCP", "SCTP", 1) + "&send=true", nil, 400, "parameter send"},
		"netns without send": {[]debughttp.Option{tracer}, "POST", traced + "&netns=pod-1", nil, 400, "parameter netns"},
	} {
		if w := askWith(t, debughttp.Handler(newProxy(t), test.options...), test.method, test.path, test.headers...); w.Code != test.status || !strings.Contains(w.Body.String(), test.text) {
			t.Errorf("%s: status %d, %s, want %d, %q", name, w.Code, w.Body, test.status, test.text)
		}
	}
}

// Four traces run at once, and the fifth is refused until one has ended.
func TestFourTracesRunAtOnce(t *testing.T) {
	t.Parallel()
	const most = 4
	began, ended := make(chan struct{}), make(chan struct{})
	handler := debughttp.Handler(newProxy(t), debughttp.WithTracer(func(context.Context, debughttp.TraceRequest) (debughttp.TraceAnswer, error) {
		began <- struct{}{}
		<-ended
		return debughttp.TraceAnswer{}, nil
	}))
	status := make(chan int, most)
	for range most {
		go func() { status <- askWith(t, handler, http.MethodPost, traced).Code }()
		<-began
	}
	if w := askWith(t, handler, http.MethodPost, traced); w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" {
		t.Errorf("the fifth trace: status %d, headers %v, want 503 with Retry-After", w.Code, w.Header())
	}
	close(ended)
	for range most {
		if got := <-status; got != http.StatusOK {
			t.Errorf("status %d, want 200", got)
		}
	}
}
