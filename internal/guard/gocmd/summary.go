package gocmd

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

type summary struct {
	counts   map[string]int      // tests and benchmarks, by Action
	running  map[key][]string    // output so far; of a package outside its tests, the key has no test
	failures map[string]int      // by package
	lines    map[string][]string // "packages", "seeds", then "output" of what failed or was skipped
	tests    []Event             // the ends of top-level tests
}

type key struct{ pkg, test string }

// seed matches a line that names a seed with its number.
var seed = regexp.MustCompile(`(?i)seeds?( from)?[ =]\d`) // read-only

// Summary summarizes the output of go test -json: the packages that failed, the output of what failed or was skipped,
// the seeds of tests that passed, the counts, and the ten slowest tests. The error says that a test failed, that none
// passed, or that one was skipped although SERVICEPLANE_REQUIRE_KERNEL=1 says that none may be.
func Summary(text []byte, required bool) (string, error) {
	s := summary{counts: map[string]int{}, running: map[key][]string{}, failures: map[string]int{}, lines: map[string][]string{}}
	for e := range Events(text) {
		s.take(&e)
	}
	var err error
	switch {
	case s.counts["fail"] > 0:
		err = errors.New("tests failed")
	case s.counts["pass"] == 0:
		err = errors.New("no test passed")
	case s.counts["skip"] > 0 && required:
		err = errors.New("tests were skipped, and SERVICEPLANE_REQUIRE_KERNEL=1 allows none")
	}
	return s.String(), err
}

func (s *summary) take(e *Event) {
	k, ends := key{e.Package, e.Test}, e.Action == "pass" || e.Action == "fail" || e.Action == "skip"
	switch {
	case e.Action == "run" || e.Action == "output":
		s.running[k] = append(s.running[k], e.Output)
	case e.Action == "build-output":
		s.print("output", e.Output)
	case ends && e.Test == "":
		s.endPackage(e)
	case ends:
		s.end(e.Action, k)
		if !strings.Contains(e.Test, "/") {
			s.tests = append(s.tests, *e)
		}
	}
}

// endPackage also ends the tests that have no event of their own: a benchmark that
// passes, and a test in a program that crashes. A package may fail although all of its
// tests passed: it does not compile, or leaks a goroutine.
func (s *summary) endPackage(e *Event) {
	if e.Action == "fail" {
		s.print("packages", fmt.Sprintf("%-4s %s %.1fs", e.Action, e.Package, e.Elapsed))
	}
	own := s.running[key{e.Package, ""}]
	delete(s.running, key{e.Package, ""})
	for _, k := range slices.SortedFunc(maps.Keys(s.running), func(a, b key) int { return strings.Compare(a.test, b.test) }) {
		if k.pkg == e.Package {
			s.end(e.Action, k)
		}
	}
	if e.Action == "fail" {
		if s.failures[e.Package] == 0 {
			s.counts["fail"]++
		}
		s.print("output", own...)
	}
}

func (s *summary) end(action string, k key) {
	s.counts[action]++
	if action == "fail" {
		s.failures[k.pkg]++
	}
	if action != "pass" {
		s.print("output", s.running[k]...)
	}
	for _, line := range s.running[k] {
		if action == "pass" && seed.MatchString(line) {
			s.print("seeds", strings.TrimPrefix(k.pkg, Module+"/")+" "+k.test+": "+strings.TrimSpace(line))
		}
	}
	delete(s.running, k)
}

func (s *summary) print(part string, texts ...string) {
	if text := strings.TrimSuffix(strings.Join(texts, ""), "\n"); text != "" {
		s.lines[part] = append(s.lines[part], text+"\n")
	}
}

func (s *summary) String() string {
	slices.SortStableFunc(s.tests, func(a, b Event) int { return cmp.Compare(b.Elapsed, a.Elapsed) })
	lines := append(slices.Concat(s.lines["packages"], s.lines["seeds"], s.lines["output"]),
		fmt.Sprintf("%d passed, %d failed, %d skipped\n", s.counts["pass"], s.counts["fail"], s.counts["skip"]), "slowest tests:\n")
	for _, e := range s.tests[:min(10, len(s.tests))] {
		lines = append(lines, fmt.Sprintf("%8.1fs %s %s\n", e.Elapsed, e.Package, e.Test))
	}
	return strings.Join(lines, "")
}
