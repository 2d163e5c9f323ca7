package main

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const module = "github.com/serviceplane/serviceplane"

// benchmarks is the output of a run of benchmarks.
type benchmarks struct {
	about   map[string]string  // the lines "key: value"
	results map[string]*result // by name
}

// result is one benchmark, which may have run several times.
type result struct {
	command string
	metrics map[string][]float64 // by unit
}

// metric returns the median of a metric; a nil result has none.
func (r *result) metric(unit string) (median float64, ok bool) {
	if r == nil || len(r.metrics[unit]) == 0 {
		return 0, false
	}
	values := slices.Sorted(slices.Values(r.metrics[unit]))
	return values[len(values)/2], true
}

// readBenchmarks reads the output of go test -bench, with or without -json.
func readBenchmarks(file string) (*benchmarks, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	all, err := parse(plain(string(text)))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	return all, nil
}

// plain returns the output in the events of go test -json, package by package, because a
// benchmark's line is split over several events. Lines that are no event come first.
func plain(text string) string {
	packages, output := []string{""}, map[string]string{"": ""}
	for line := range strings.Lines(text) {
		var event struct{ Action, Package, Output string }
		if err := json.Unmarshal([]byte(line), &event); err != nil {
			event.Output = line
		}
		if _, known := output[event.Package]; !known {
			packages = append(packages, event.Package)
		}
		output[event.Package] += event.Output
	}
	for i, name := range packages {
		packages[i] = output[name]
	}
	return strings.Join(packages, "\n")
}

// parse reads the format of Go's benchmarks: lines "key: value", and lines with a
// benchmark's name, the number of runs, and pairs of a number and a unit.
func parse(text string) (*benchmarks, error) {
	about := regexp.MustCompile(`^([a-z]+): (.*)$`)
	all := &benchmarks{about: map[string]string{}, results: map[string]*result{}}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if pair := about.FindStringSubmatch(line); pair != nil {
			if _, known := all.about[pair[1]]; !known || pair[1] == "pkg" || pair[1] == "command" {
				all.about[pair[1]] = pair[2] // the others are the machine's, and stand first
			}
		} else if err := all.add(strings.Fields(line)); err != nil {
			return nil, fmt.Errorf("line %q: %w", line, err)
		}
	}
	return all, nil
}

// add adds the fields of a line, if it is a benchmark's. go test appends GOMAXPROCS to
// names unless it is 1, so no benchmark's own name may end in a dash and a number.
func (b *benchmarks) add(fields []string) error {
	if len(fields) < 4 || len(fields)%2 != 0 || !strings.HasPrefix(fields[0], "Benchmark") {
		return nil
	}
	if _, err := strconv.Atoi(fields[1]); err != nil {
		return nil // a log line that begins with Benchmark
	}
	name := strings.TrimPrefix(b.about["pkg"], module+"/") + "." + regexp.MustCompile(`-[0-9]+$`).ReplaceAllString(fields[0], "")
	r := b.results[name]
	if r == nil {
		r = &result{command: b.about["command"], metrics: map[string][]float64{}}
		b.results[name] = r
	}
	for pair := range slices.Chunk(fields[2:], 2) {
		value, err := strconv.ParseFloat(pair[0], 64)
		if err != nil {
			return err
		}
		r.metrics[pair[1]] = append(r.metrics[pair[1]], value)
	}
	return nil
}

// family is a name without its sizes: "N=1000" becomes "N=".
func family(name string) string { return regexp.MustCompile(`=[0-9]+`).ReplaceAllString(name, "=") }
