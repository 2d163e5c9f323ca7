package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const module = "github.com/serviceplane/serviceplane"

// benchmarks is what a run of benchmarks has printed.
type benchmarks struct {
	about   map[string]string  // the lines "key: value" of the head
	results map[string]*result // by name
}

// result is one benchmark, which may have run several times.
type result struct {
	command string
	metrics map[string][]float64 // by unit
}

// metric is the median of a metric.
func (r *result) metric(unit string) (median float64, ok bool) {
	values := slices.Sorted(slices.Values(r.metrics[unit]))
	if len(values) == 0 {
		return 0, false
	}
	return values[len(values)/2], true
}

// readBenchmarks reads the output of go test -bench, with or without -json.
func readBenchmarks(file string) (*benchmarks, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read from
	text, err := plain(f)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	all, err := parse(text)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	if len(all.results) == 0 {
		return nil, fmt.Errorf("read %s: no benchmark in it", file)
	}
	return all, nil
}

// plain returns the text within the events of go test -json, package after package: a
// line of a benchmark is in several of them. What is no event stays as it is.
func plain(r io.Reader) (string, error) {
	var outside strings.Builder
	var packages []string
	output := map[string]*strings.Builder{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var event struct{ Action, Package, Output string }
		if err := json.Unmarshal(lines.Bytes(), &event); err != nil {
			outside.WriteString(lines.Text() + "\n")
			continue
		}
		if event.Action != "output" {
			continue
		}
		if output[event.Package] == nil {
			output[event.Package] = &strings.Builder{}
			packages = append(packages, event.Package)
		}
		output[event.Package].WriteString(event.Output)
	}
	for _, name := range packages {
		outside.WriteString(output[name].String() + "\n")
	}
	return outside.String(), lines.Err()
}

// parse understands the format of Go's benchmarks: lines "key: value", and lines with a
// benchmark's name, how often it ran, and pairs of a number and a unit.
func parse(text string) (*benchmarks, error) {
	about := regexp.MustCompile(`^([a-z]+): (.*)$`)
	all := &benchmarks{about: map[string]string{}, results: map[string]*result{}}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if pair := about.FindStringSubmatch(line); pair != nil {
			all.about[pair[1]] = pair[2]
			continue
		}
		if err := all.add(strings.Fields(line)); err != nil {
			return nil, fmt.Errorf("line %q: %w", line, err)
		}
	}
	return all, nil
}

// add adds the fields of a line, if that is one of a benchmark.
func (b *benchmarks) add(fields []string) error {
	if len(fields) < 4 || len(fields)%2 != 0 || !strings.HasPrefix(fields[0], "Benchmark") {
		return nil
	}
	if _, err := strconv.Atoi(fields[1]); err != nil {
		return nil // a log line that begins with that word
	}
	name := strings.TrimPrefix(b.about["pkg"], module+"/") + "." + withoutProcessors(fields[0])
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

// withoutProcessors cuts off GOMAXPROCS, which is there unless it is 1. So no name of
// ours may end in a dash and a number.
func withoutProcessors(name string) string {
	return regexp.MustCompile(`-[0-9]+$`).ReplaceAllString(name, "")
}

// family is a name without its sizes: the parts like "N=1000" lose their number.
func family(name string) string {
	return regexp.MustCompile(`=[0-9]+`).ReplaceAllString(name, "=")
}

// families returns the metrics that the benchmarks of each family have, all together.
func (b *benchmarks) families() map[string]map[string]bool {
	all := map[string]map[string]bool{}
	for name, r := range b.results {
		f := family(name)
		if all[f] == nil {
			all[f] = map[string]bool{}
		}
		for unit := range r.metrics {
			all[f][unit] = true
		}
	}
	return all
}
