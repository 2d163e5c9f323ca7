package healthcheck

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"

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

// NewHandler returns a handler that answers at HealthzPath and LivezPath with a Healthz in
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
	report := Evaluate(status, h.options.Threshold, time.Now())
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
	h.answer(w, LivezPath, Evaluate(h.status(), h.options.Threshold, time.Now()))
}

func (h *handler) answer(w http.ResponseWriter, path string, report Healthz) {
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

// defaultThreshold is that of kube-proxy: twice its longest pause between syncs.
const defaultThreshold = time.Minute

// Healthz is the health of a proxy, and in JSON the body of an answer. All fields but
// Reasons are the same as kube-proxy's.
type Healthz struct {
	// LastUpdated is when a family was programmed last, or CurrentTime if the proxy is
	// healthy, for load balancers that read nothing else.
	LastUpdated time.Time `json:"lastUpdated"`
	CurrentTime time.Time `json:"currentTime"`
	// NodeEligible means that load balancers may send new connections to the node; nil
	// if that was not checked.
	NodeEligible *bool `json:"nodeEligible,omitempty"`
	// Healthy is about the proxy only, and not about the node.
	Healthy bool `json:"healthy"`
	// Status has an entry for each family that has been programmed.
	Status map[v1.IPFamily]FamilyHealthz `json:"status,omitempty"`
	// Reasons are all faults, sorted, including those that do not make the proxy unhealthy.
	Reasons []string `json:"reasons,omitempty"`
}

// FamilyHealthz is the part of one IP family.
type FamilyHealthz struct {
	// LastUpdated is when the family was programmed last without any error.
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// Evaluate decides whether a proxy is healthy: a full sync of every family has succeeded once,
// and no family has been stale for threshold or longer (proxier.FamilyStatus.StaleSince). A
// threshold of 0 means 60s. It does not check the node.
func Evaluate(status proxier.Status, threshold time.Duration, now time.Time) Healthz {
	threshold = cmp.Or(threshold, defaultThreshold)
	report := Healthz{CurrentTime: now, Healthy: len(status.Families) > 0, Status: map[v1.IPFamily]FamilyHealthz{}}
	if !report.Healthy {
		report.Reasons = append(report.Reasons, "no IP family is served")
	}
	for name, family := range status.Families {
		reasons, healthy := judgeFamily(family, threshold, now)
		for _, reason := range reasons {
			report.Reasons = append(report.Reasons, fmt.Sprintf("%s: %s", name, reason))
		}
		report.Healthy = report.Healthy && healthy
		if !family.LastSuccess.IsZero() {
			report.Status[name] = FamilyHealthz{LastUpdated: family.LastSuccess, Healthy: healthy}
		}
	}
	for _, c := range status.Conditions {
		subject := strings.TrimSpace(fmt.Sprintf("%s %s", c.Family, c.Type))
		report.Reasons = append(report.Reasons, fmt.Sprintf("%s: %s", subject, c.Message))
	}
	slices.Sort(report.Reasons)
	report.LastUpdated = report.newest()
	if report.Healthy {
		report.LastUpdated = now
	}
	return report
}

// judgeFamily returns the faults of a family, and whether it is healthy.
func judgeFamily(s proxier.FamilyStatus, threshold time.Duration, now time.Time) (reasons []string, healthy bool) {
	healthy = true
	if !s.Synced {
		reasons, healthy = append(reasons, "not programmed yet"), false
	}
	if stale := now.Sub(s.StaleSince); !s.StaleSince.IsZero() && stale >= threshold {
		reasons = append(reasons, fmt.Sprintf("behind for %v", stale.Round(time.Second)))
		healthy = false
	}
	if s.LastError != nil {
		reasons = append(reasons, s.LastError.Error())
	}
	return reasons, healthy
}

// newest returns when any family was programmed last; zero if none was.
func (r *Healthz) newest() time.Time {
	var newest time.Time
	for _, family := range r.Status {
		if family.LastUpdated.After(newest) {
			newest = family.LastUpdated
		}
	}
	return newest
}
