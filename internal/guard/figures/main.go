// Command figures keeps the tables of docs/PERFORMANCE.md, which are generated from
// docs/benchmarks.txt, the output of hack/bench.sh. Run it in the repository's directory:
//
//	figures print FILE   prints the tables of other benchmarks
//	figures write        rewrites the tables in docs/PERFORMANCE.md
//	figures check FILE   compares docs/benchmarks.txt with benchmarks that have just run
//
// FILE is the output of go test -bench, with or without -json. The check fails if the
// tables are out of date, if a benchmark does not exist any more, or if a figure differs
// that does not depend on the machine. Times are not compared.
package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
)

const (
	benchmarksFile = "docs/benchmarks.txt"
	documentFile   = "docs/PERFORMANCE.md"
)

// remeasure is what to do about figures that differ.
const remeasure = "run hack/bench.sh -write as root, on an idle machine"

func main() {
	if err := run(".", os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run executes a command in the repository at root.
func run(root string, args []string, w io.Writer) error {
	switch {
	case len(args) == 2 && args[0] == "print":
		return printTables(args[1], w)
	case len(args) == 1 && args[0] == "write":
		return write(root)
	case len(args) == 2 && args[0] == "check":
		return check(root, args[1])
	default:
		return errors.New("want one of: print FILE, write, check FILE")
	}
}

func printTables(file string, w io.Writer) error {
	measured, err := readBenchmarks(file)
	if err != nil {
		return err
	}
	shown := map[string]bool{}
	for _, t := range tables {
		text, err := t.render(measured, shown)
		if err != nil {
			return fmt.Errorf("make table %s of %s: %w", t.name, file, err)
		}
		if _, err := fmt.Fprintf(w, "\n%s", text); err != nil {
			return err
		}
	}
	return nil
}

// load returns docs/benchmarks.txt and docs/PERFORMANCE.md.
func load(root string) (*benchmarks, string, error) {
	documented, err := readBenchmarks(filepath.Join(root, benchmarksFile))
	if err != nil {
		return nil, "", err
	}
	text, err := os.ReadFile(filepath.Join(root, documentFile))
	return documented, string(text), err
}

func write(root string) error {
	documented, text, err := load(root)
	if err != nil {
		return err
	}
	if text, err = fill(text, documented); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(root, documentFile), []byte(text), 0o644)
}

func check(root, file string) error {
	documented, text, err := load(root)
	if err != nil {
		return err
	}
	measured, err := readBenchmarks(file)
	if err != nil {
		return err
	}
	want, err := fill(text, documented)
	if err != nil {
		return err
	}
	var errs []error
	if text != want {
		errs = append(errs, fmt.Errorf("the tables of %s are not those of %s: run go run ./internal/guard/figures write", documentFile, benchmarksFile))
	}
	return errors.Join(append(errs, compare(documented, measured)...)...)
}

// compare finds benchmarks and metrics that do not exist any more, at whatever size, and
// counts that differ from those documented for the same size.
func compare(documented, measured *benchmarks) (errs []error) {
	exists := map[string]bool{}
	for name, r := range measured.results {
		for unit := range r.metrics {
			exists[family(name)+" "+unit] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(documented.results)) {
		for _, unit := range slices.Sorted(maps.Keys(documented.results[name].metrics)) {
			if !exists[family(name)+" "+unit] {
				errs = append(errs, fmt.Errorf("%s has %s of %s, which no benchmark reports: %s", benchmarksFile, unit, name, remeasure))
			}
			want, _ := documented.results[name].metric(unit)
			if got, ok := measured.results[name].metric(unit); ok && !alike(got, want, unit) {
				errs = append(errs, fmt.Errorf("%s: %v %s, but %v in %s: fix the code, or %s", name, got, unit, want, benchmarksFile, remeasure))
			}
		}
	}
	return errs
}

// alike compares figures that do not depend on the machine; others are always alike. The
// runtime and a benchmark's first run add a few allocations.
func alike(got, want float64, unit string) bool {
	difference := math.Abs(got - want)
	switch unit {
	case "writes", "transactions", "messages":
		return difference == 0
	case "allocs/op":
		return difference <= want/10+8
	case "heap-MB", "goroutines/client":
		return difference <= want/10
	default:
		return true
	}
}
