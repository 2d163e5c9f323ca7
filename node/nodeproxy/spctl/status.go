package spctl

import (
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/serviceplane/serviceplane/internal/answers"
)

func (a *app) status() *cobra.Command {
	return plain("status", "Show whether each IP family is programmed, what failed, and conditions", "", func(c *cobra.Command) error {
		table := (*printer).statuses
		if a.options.Nodes == nil {
			table = func(w *printer, one []response) error { return w.status(one[0].Answer) }
		}
		return a.perNode(c, "status", url.Values{}, table, nil)
	})
}

func (w *printer) status(content json.RawMessage) error {
	s, err := decode[answers.Status](content)
	if err != nil {
		return err
	}
	synced := yesNo(s.Synced)
	if len(s.Waiting) > 0 {
		synced += ", waiting for " + strings.Join(s.Waiting, ", ")
	}
	w.fields("Proxy", strings.TrimSpace(s.Title+" "+s.Version), "Node", s.Node.Name, "Zone", s.Node.Zone, "Addresses", list(s.Node.Addresses),
		"Pod CIDRs", list(s.Node.PodCIDRs), "Synced", synced, "Without", strings.Join(s.Without, ", "))
	w.section("IP families:")
	rows(w, familyHeading, s.Families, func(f answers.Family) []string { return familyCells(&f, s.Now) })
	for i := range s.Families {
		w.failures(&s.Families[i])
	}
	if len(s.Conditions) > 0 {
		w.section("Conditions:")
	}
	rows(w, "TYPE FAMILY SINCE MESSAGE", s.Conditions, func(c answers.Condition) []string {
		return []string{c.Type, c.Family, ago(s.Now, c.Since), c.Message}
	})
	if len(s.Problems) > 0 {
		w.section("Values that are set aside (%d of %d):", len(s.Problems), s.ProblemsTotal)
	}
	rows(w, "OBJECT FIELD VALUE REASON", s.Problems, func(p answers.Problem) []string {
		return []string{p.Object, p.Field, p.Value, p.Reason}
	})
	return nil
}

const familyHeading = "FAMILY SYNCED LAST-SYNC PENDING SERVICE-PORTS FAILED DROPPING DAMAGED"

func familyCells(f *answers.Family, now time.Time) []string {
	return []string{
		f.Family, yesNo(f.Synced), ago(now, f.LastSuccess), age(now, f.PendingSince), fmt.Sprint(f.ServicePorts),
		fmt.Sprint(f.FailedTotal), fmt.Sprint(f.NoLocalInternal + f.NoLocalExternal), fmt.Sprint(f.Damaged),
	}
}

// statuses prints several nodes side by side.
func (w *printer) statuses(responses []response) error {
	nodes, err := parts(responses, func(s *answers.Status) []answers.Status { return []answers.Status{*s} })
	if err != nil {
		return err
	}
	var table [][]string
	for _, n := range nodes {
		for i := range n.part.Families {
			f := &n.part.Families[i]
			var conditions []string
			for _, c := range n.part.Conditions {
				if c.Family == f.Family || c.Family == "" && i == 0 { // one of the node is not of each family
					conditions = append(conditions, c.Type)
				}
			}
			cells := familyCells(f, n.part.Now)
			table = append(table, slices.Concat([]string{n.node, n.part.Version}, cells, []string{list(conditions)}))
		}
	}
	rows(w, "NODE VERSION "+familyHeading+" CONDITIONS", table, func(cells []string) []string { return cells })
	return nil
}

func (w *printer) failures(f *answers.Family) {
	if f.LastError != "" {
		w.section("The last sync of %s failed: %s", f.Family, f.LastError)
	}
	if len(f.Failed) > 0 {
		w.section("Service ports of %s that failed (%d of %d):", f.Family, len(f.Failed), f.FailedTotal)
	}
	rows(w, "NAMESPACE NAME PORT ERROR", f.Failed, func(e answers.Failure) []string {
		return []string{e.Namespace, e.Name, strings.TrimSpace(e.PortName + " " + e.Protocol), e.Error}
	})
}

// age returns how long ago a time was by the proxy's clock; empty if there is none.
func age(now, t time.Time) string {
	if t.IsZero() {
		return ""
	}
	d := max(0, now.Sub(t))
	const minutes, hours, days = 2 * time.Minute, 2 * time.Hour, 48 * time.Hour
	switch {
	case d < minutes:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < hours:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < days:
		return fmt.Sprintf("%dh", int(d.Hours()))
	default:
		const day = 24
		return fmt.Sprintf("%dd", int(d.Hours()/day))
	}
}

func ago(now, t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return age(now, t) + " ago"
}
