package main

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/serviceplane/serviceplane/internal/guard/gocmd"
)

// benchmarks is the output of a run of benchmarks.
type benchmarks struct {
	file    string
	about   map[string]string // the lines "key: value"
	results map[string]result // by name
}

// result has the values of one benchmark by unit: several, if the benchmark ran several times.
type result map[string][]float64

// metric returns the median of a metric; a nil result has none.
func (r result) metric(unit string) (median float64, ok bool) {
	if len(r[unit]) == 0 {
		return 0, false
	}
	values := slices.Sorted(slices.Values(r[unit]))
	return values[len(values)/2], true
}

// readBenchmarks reads the output of go test -bench, with or without -json.
func readBenchmarks(file string) (*benchmarks, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	all := &benchmarks{file, map[string]string{}, map[string]result{}}
	return all, all.parse(plain(text))
}

// plain returns the output in the events of go test -json, package by package, because a
// benchmark's line is split over several events. Lines that are no event come first.
func plain(text []byte) string {
	packages, output := []string{""}, map[string]string{}
	for e := range gocmd.Events(text) {
		if !slices.Contains(packages, e.Package) {
			packages = append(packages, e.Package)
		}
		output[e.Package] += e.Output
	}
	for i, name := range packages {
		packages[i] = output[name]
	}
	return strings.Join(packages, "\n")
}

// What the lines of the format of Go's benchmarks are: "key: value", and a benchmark's name, the number of
// runs, and pairs of a number and a unit. go test appends GOMAXPROCS to names unless it is 1, so no
// benchmark's own name may end in a dash and a number.
var (
	aboutLine  = regexp.MustCompile(`^([a-z]+): (.*)$`)                                    // read-only
	resultLine = regexp.MustCompile(`^(Benchmark\S*?)(?:-\d+)?\s+\d+((?:\s+\S+\s+\S+)+)$`) // read-only
	sizeOf     = regexp.MustCompile(`(\w+)=([0-9]+)`)                                      // read-only
)

// parse adds what lines say.
func (b *benchmarks) parse(text string) error {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if pair := aboutLine.FindStringSubmatch(line); pair != nil {
			if _, known := b.about[pair[1]]; !known || pair[1] == "pkg" {
				b.about[pair[1]] = pair[2] // the others are the machine's, and stand first
			}
			continue
		}
		ran := resultLine.FindStringSubmatch(line)
		if ran == nil {
			continue
		}
		name := strings.TrimPrefix(b.about["pkg"], gocmd.Module+"/") + "." + ran[1]
		if b.results[name] == nil {
			b.results[name] = result{}
		}
		for pair := range slices.Chunk(strings.Fields(ran[2]), 2) {
			value, err := strconv.ParseFloat(pair[0], 64)
			if err != nil {
				return fmt.Errorf("read %s: line %q: %w", b.file, line, err)
			}
			b.results[name][pair[1]] = append(b.results[name][pair[1]], value)
		}
	}
	return nil
}

// family is a name without its sizes: "N=1000" becomes "N=".
func family(name string) string { return sizeOf.ReplaceAllString(name, "$1=") }
