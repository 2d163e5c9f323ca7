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
		measured, err := readBenchmarks(args[1])
		if err != nil {
			return err
		}
		texts, err := measured.render()
		if err != nil {
			return err
		}
		for _, t := range tables {
			_, err = fmt.Fprint(w, "\n"+texts[t.name])
		}
		return err
	case len(args) == 1 && args[0] == "write", len(args) == 2 && args[0] == "check":
		return keep(root, args[1:])
	default:
		return errors.New("want one of: print FILE, write, check FILE")
	}
}

// keep rewrites docs/PERFORMANCE.md. With a file, it compares that and docs/benchmarks.txt with it instead.
func keep(root string, files []string) error {
	documented, err := readBenchmarks(filepath.Join(root, benchmarksFile))
	if err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(root, documentFile))
	if err != nil {
		return err
	}
	want, err := fill(string(text), documented)
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return os.WriteFile(filepath.Join(root, documentFile), []byte(want), 0o644)
	}
	measured, err := readBenchmarks(files[0])
	if err != nil {
		return err
	}
	errs := compare(documented, measured)
	if string(text) != want {
		errs = append(errs, fmt.Errorf("the tables of %s are not those of %s: run go run ./internal/guard/figures write", documentFile, benchmarksFile))
	}
	return errors.Join(errs...)
}

// compare finds benchmarks and metrics that do not exist any more, at whatever size, and
// counts that differ from those documented for the same size.
func compare(documented, measured *benchmarks) (errs []error) {
	exists := map[string]bool{}
	for name, r := range measured.results {
		for unit := range r {
			exists[family(name)+" "+unit] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(documented.results)) {
		for _, unit := range slices.Sorted(maps.Keys(documented.results[name])) {
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
	tolerance := math.Inf(1)
	switch unit {
	case "writes", "transactions", "messages":
		tolerance = 0
	case "allocs/op":
		tolerance = want/10 + 8
	case "heap-MB", "goroutines/client":
		tolerance = want / 10
	}
	return math.Abs(got-want) <= tolerance
}
