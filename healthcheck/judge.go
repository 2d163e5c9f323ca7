package healthcheck

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// defaultThreshold is kube-proxy's: twice its longest pause between syncs.
const defaultThreshold = time.Minute

// Report is a judgement about a proxy, and in JSON the body of an answer. All
// fields but Reasons are as kube-proxy's.
type Report struct {
	// LastUpdated is when a family was programmed last, or CurrentTime when all is
	// well, for load balancers that look at nothing else.
	LastUpdated time.Time `json:"lastUpdated"`
	CurrentTime time.Time `json:"currentTime"`
	// NodeEligible says that load balancers may give the node something new; nil
	// when that is not looked at.
	NodeEligible *bool `json:"nodeEligible,omitempty"`
	// Healthy is about the proxy only, and not about the node.
	Healthy bool `json:"healthy"`
	// Status has an entry for each family that has been programmed.
	Status map[v1.IPFamily]FamilyReport `json:"status,omitempty"`
	// Reasons are what is wrong, also when it does not count as unhealthy, sorted.
	Reasons []string `json:"reasons,omitempty"`
}

// FamilyReport is the part of one IP family.
type FamilyReport struct {
	// LastUpdated is when the family was programmed last without any error.
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// Judge says whether a proxy is healthy: every family has been programmed in full
// once, and none of them has been stale for threshold or longer: see
// proxier.FamilyStatus.StaleSince. A threshold of 0 means 60s. It does not look at
// the node.
func Judge(status proxier.Status, threshold time.Duration, now time.Time) Report {
	threshold = cmp.Or(threshold, defaultThreshold)
	report := Report{CurrentTime: now, Healthy: len(status.Families) > 0, Status: map[v1.IPFamily]FamilyReport{}}
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
			report.Status[name] = FamilyReport{LastUpdated: family.LastSuccess, Healthy: healthy}
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

// judgeFamily says what is wrong with a family, and whether it counts.
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

// newest is when any family was programmed last; zero when none was.
func (r *Report) newest() time.Time {
	var newest time.Time
	for _, family := range r.Status {
		if family.LastUpdated.After(newest) {
			newest = family.LastUpdated
		}
	}
	return newest
}
