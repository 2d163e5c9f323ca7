package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// health answers load balancers and kubelets as kube-proxy does, except that a
// proxy is not healthy before it has programmed everything once. It does not know
// whether the node is about to be removed.
type health struct {
	status   func() proxier.Status
	timeout  time.Duration // how long a change may be pending
	answered func(path string, code int)
}

// healthReport is the body of an answer.
type healthReport struct {
	LastUpdated time.Time                    `json:"lastUpdated"`
	CurrentTime time.Time                    `json:"currentTime"`
	Healthy     bool                         `json:"healthy"`
	Status      map[v1.IPFamily]familyHealth `json:"status,omitempty"`
	// Reasons are ours: what is wrong, also when it does not count as unhealthy.
	Reasons []string `json:"reasons,omitempty"`
}

type familyHealth struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

const (
	healthzPath = "/healthz"
	livezPath   = "/livez"
)

func (h *health) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc(healthzPath, h.answer)
	mux.HandleFunc(livezPath, h.answer)
	return mux
}

func (h *health) answer(w http.ResponseWriter, r *http.Request) {
	report := h.report(time.Now())
	code := http.StatusOK
	if !report.Healthy {
		code = http.StatusServiceUnavailable
	}
	h.answered(r.URL.Path, code)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(report) // the client may have gone
}

func (h *health) report(now time.Time) healthReport {
	status := h.status()
	report := healthReport{CurrentTime: now, Healthy: len(status.Families) > 0, Status: map[v1.IPFamily]familyHealth{}}
	for name, family := range status.Families {
		reasons, healthy := h.judge(family, now)
		for _, reason := range reasons {
			report.Reasons = append(report.Reasons, fmt.Sprintf("%s: %s", name, reason))
		}
		report.Healthy = report.Healthy && healthy
		if family.LastSuccess.IsZero() {
			continue
		}
		report.Status[name] = familyHealth{family.LastSuccess, healthy}
		if family.LastSuccess.After(report.LastUpdated) {
			report.LastUpdated = family.LastSuccess
		}
	}
	for _, c := range status.Conditions {
		report.Reasons = append(report.Reasons, fmt.Sprintf("%s %s: %s", c.Family, c.Type, c.Message))
	}
	slices.Sort(report.Reasons)
	if report.Healthy {
		report.LastUpdated = now // as kube-proxy does, for load balancers that look at nothing else
	}
	return report
}

// judge says what is wrong with a family, and whether it counts.
func (h *health) judge(s proxier.FamilyStatus, now time.Time) (reasons []string, healthy bool) {
	healthy = true
	if !s.Synced {
		reasons, healthy = append(reasons, "not programmed yet"), false
	}
	if pending := now.Sub(s.PendingSince); !s.PendingSince.IsZero() && pending >= h.timeout {
		reasons = append(reasons, fmt.Sprintf("a change waits for %v to be programmed", pending.Round(time.Second)))
		healthy = false
	}
	if s.LastError != nil {
		reasons = append(reasons, s.LastError.Error())
	}
	return reasons, healthy
}
