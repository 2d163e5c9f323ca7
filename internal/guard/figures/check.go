package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
)

// check compares the documents with benchmarks that have just run. The error has all
// that is wrong.
func check(root, file string, w io.Writer) error {
	measured, err := readBenchmarks(file)
	if err != nil {
		return err
	}
	written, want, err := document(root)
	if err != nil {
		return err
	}
	documented, err := readBenchmarks(benchmarksOf(root))
	if err != nil {
		return err
	}
	var errs []error
	if written != want {
		errs = append(errs, fmt.Errorf("the tables of %s are not those of %s: %s", documentFile, benchmarksFile, rewrite))
	}
	errs = append(errs, vanished(documented, measured)...)
	errs = append(errs, changed(documented, measured)...)
	texts, err := readDocuments(root)
	if err != nil {
		return err
	}
	errs = append(errs, checkClaims(root, texts, claims(), documented, measured)...)
	errs = append(errs, unproved(texts, claims())...)
	if err := compareTimes(w, documented, measured); err != nil {
		return err
	}
	return errors.Join(errs...)
}

// vanished finds the benchmarks that no size has any more, and metrics likewise.
func vanished(documented, measured *benchmarks) (errs []error) {
	now, then := measured.families(), documented.families()
	for _, name := range slices.Sorted(maps.Keys(then)) {
		if now[name] == nil {
			errs = append(errs, fmt.Errorf("%s has %s, which no benchmark is called any more: %s", benchmarksFile, name, remeasure))
			continue
		}
		for _, unit := range slices.Sorted(maps.Keys(then[name])) {
			if !now[name][unit] {
				errs = append(errs, fmt.Errorf("%s has %s of %s, which that does not report any more: %s", benchmarksFile, unit, name, remeasure))
			}
		}
	}
	return errs
}

// changed finds the counts that are not what is documented of the same size.
func changed(documented, measured *benchmarks) (errs []error) {
	for _, name := range slices.Sorted(maps.Keys(documented.results)) {
		now := measured.results[name]
		if now == nil {
			continue
		}
		for _, unit := range slices.Sorted(maps.Keys(now.metrics)) {
			want, known := documented.results[name].metric(unit)
			got, _ := now.metric(unit)
			if known && !alike(got, want, unit) {
				errs = append(errs, fmt.Errorf("%s: %v %s now, %v in %s: if that is meant to be, %s", name, got, unit, want, benchmarksFile, remeasure))
			}
		}
	}
	return errs
}

// alike compares what does not depend on the machine; anything else is always alike. A
// few allocations come from the benchmark's first run, and from the runtime.
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

// compareTimes prints times side by side. They prove nothing.
func compareTimes(w io.Writer, documented, measured *benchmarks) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	lines := []string{"benchmark\tdocumented\tnow\t"}
	for _, name := range slices.Sorted(maps.Keys(documented.results)) {
		now := measured.results[name]
		if now == nil {
			continue
		}
		for _, unit := range times() {
			then, known := documented.results[name].metric(unit)
			if got, ok := now.metric(unit); known && ok {
				lines = append(lines, fmt.Sprintf("%s\t%s\t%s\t", name, show(then, unit), show(got, unit)))
			}
		}
	}
	if _, err := fmt.Fprintln(tw, strings.Join(lines, "\n")); err != nil {
		return err
	}
	return tw.Flush()
}
