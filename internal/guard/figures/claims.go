package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// claim is a text with figures outside of the tables, and what proves it: metrics of a
// benchmark, a test, or a reason why nothing has to.
type claim struct {
	file, text string

	benchmark string
	metrics   map[string]float64

	test   string // its file and name
	reason string
}

func claims() []claim {
	return []claim{
		{
			file: "README.md", text: "One remote endpoint replaced among 30,000 Services is two element writes in one netlink transaction.",
			benchmark: onNFTables + "/N=30000/E=10/replaced=1", metrics: map[string]float64{"writes": 2, "transactions": 1},
		},
		{
			file: "docs/TRACING.md", text: "A connection that is not wanted costs 12 allocations",
			benchmark: "tracing.BenchmarkUnsampledConnection", metrics: map[string]float64{"allocs/op": 12},
		},
		{
			file: "docs/TRACING.md", text: "For example, on a quiet machine a UDP endpoint was replaced: queued 142 µs, tracker 21 µs, resolve 11 µs, plan 20 µs, " +
				"apply 105 µs, conntrack 25 ms, most of it walking a connection tracking table of 262,144 buckets.",
			reason: "it says that it is an example",
		},
		{file: "docs/TRACING.md", text: "error, after 250 ms", reason: "part of a drawing"},
		{
			file: "docs/MIGRATING.md", text: "Histograms reach one hour, where kube-proxy's end at 16 seconds and 5 minutes.",
			test: "metrics/metrics_test.go TestHistogramsReachOneHour",
		},
		{file: "docs/MIGRATING.md", text: "N to 0 endpoints and node ports by address are right", reason: "a case, not a measure"},
		{file: "docs/ENGINES.md", text: "until `Config.Drain`, 15m", test: "ipvs/config_test.go TestDefaultsAreValid"},
	}
}

// readDocuments returns the README and the documents, each in one line and without what
// is generated.
func readDocuments(root string) (map[string]string, error) {
	files, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		return nil, err
	}
	texts := map[string]string{}
	for _, file := range append(files, filepath.Join(root, "README.md")) {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		name, err := filepath.Rel(root, file)
		if err != nil {
			return nil, err
		}
		generated := regexp.MustCompile(`(?s)<!-- figures: .*?<!-- end of .*? -->`)
		texts[filepath.ToSlash(name)] = strings.Join(strings.Fields(generated.ReplaceAllString(string(text), "")), " ")
	}
	return texts, nil
}

// checkClaims finds claims that are not in their document any more, or not true.
func checkClaims(root string, texts map[string]string, all []claim, runs ...*benchmarks) (errs []error) {
	for _, c := range all {
		if !strings.Contains(texts[c.file], c.text) {
			errs = append(errs, fmt.Errorf("%s does not say %q any more: %s", c.file, c.text, reclaim))
		}
		if err := c.prove(root, runs); err != nil {
			errs = append(errs, fmt.Errorf("%s says %q: %w", c.file, c.text, err))
		}
	}
	return errs
}

func (c *claim) prove(root string, runs []*benchmarks) error {
	switch {
	case c.benchmark != "":
		var errs []error
		for _, run := range runs {
			errs = append(errs, c.measured(run))
		}
		return errors.Join(errs...)
	case c.test != "":
		file, name, _ := strings.Cut(c.test, " ")
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil || !strings.Contains(string(text), "func "+name+"(t *testing.T)") {
			return fmt.Errorf("there is no test %s to prove it: %s", c.test, reclaim)
		}
		return nil
	case c.reason != "":
		return nil
	default:
		return fmt.Errorf("nothing proves it: %s", reclaim)
	}
}

// measured compares the metrics with those of a run: exactly, but for the allocations
// that come from the runtime.
func (c *claim) measured(run *benchmarks) error {
	found := run.results[c.benchmark]
	if found == nil {
		return fmt.Errorf("no benchmark %s has run: %s", c.benchmark, reclaim)
	}
	for _, unit := range slices.Sorted(maps.Keys(c.metrics)) {
		got, ok := found.metric(unit)
		if same := got == c.metrics[unit] || unit == "allocs/op" && alike(got, c.metrics[unit], unit); !ok || !same {
			return fmt.Errorf("%s has %v %s, want %v: mend the code, or the document and claims.go", c.benchmark, got, unit, c.metrics[unit])
		}
	}
	return nil
}

// unproved finds figures that belong to no claim.
func unproved(texts map[string]string, all []claim) (errs []error) {
	const (
		units = `ns|µs|ms|s|m|h|[kMG]i?B(/s)?|(nano|micro|milli)?seconds?|minutes?|hours?|times`
		kinds = `(element )?writes|allocations|transactions|messages|elements|buckets|flows|bytes|Services|endpoints|connections|changes|rules|cores`
		words = `(an?|one|two|three|four|five|six|seven|eight|nine|ten|twelve)`
	)
	figure := regexp.MustCompile(`\b[0-9][0-9,.]* ?((` + units + `|` + kinds + `)\b|%)|\b` + words + ` ((nano|micro|milli)second|((element )?writes|allocations|messages)\b)`)
	for _, file := range slices.Sorted(maps.Keys(texts)) {
		text := texts[file]
		for _, c := range all {
			if c.file == file {
				text = strings.ReplaceAll(text, c.text, "…")
			}
		}
		for _, at := range figure.FindAllStringIndex(text, -1) {
			near := strings.ToValidUTF8(text[max(0, at[0]-60):min(len(text), at[1]+20)], "")
			errs = append(errs, fmt.Errorf("%s says %q, and nothing proves %q: measure it, or say in internal/guard/figures/claims.go what does",
				file, near, text[at[0]:at[1]]))
		}
	}
	return errs
}
