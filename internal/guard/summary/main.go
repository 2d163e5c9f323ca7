// Command summary reads the output of go test -json. It prints what failed with
// its output, and the number of tests that passed, failed and were skipped. It
// fails if a test failed, or if one was skipped although the environment says
// that the kernel tests must run.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
)

// event is one line of go test -json, see go doc test2json.
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

type summary struct {
	passed, failed, skipped int
	output                  map[string]*strings.Builder // of each test that has not ended
	packages                []string
	trouble                 []string // output of what failed or was skipped
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("want one argument, a file with the output of go test -json")
	}
	f, err := os.Open(args[0])
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // only read from
	s := &summary{output: map[string]*strings.Builder{}}
	if err := s.read(f); err != nil {
		return err
	}
	fmt.Println(strings.Join(append(s.packages, s.trouble...), "\n"))
	fmt.Printf("%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped)
	switch {
	case s.failed > 0:
		return fmt.Errorf("tests failed")
	case s.skipped > 0 && os.Getenv("SERVICEPLANE_REQUIRE_KERNEL") == "1":
		return fmt.Errorf("tests were skipped, and none may be here")
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
	key := e.Package + " " + e.Test
	switch e.Action {
	case "output":
		if s.output[key] == nil {
			s.output[key] = &strings.Builder{}
		}
		s.output[key].WriteString(e.Output)
	case "build-output":
		s.trouble = append(s.trouble, strings.TrimSuffix(e.Output, "\n"))
	case "pass", "fail", "skip":
		s.end(e, key)
	}
}

// end counts a test, or notes a package.
func (s *summary) end(e *event, key string) {
	if e.Test == "" {
		s.packages = append(s.packages, fmt.Sprintf("%-4s %s %.1fs", e.Action, e.Package, e.Elapsed))
		if e.Action == "fail" {
			s.failed++
			s.keep(key)
		}
		return
	}
	switch e.Action {
	case "pass":
		s.passed++
	case "fail":
		s.failed++
		s.keep(key)
	case "skip":
		s.skipped++
		s.keep(key)
	}
	delete(s.output, key)
}

func (s *summary) keep(key string) {
	if out := s.output[key]; out != nil {
		s.trouble = append(s.trouble, strings.TrimSuffix(out.String(), "\n"))
	}
}
