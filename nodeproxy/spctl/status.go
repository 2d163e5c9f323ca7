package spctl

import (
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// statusAnswer has the fields of debughttp's status that tables show.
type statusAnswer struct {
	Title      string      `json:"title"`
	Version    string      `json:"version"`
	Now        time.Time   `json:"now"`
	Synced     bool        `json:"synced"`
	Waiting    []string    `json:"waiting"`
	Without    []string    `json:"without"`
	Node       node        `json:"node"`
	Families   []family    `json:"families"`
	Conditions []condition `json:"conditions"`
	Problems   []problem   `json:"problems"`
	ProblemsN  int         `json:"problemsTotal"`
}

type node struct {
	Name      string   `json:"name"`
	Zone      string   `json:"zone"`
	Addresses []string `json:"addresses"`
	PodCIDRs  []string `json:"podCIDRs"`
}

type family struct {
	Family       string    `json:"family"`
	Synced       bool      `json:"synced"`
	LastSuccess  time.Time `json:"lastSuccess"`
	LastError    string    `json:"lastError"`
	PendingSince time.Time `json:"pendingSince"`
	ServicePorts int       `json:"servicePorts"`
	NoInternal   int       `json:"noLocalEndpointsInternal"`
	NoExternal   int       `json:"noLocalEndpointsExternal"`
	Damaged      int       `json:"damaged"`
	Failed       []failure `json:"failed"`
	FailedTotal  int       `json:"failedTotal"`
}

type failure struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	PortName  string `json:"portName"`
	Protocol  string `json:"protocol"`
	Error     string `json:"error"`
}

type condition struct {
	Type    string    `json:"type"`
	Family  string    `json:"family"`
	Since   time.Time `json:"since"`
	Message string    `json:"message"`
}

type problem struct {
	Object string `json:"object"`
	Field  string `json:"field"`
	Value  string `json:"value"`
	Reason string `json:"reason"`
}

func (a *app) status() *cobra.Command {
	return &cobra.Command{
		Use:               "status",
		Short:             "Show whether each IP family is programmed, what failed, and conditions",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, _ []string) error {
			table := (*printer).statuses
			if a.options.Nodes == nil {
				table = func(w *printer, one []response) error { return w.status(one[0].Answer) }
			}
			return a.perNode(c, "status", url.Values{}, table, nil)
		},
	}
}

func (w *printer) status(content json.RawMessage) error {
	s, err := decode[statusAnswer](content)
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
	rows(w, familyHeading, s.Families, func(f family) []string { return f.cells(s.Now) })
	for i := range s.Families {
		w.failures(&s.Families[i])
	}
	if len(s.Conditions) > 0 {
		w.section("Conditions:")
	}
	rows(w, "TYPE FAMILY SINCE MESSAGE", s.Conditions, func(c condition) []string {
		return []string{c.Type, c.Family, ago(s.Now, c.Since), c.Message}
	})
	if len(s.Problems) > 0 {
		w.section("Values that are set aside (%d of %d):", len(s.Problems), s.ProblemsN)
	}
	rows(w, "OBJECT FIELD VALUE REASON", s.Problems, func(p problem) []string {
		return []string{p.Object, p.Field, p.Value, p.Reason}
	})
	return nil
}

const familyHeading = "FAMILY SYNCED LAST-SYNC PENDING SERVICE-PORTS FAILED DROPPING DAMAGED"

func (f *family) cells(now time.Time) []string {
	return []string{
		f.Family, yesNo(f.Synced), ago(now, f.LastSuccess), age(now, f.PendingSince), fmt.Sprint(f.ServicePorts),
		fmt.Sprint(f.FailedTotal), fmt.Sprint(f.NoInternal + f.NoExternal), fmt.Sprint(f.Damaged),
	}
}

// statuses prints several nodes side by side.
func (w *printer) statuses(answers []response) error {
	nodes, err := parts(answers, func(s *statusAnswer) []statusAnswer { return []statusAnswer{*s} })
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
			cells := f.cells(n.part.Now)
			table = append(table, slices.Concat([]string{n.node, n.part.Version}, cells, []string{list(conditions)}))
		}
	}
	rows(w, "NODE VERSION "+familyHeading+" CONDITIONS", table, func(cells []string) []string { return cells })
	return nil
}

func (w *printer) failures(f *family) {
	if f.LastError != "" {
		w.section("The last sync of %s failed: %s", f.Family, f.LastError)
	}
	if len(f.Failed) > 0 {
		w.section("Service ports of %s that failed (%d of %d):", f.Family, len(f.Failed), f.FailedTotal)
	}
	rows(w, "NAMESPACE NAME PORT ERROR", f.Failed, func(e failure) []string {
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
