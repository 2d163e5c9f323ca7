package main

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
)

func TestBenchmarksAreRead(t *testing.T) {
	all := mustBenchmarks(t, `date: 2026-01-02

command: go test -bench=. ./ipvs
goos: linux
pkg: github.com/serviceplane/serviceplane/ipvs
BenchmarkA/N=10/replaced=1-16   	 1	 3.5 ms	 7 allocs/op
BenchmarkA/N=10/replaced=1-16   	 1	 900 ms	 7 allocs/op
BenchmarkA/N=10/replaced=1-16   	 1	 2.5 ms	 9 allocs/op
BenchmarkA/N=20/replaced=1   	 1	 5 ms
Benchmarks are nice to have here
PASS
command: go test -bench=. ./internal/persist
pkg: github.com/serviceplane/serviceplane/internal/persist
BenchmarkA/N=10/replaced=1-16   	 1	 8 ns/op
`)
	for name, want := range map[string]struct {
		unit    string
		value   float64
		command string
	}{
		"ipvs.BenchmarkA/N=10/replaced=1":             {"ms", 3.5, "go test -bench=. ./ipvs"},
		"ipvs.BenchmarkA/N=20/replaced=1":             {"ms", 5, "go test -bench=. ./ipvs"},
		"internal/persist.BenchmarkA/N=10/replaced=1": {"ns/op", 8, "go test -bench=. ./internal/persist"},
	} {
		found := all.results[name]
		if found == nil {
			t.Errorf("no benchmark %s", name)
			continue
		}
		if got, ok := found.metric(want.unit); !ok || got != want.value || found.command != want.command {
			t.Errorf("%s: %v %s by %q, want %v by %q", name, got, want.unit, found.command, want.value, want.command)
		}
		if _, ok := found.metric("furlongs"); ok {
			t.Errorf("%s has furlongs", name)
		}
	}
	if got := len(all.results); got != 3 {
		t.Errorf("%d benchmarks, want 3", got)
	}
	if got := all.about["date"]; got != "2026-01-02" {
		t.Errorf("date is %q, want 2026-01-02", got)
	}
	if _, err := parse("BenchmarkA 1 many ms\n"); err == nil {
		t.Error("a metric that is no number is no error")
	}
}

// TestEventsAreReadLikeText, though a line of a benchmark comes in two events, and
// another package's events may be between them.
func TestEventsAreReadLikeText(t *testing.T) {
	var events strings.Builder
	events.WriteString("go: downloading something\n")
	encoder := json.NewEncoder(&events)
	for _, e := range [][3]string{
		{"output", "p", "pkg: p\n"},
		{"output", "p", "BenchmarkA-2 \t"},
		{"run", "p", ""},
		{"output", "q", "pkg: q\nBenchmarkB-2 1 8 ms"},
		{"output", "p", " 1\t 7 ms\n"},
	} {
		if err := encoder.Encode(map[string]string{"Action": e[0], "Package": e[1], "Output": e[2]}); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(t.TempDir(), "events.json")
	write(t, file, events.String())
	all, err := readBenchmarks(file)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]float64{"p.BenchmarkA": 7, "q.BenchmarkB": 8} {
		found := all.results[name]
		if found == nil {
			t.Errorf("no benchmark %s", name)
			continue
		}
		if got, _ := found.metric("ms"); got != want {
			t.Errorf("%s: %v ms, want %v", name, got, want)
		}
	}
}

func TestFamilyLeavesSizesOut(t *testing.T) {
	if got, want := family("p.BenchmarkA/N=10/E=5/replaced=100"), "p.BenchmarkA/N=/E=/replaced="; got != want {
		t.Errorf("family is %q, want %q", got, want)
	}
}
