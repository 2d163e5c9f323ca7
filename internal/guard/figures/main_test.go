package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/serviceplane/serviceplane/internal/guard/gocmd"
)

// TestCheck measures again what is documented, but for edits of pairs of old and new text.
func TestCheck(t *testing.T) {
	benchmarks, errOfBenchmarks := os.ReadFile(filepath.Join("../../..", benchmarksFile))
	text, err := os.ReadFile(filepath.Join("../../..", documentFile))
	if err := errors.Join(errOfBenchmarks, err); err != nil {
		t.Fatal(err)
	}
	figure := func(pattern string) (n int) { // of the first benchmark that matches
		t.Helper()
		found := regexp.MustCompile(pattern).FindSubmatch(benchmarks)
		if found == nil {
			t.Fatalf("%s has no %q", benchmarksFile, pattern)
		}
		n, _ = strconv.Atoi(string(found[1]))
		return n
	}
	writes, allocs := figure(`N=5000/E=10/first.* (\d{5}) writes`), figure(`\s(\d{2,3}) allocs/op`)
	says := func(n int, unit string) string { return fmt.Sprintf(" %d %s", n, unit) }
	most := allocs + allocs/10 + 8
	for name, c := range map[string]struct {
		measured, document []string
		want               string // in the error; empty for none
	}{
		"the same":      {},
		"other times":   {measured: []string{" ms", "7 ms"}},
		"other size":    {measured: []string{"N=45000", "N=450"}},
		"few allocs":    {measured: []string{says(allocs, "allocs/op"), says(most, "allocs/op")}},
		"more allocs":   {measured: []string{says(allocs, "allocs/op"), says(most+2, "allocs/op")}, want: fmt.Sprintf("%d allocs/op, but %d in", most+2, allocs)},
		"one write":     {measured: []string{says(writes, "writes"), says(writes+1, "writes")}, want: fmt.Sprintf("%d writes, but %d in", writes+1, writes)},
		"renamed":       {measured: []string{"BenchmarkIdle", "BenchmarkBusy"}, want: "userspace.BenchmarkIdle/tcp/clients=1000, which no benchmark reports"},
		"without unit":  {measured: []string{"floor-ms", "ground-ms"}, want: "has floor-ms of"},
		"other table":   {document: []string{"| " + show(float64(writes), "writes") + " |", "| 1 |"}, want: "are not those of"},
		"without marks": {document: []string{"<!-- figures: counts -->", ""}, want: "lacks the line"},
		"none":          {measured: []string{"Benchmark", "Example"}, want: "which no benchmark reports"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			if err := os.CopyFS(root, fstest.MapFS{
				"measured":     {Data: []byte(strings.NewReplacer(c.measured...).Replace(string(benchmarks)))},
				benchmarksFile: {Data: benchmarks},
				documentFile:   {Data: []byte(strings.NewReplacer(c.document...).Replace(string(text))), Mode: 0o600},
			}); err != nil {
				t.Fatal(err)
			}
			err := run(root, []string{"check", filepath.Join(root, "measured")}, io.Discard)
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("got the error %v, want %q", err, c.want)
			}
			if c.document != nil && strings.HasPrefix(c.want, "are not") {
				wrote := run(root, []string{"write"}, io.Discard)
				if err := errors.Join(wrote, run(root, []string{"check", filepath.Join(root, "measured")}, io.Discard)); err != nil {
					t.Errorf("after write, check returns %v", err)
				}
			}
		})
	}
}

func TestFormats(t *testing.T) {
	text := plain([]byte(`{"Action":"output","Package":"p","Output":"BenchmarkA-2 \t"}
{"Action":"output","Package":"q","Output":"BenchmarkB-2 1 7 ns/op\n"}
{"Action":"output","Package":"p","Output":"1 5 ns/op\n"}
no event
`))
	if want := "no event\n\nBenchmarkA-2 \t1 5 ns/op\n\nBenchmarkB-2 1 7 ns/op\n"; strings.TrimLeft(text, "\n") != want {
		t.Errorf("plain text is %q, want %q", text, want)
	}
	all := &benchmarks{about: map[string]string{}, results: map[string]result{}}
	err := all.parse("pkg: " + gocmd.Module + "/p\nBenchmarkA-2 1 5 ns/op\nBenchmarkA-2 1 9 ns/op\nBenchmarkA-2 1 7 ns/op\nBenchmark of text\n")
	if got, ok := all.results["p.BenchmarkA"].metric("ns/op"); got != 7 || !ok || len(all.results) != 1 || err != nil {
		t.Errorf("the median is %v, %v in %v (%v), want 7", got, ok, all.results, err)
	}
	for want, got := range map[string]string{
		"1.0 µs": show(999.9, "ns/op"), "58 µs": show(0.0583, "ms"), "0.58 ns": show(0.583, "ns/op"), "0 ns": show(0, "ns/op"),
		"46 µs": show(46.1, "ours-cpu-µs/conn"), "73 MiB": show(73, "rest-MiB"), "3.6 µs": show(3600, "off-cpu-ns/packet"), "210 ms": show(210, "cpu-ms/reading"),
		"110 MB": show(106.2, "heap-MB"), "1.50": show(1.4999, "ours/nginx"), "60,145": show(60145, "writes"), "17,000": show(17123, "conn/s"),
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
