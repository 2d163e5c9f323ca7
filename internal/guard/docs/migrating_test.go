package docs

import (
	"maps"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/serviceplane/serviceplane/metrics"
)

const migrating = "docs/MIGRATING.md"

// The words that a row of the tables of flags and metrics begins its second cell with.
const (
	same   = "same"      // kube-proxy has it, and we have it
	absent = "not there" // kube-proxy has it
	extra  = "only here"
)

// claims are what a table says of flags or metrics, by name. A row is about all the
// names that match in its first cell.
func claims(t *testing.T, title string, pattern *regexp.Regexp) map[string]row {
	t.Helper()
	all := map[string]row{}
	for _, cells := range find(t, migrating).table(t, title) {
		r := row{cells: cells}
		for _, kind := range []string{same, absent, extra} {
			if strings.HasPrefix(cells[1], kind) {
				r.kind = kind
			}
		}
		if r.kind == "" || r.kind == absent && cells[2] == "" {
			t.Errorf("%s: row %q says %q, want %q, %q or %q, and why it is not there", title, cells[0], cells[1], same, absent, extra)
		}
		for _, text := range texts(cells[0]) {
			for _, name := range pattern.FindAllString(text, -1) {
				if _, twice := all[name]; twice {
					t.Errorf("%s: %s is in two rows", title, name)
				}
				all[name] = r
			}
		}
	}
	return all
}

// row is one of a table, with what it says about its names.
type row struct {
	kind  string
	cells []string
}

// agree compares what a table says with what there is.
func agree(t *testing.T, title string, claimed map[string]row, there []string) {
	t.Helper()
	for _, name := range there {
		if r, ok := claimed[name]; !ok || r.kind == absent {
			t.Errorf("%s: %s is there, and its row is %q", title, name, r.cells)
		}
	}
	for name, r := range claimed {
		if r.kind != absent && !slices.Contains(there, name) {
			t.Errorf("%s: %s is not there, and its row is %q", title, name, r.cells)
		}
	}
}

func flagPattern() *regexp.Regexp {
	return regexp.MustCompile(`--[a-z][a-z0-9-]*[a-z0-9]|--v\b|-[hv]\b`)
}

// nodeproxyFlags are those that --help lists.
func nodeproxyFlags(t *testing.T) []string {
	t.Helper()
	command := exec.CommandContext(t.Context(), "go", "run", "./examples/nodeproxy", "--help")
	command.Dir = root
	out, err := command.CombinedOutput()
	if err != nil {
		t.Fatalf("--help: %v\n%s", err, out)
	}
	var flags []string
	for _, m := range regexp.MustCompile(`(?m)^ +(?:-\w, )?(--[\w-]+)`).FindAllStringSubmatch(string(out), -1) {
		flags = append(flags, m[1])
	}
	return flags
}

// TestEveryFlagIsInTheTable of docs/MIGRATING.md, and those that documents speak of
// are there.
func TestEveryFlagIsInTheTable(t *testing.T) {
	there, claimed := nodeproxyFlags(t), claims(t, "Flags", flagPattern())
	agree(t, "flags", claimed, there)
	for _, d := range documents(t) {
		for _, s := range d.spans() {
			if !strings.HasPrefix(s.text, "--") || strings.Contains(s.text, "…") {
				continue
			}
			if name := flagPattern().FindString(s.text); !slices.Contains(there, name) && claimed[name].kind != absent {
				t.Errorf("%s:%d: nodeproxy has no flag `%s`", d.path, s.line, s.text)
			}
		}
	}
}

// TestFieldsOfTheFileThatMeanNothing are those that docs/MIGRATING.md names.
func TestFieldsOfTheFileThatMeanNothing(t *testing.T) {
	_, body, found := strings.Cut(read(t, "examples/nodeproxy/configfile.go"), "func unsupported() []string {")
	body, _, closed := strings.Cut(body, "\n}")
	if !found || !closed {
		t.Fatal("there is no unsupported() any more")
	}
	var want []string
	for _, m := range regexp.MustCompile(`"([\w.]+)"`).FindAllStringSubmatch(body, -1) {
		want = append(want, m[1])
	}
	for _, l := range find(t, migrating).lines {
		text, isList := strings.CutPrefix(l.text, "Fields that mean nothing here: ")
		if !isList {
			continue
		}
		got := texts(text)
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s names %q, the program has %q", migrating, got, want)
		}
		return
	}
	t.Errorf("%s names no fields, want %q", migrating, want)
}

func metricPattern() *regexp.Regexp { return regexp.MustCompile(`\b(kubeproxy|serviceplane)_[a-z_]+`) }

// recorder is a registerer that keeps names.
type recorder struct {
	prometheus.Registerer

	names map[string]bool
}

func (r *recorder) Register(c prometheus.Collector) error {
	descs := make(chan *prometheus.Desc)
	go func() {
		defer close(descs)
		c.Describe(descs)
	}()
	name := regexp.MustCompile(`fqName: "(\w+)"`)
	for d := range descs {
		r.names[name.FindStringSubmatch(d.String())[1]] = true
	}
	return nil
}

// registered are the modes that each of our metrics is there in.
func registered(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, mode := range []string{"nftables", "iptables", "ipvs", "userspace"} {
		r := &recorder{names: map[string]bool{}}
		if _, err := metrics.New(r, metrics.Options{Mode: mode, PerService: true}); err != nil {
			t.Fatal(err)
		}
		for name := range r.names {
			all[name] = append(all[name], mode)
		}
	}
	return all
}

// TestEveryMetricIsInTheTable of docs/MIGRATING.md with the modes that have it, and
// those that documents speak of are there.
func TestEveryMetricIsInTheTable(t *testing.T) {
	there, claimed := registered(t), claims(t, "Metrics", metricPattern())
	agree(t, "metrics", claimed, slices.Collect(maps.Keys(there)))
	for name, modes := range there {
		want := strings.Join(modes, ", ")
		if len(modes) == 4 {
			want = "all"
		}
		if r := claimed[name]; r.kind != "" && strings.TrimPrefix(r.cells[1], r.kind+": ") != want {
			t.Errorf("%s: the table says %q, want %q", name, r.cells[1], r.kind+": "+want)
		}
	}
	for _, d := range documents(t) {
		for _, s := range d.spans() {
			for _, name := range metricPattern().FindAllString(s.text, -1) {
				base := regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(name, "")
				if there[name] == nil && there[base] == nil && claimed[name].kind != absent && !strings.Contains(s.text, name+"…") {
					t.Errorf("%s:%d: there is no metric `%s`", d.path, s.line, name)
				}
			}
		}
	}
}
