package main

import (
	"strings"
	"testing"
)

func TestATableIsMadeOfBenchmarks(t *testing.T) {
	table := table{
		about:   "what",
		columns: []column{{"one", "a", []string{"ms", "ns/op"}}, {"other", "b", []string{"ms", "ns/op"}}, {"writes", "a", []string{"writes"}}},
		rows: []row{
			{what: "{N} Services × {E}", benchmark: "p.Benchmark/*/N=5000/E=10"},
			{what: "again", benchmark: "p.Benchmark/*/again", none: "b"},
		},
	}
	all := mustBenchmarks(t, `command: first
pkg: p
Benchmark/a/N=5000/E=10-2 1 1234 ms 0.5 floor-ms 12076 writes
Benchmark/a/again-2 1 7.04 ms
command: second
Benchmark/b/N=5000/E=10-2 1 33 ns/op
`)
	shown := map[string]bool{}
	got, err := table.render(all, shown)
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Join([]string{
		"| what | one | other | writes |",
		"| --- | --: | --: | --: |",
		"| 5,000 Services × 10 | 1.2 s (500 µs) | 33 ns | 12,076 |",
		"| again | 7.0 ms | – | – |",
		"", "```", "first", "second", "```", "",
	}, "\n")
	if got != want {
		t.Errorf("table is\n%s\nwant\n%s", got, want)
	}
	again, err := table.render(all, shown)
	if err != nil {
		t.Fatal(err)
	}
	if before, _, _ := strings.Cut(want, "\n\n"); again != before+"\n" {
		t.Errorf("table is\n%s\nwant it without the commands that have been shown:\n%s", again, before)
	}
}

func TestFiguresAreShownInTheirUnits(t *testing.T) {
	for _, test := range []struct {
		value      float64
		unit, want string
	}{
		{33.4, "ns/op", "33 ns"},
		{999.4, "ns/op", "1.0 µs"},
		{0.03489, "ms", "35 µs"},
		{1.1591, "ms", "1.2 ms"},
		{99.96, "cpu-ms", "100 ms"},
		{148, "ms", "150 ms"},
		{91234, "ms", "91 s"},
		{912345, "ms", "910 s"},
		{0, "ms", "0 ns"},
		{5568, "B/op", "5.6 kB"},
		{8689, "bytes/client", "8.7 kB"},
		{36.01, "heap-MB", "36 MB"},
		{1515, "ours-MB/s", "1.5 GB/s"},
		{7637, "ours-conn/s", "7,600"},
		{0.7392, "ours/nginx", "0.74"},
		{1276, "writes", "1,276"},
		{2.5, "writes", "2.5"},
		{1642762, "allocs/op", "1,642,762"},
		{0, "writes", "0"},
	} {
		if got := show(test.value, test.unit); got != test.want {
			t.Errorf("%v %s is shown as %q, want %q", test.value, test.unit, got, test.want)
		}
	}
}

// TestTablesUseTheirSizes: a row does not say a size that its benchmark has not.
func TestTablesUseTheirSizes(t *testing.T) {
	for _, table := range tables() {
		for _, r := range table.rows {
			if title := r.title(); strings.ContainsAny(title, "{}") {
				t.Errorf("table %s has a row %q, and its benchmark %s lacks that size", table.name, title, r.benchmark)
			}
		}
	}
}
