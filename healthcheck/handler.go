package healthcheck

import (
	"encoding/json"
	"net/http"
	"slices"
	"time"

	"github.com/serviceplane/serviceplane/proxier"
)

// HandlerOptions configure NewHandler. The zero value is ready for use.
type HandlerOptions struct {
	// Threshold is how long a change may wait to be programmed; 0 means 60s.
	Threshold time.Duration
	// UnhealthyConditions are types of Conditions that make the answer at HealthzPath 503
	// while the Status has one of them. The answer at LivezPath does not depend on them: a
	// restart of the proxy would not help.
	UnhealthyConditions []string
	// Answered, if set, is called for every answer at one of the paths. It must be
	// safe for concurrent calls.
	Answered func(path string, code int)
}

// The paths of NewHandler.
const (
	// HealthzPath is for load balancers: 200 if the proxy is healthy and the node is
	// not draining, 503 otherwise.
	HealthzPath = "/healthz"
	// LivezPath is for kubelets: 200 if the proxy is healthy, 503 otherwise. A draining
	// node needs its proxy until the end.
	LivezPath = "/livez"
)

// NewHandler returns a handler that answers at HealthzPath and LivezPath with a Report in
// JSON. status is that of a Provider.
func NewHandler(status func() proxier.Status, options HandlerOptions) http.Handler {
	h := &handler{status: status, options: options}
	mux := http.NewServeMux()
	mux.HandleFunc(HealthzPath, h.healthz)
	mux.HandleFunc(LivezPath, h.livez)
	return mux
}

type handler struct {
	status  func() proxier.Status
	options HandlerOptions
}

func (h *handler) healthz(w http.ResponseWriter, _ *http.Request) {
	status := h.status()
	report := Judge(status, h.options.Threshold, time.Now())
	eligible := status.Node.Draining == ""
	report.NodeEligible = &eligible
	unhealthy := func(c proxier.Condition) bool { return slices.Contains(h.options.UnhealthyConditions, c.Type) }
	if slices.ContainsFunc(status.Conditions, unhealthy) {
		report.Healthy, report.LastUpdated = false, report.newest()
	}
	if !eligible {
		report.LastUpdated = report.newest()
		report.Reasons = append(report.Reasons, "node: "+status.Node.Draining)
		slices.Sort(report.Reasons)
	}
	h.answer(w, HealthzPath, report)
}

func (h *handler) livez(w http.ResponseWriter, _ *http.Request) {
	h.answer(w, LivezPath, Judge(h.status(), h.options.Threshold, time.Now()))
}

func (h *handler) answer(w http.ResponseWriter, path string, report Report) {
	code := http.StatusOK
	if !report.Healthy || report.NodeEligible != nil && !*report.NodeEligible {
		code = http.StatusServiceUnavailable
	}
	if h.options.Answered != nil {
		h.options.Answered(path, code)
	}
	writeHeader(w, code)
	_ = json.NewEncoder(w).Encode(report) // the client may have disconnected
}

func writeHeader(w http.ResponseWriter, code int) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
}
