// Command summary reads the output of go test -json, and repeats what matters of
// it: each package, all output of what failed or was skipped, and the number of
// tests and benchmarks that passed, failed and were skipped. It fails if one
// failed, if there was none, or if one was skipped although the environment says
// that the kernel tests must run.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// event is one line of go test -json, see go doc test2json.
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

// summary counts what has ended. A benchmark that passes, and a test in a program
// that crashes, have no event for their end: they end with their package.
type summary struct {
	passed, failed, skipped int
	output                  map[string]map[string]*strings.Builder // by package and test, of what has not ended
	failures                map[string]int                         // by package
	packages                []string
	trouble                 []string // output of what failed or was skipped
}

func main() {
	required := os.Getenv("SERVICEPLANE_REQUIRE_KERNEL") == "1"
	if err := run(os.Args[1:], os.Stdout, required); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string, w io.Writer, required bool) error {
	if len(args) != 1 {
		return errors.New("want one argument, a file with the output of go test -json")
	}
	f, err := os.Open(args[0])
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // only read from
	s := newSummary()
	if err := s.read(f); err != nil {
		return fmt.Errorf("read %s: %w", args[0], err)
	}
	if err := s.write(w); err != nil {
		return err
	}
	return s.verdict(required)
}

func newSummary() *summary {
	return &summary{output: map[string]map[string]*strings.Builder{}, failures: map[string]int{}}
}

func (s *summary) write(w io.Writer) error {
	lines := append(slices.Clone(s.packages), s.trouble...)
	lines = append(lines, fmt.Sprintf("%d passed, %d failed, %d skipped", s.passed, s.failed, s.skipped))
	_, err := fmt.Fprintln(w, strings.Join(lines, "\n"))
	return err
}

func (s *summary) verdict(required bool) error {
	switch {
	case s.failed > 0:
		return errors.New("tests failed")
	case s.passed == 0:
		return errors.New("no test has passed")
	case s.skipped > 0 && required:
		return errors.New("tests were skipped, and none may be here")
	default:
		return nil
	}
}

func (s *summary) read(r io.Reader) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			s.trouble = append(s.trouble, lines.Text()) // of the build, not of a test
			continue
		}
		s.take(&e)
	}
	return lines.Err()
}

func (s *summary) take(e *event) {
	switch e.Action {
	case "run":
		s.of(e)
	case "output":
		s.of(e).WriteString(e.Output)
	case "build-output":
		s.trouble = append(s.trouble, strings.TrimSuffix(e.Output, "\n"))
	case "pass", "fail", "skip":
		if e.Test == "" {
			s.endPackage(e)
		} else {
			s.end(e)
		}
	}
}

// of returns the output so far of a test, or of a package outside its tests.
func (s *summary) of(e *event) *strings.Builder {
	tests := s.output[e.Package]
	if tests == nil {
		tests = map[string]*strings.Builder{}
		s.output[e.Package] = tests
	}
	if tests[e.Test] == nil {
		tests[e.Test] = &strings.Builder{}
	}
	return tests[e.Test]
}

// endPackage ends what is left in a package, in its way. A package may also fail
// although all of its tests passed: it does not compile, or leaks a goroutine.
func (s *summary) endPackage(e *event) {
	s.packages = append(s.packages, fmt.Sprintf("%-4s %s %.1fs", e.Action, e.Package, e.Elapsed))
	var left []string
	for test := range s.output[e.Package] {
		if test != "" {
			left = append(left, test)
		}
	}
	slices.Sort(left)
	for _, test := range left {
		s.end(&event{Action: e.Action, Package: e.Package, Test: test})
	}
	if e.Action == "fail" {
		if s.failures[e.Package] == 0 {
			s.failed++
		}
		s.keep(e)
	}
	delete(s.output, e.Package)
}

func (s *summary) end(e *event) {
	switch e.Action {
	case "pass":
		s.passed++
	case "fail":
		s.failed++
		s.failures[e.Package]++
		s.keep(e)
	case "skip":
		s.skipped++
		s.keep(e)
	}
	delete(s.output[e.Package], e.Test)
}

func (s *summary) keep(e *event) {
	if out := strings.TrimSuffix(s.of(e).String(), "\n"); out != "" {
		s.trouble = append(s.trouble, out)
	}
}
