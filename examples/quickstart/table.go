package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// connections is the number of connections for each line of a table.
const connections = 12

// row is one line of a table: some connections from one client to one frontend.
type row struct {
	service, vip, kind, policy, from string
	outcome, source                  string
}

// write prints the rows as a table. Only the first row of a Service has its name.
func write(out io.Writer, rows []row) error {
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "  SERVICE\tVIP\tKIND\tPOLICY\tFROM\tANSWERED BY\tSOURCE")
	last := ""
	for _, r := range rows {
		service := r.service
		if service == last {
			service = ""
		}
		last = r.service
		_, _ = fmt.Fprintln(w, "  "+strings.Join([]string{service, r.vip, r.kind, r.policy, r.from, r.outcome, r.source}, "\t"))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for line := range strings.Lines(text.String()) {
		if _, err := fmt.Fprintln(out, strings.TrimRight(line, " \n")); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintln(out)
	return err
}

// countsText returns how often each name occurs: "web-1 x5, web-2 x7".
func countsText(counts map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s x%d", name, counts[name]))
	}
	return strings.Join(parts, ", ")
}

// journal is a proxier.Observer that stores the last sync with changes of each IP family.
type journal struct {
	mu    sync.Mutex
	syncs map[v1.IPFamily]proxier.SyncReport // guarded by mu
}

// ObserveSync implements proxier.Observer.
func (j *journal) ObserveSync(report proxier.SyncReport) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.syncs == nil {
		j.syncs = map[v1.IPFamily]proxier.SyncReport{}
	}
	if report.Apply.Writes > 0 || report.Err != nil {
		j.syncs[report.Family] = report
	}
}

// take describes the syncs since the last call.
func (j *journal) take() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	var parts []string
	for _, family := range families() {
		if report, ok := j.syncs[family]; ok {
			parts = append(parts, fmt.Sprintf("%s %v for %d kernel objects", family, report.Duration.Round(10*time.Microsecond), report.Apply.Writes))
		}
	}
	clear(j.syncs)
	return "  synced: " + strings.Join(parts, ", ")
}
