package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// repository is where the real documents are.
const repository = "../../.."

// head is what hack/bench.sh says about a machine.
const head = "date: 2026-01-02\ncommit: abc1234\nload: 0.07\ncores: 2\nkernel: Linux 6.18.0\ngo: go1.26.8\niptables: v1.8.9\nnginx: 1.22.1\ncpu: Cray\n"

// output is what all benchmarks of the tables print: 100 of everything but what claims
// say. Edits are pairs of a text and what is instead of it.
func output(edits ...string) string {
	metrics := map[string]map[string]float64{} // by benchmark and unit
	put := func(name, unit string, value float64) {
		if metrics[name] == nil {
			metrics[name] = map[string]float64{}
		}
		metrics[name][unit] = value
	}
	for _, t := range tables() {
		for _, r := range t.rows {
			for _, c := range t.columns {
				for _, unit := range c.units {
					if r.none == "" || !strings.HasPrefix(c.place, r.none) {
						put(strings.ReplaceAll(r.benchmark, "*", c.place), strings.ReplaceAll(unit, "*", r.unit), 100)
					}
				}
			}
		}
	}
	for _, c := range claims() {
		for unit, value := range c.metrics {
			put(c.benchmark, unit, value)
		}
	}
	text := head
	for _, name := range slices.Sorted(maps.Keys(metrics)) {
		pkg, benchmark, _ := strings.Cut(name, ".")
		text += fmt.Sprintf("pkg: %s/%s\ncommand: go test ./%[2]s\n%s-2 1", module, pkg, benchmark)
		for _, unit := range slices.Sorted(maps.Keys(metrics[name])) {
			text += fmt.Sprintf(" %v %s", metrics[name][unit], unit)
		}
		text += "\n"
	}
	return strings.NewReplacer(edits...).Replace(text)
}

// checkout has documents with nothing but all claims and tables in them, and the files
// of the tests that prove claims.
func checkout(t *testing.T) (root string) {
	t.Helper()
	root = t.TempDir()
	texts := map[string]string{"README.md": "# Title\n", documentFile: "# Performance\n"}
	for _, t := range append(tables(), table{name: "machine"}) {
		begin, end := marks(t.name)
		texts[documentFile] += begin + end
	}
	for _, c := range claims() {
		if file, name, ok := strings.Cut(c.test, " "); ok {
			texts[file] += "func " + name + "(t *testing.T) {}\n"
		}
		texts[c.file] += "\n" + strings.ReplaceAll(c.text, ", ", ",\n") + "\n"
	}
	for file, text := range texts {
		write(t, filepath.Join(root, file), text)
	}
	write(t, filepath.Join(root, benchmarksFile), output())
	if err := run(root, []string{"write"}, io.Discard); err != nil {
		t.Fatal(err)
	}
	return root
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func mustBenchmarks(t *testing.T, text string) *benchmarks {
	t.Helper()
	all, err := parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestTheDocumentHasTheFiguresOfTheBenchmarks: nobody has edited either by hand.
func TestTheDocumentHasTheFiguresOfTheBenchmarks(t *testing.T) {
	got, want, err := document(repository)
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("%s is\n%s\nwant\n%s\n%s", documentFile, got, want, rewrite)
	}
}

// TestEveryFigureOfTheDocumentsHasAProof, though this test does not run benchmarks.
func TestEveryFigureOfTheDocumentsHasAProof(t *testing.T) {
	texts, err := readDocuments(repository)
	if err != nil {
		t.Fatal(err)
	}
	documented, err := readBenchmarks(benchmarksOf(repository))
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range append(checkClaims(repository, texts, claims()), unproved(texts, claims())...) {
		t.Error(err)
	}
	for _, c := range claims() {
		if c.benchmark != "" && documented.families()[family(c.benchmark)] == nil {
			t.Errorf("%s has no benchmark like %s", benchmarksFile, c.benchmark)
		}
	}
}

func TestCheckFindsWhatIsWrong(t *testing.T) {
	const inReadme = "One remote endpoint replaced among 30,000 Services"
	for name, test := range map[string]struct {
		file  string // is edited
		edits []string
		run   string // what is measured now
		want  []string
	}{
		"nothing": {run: output()},
		"times and bytes differ": {
			run: output("100 ms", "999 ms", "100 ns/op", "7 ns/op", "100 ours-MB/s", "1 ours-MB/s", "100 B/op", "9000 B/op"),
		},
		"other sizes":           {run: output("N=5000/E=10/first", "N=77/E=10/first")},
		"few more allocations":  {run: output("100 allocs/op", "118 allocs/op")},
		"many more allocations": {run: output("100 allocs/op", "119 allocs/op"), want: []string{"119 allocs/op now, 100 in", remeasure}},
		"fewer allocations":     {run: output("100 allocs/op", "81 allocs/op"), want: []string{"81 allocs/op now, 100 in", remeasure}},
		"one more write":        {run: output("100 writes", "101 writes"), want: []string{"101 writes now, 100 in", remeasure}},
		"one message less":      {run: output("100 messages", "99 messages"), want: []string{"99 messages now", remeasure}},
		"a benchmark is gone":   {run: output("BenchmarkClean", "BenchmarkTidy"), want: []string{"conntrack.BenchmarkClean/flows=/stale=, which no benchmark", remeasure}},
		"a metric is gone":      {run: output("cpu-ms", "processor-ms"), want: []string{"cpu-ms of internal/nftables.BenchmarkTargets", remeasure}},
		"a figure is edited": {
			file: documentFile, edits: []string{"100 ms", "99 ms"}, run: output(),
			want: []string{"the tables of docs/PERFORMANCE.md are not those of docs/benchmarks.txt", rewrite},
		},
		"an output is edited": {
			file: benchmarksFile, edits: []string{"100 ms", "99 ms"}, run: output(),
			want: []string{"the tables of docs/PERFORMANCE.md are not those of docs/benchmarks.txt", rewrite},
		},
		"a mark is gone": {
			file: documentFile, edits: []string{"<!-- end of machine -->", ""}, run: output(),
			want: []string{`lacks the lines "<!-- figures: machine -->"`},
		},
		"a claim is gone": {
			file: "README.md", edits: []string{inReadme, "Replacing is cheap"}, run: output(),
			want: []string{"README.md does not say", inReadme, reclaim},
		},
		"a claim is not true": {
			run:  output("1 transactions 2 writes", "1 transactions 3 writes"),
			want: []string{"README.md says", "has 3 writes, want 2", "mend the code, or the document"},
		},
		"a claim is not measured": {
			run:  output("N=30000/E=10/replaced=1-2", "N=70000/E=10/replaced=1-2"),
			want: []string{"README.md says", "has run", reclaim},
		},
		"a claim's test is gone": {
			file: "ipvs/config_test.go", edits: []string{"TestDefaultsAreValid", "TestDefaultsAreNice"}, run: output(),
			want: []string{"docs/ENGINES.md says", "no test ipvs/config_test.go TestDefaultsAreValid", reclaim},
		},
		"a figure without proof": {
			file: "docs/ENGINES.md", edits: []string{"15m", "15m or 3 µs"}, run: output(),
			want: []string{"docs/ENGINES.md says", `nothing proves "3 µs"`, "claims.go"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			root, now := checkout(t), filepath.Join(t.TempDir(), "now.txt")
			if test.file != "" {
				file := filepath.Join(root, test.file)
				before := read(t, file)
				after := strings.NewReplacer(test.edits...).Replace(before)
				if after == before {
					t.Fatalf("%s has no %q", test.file, test.edits[0])
				}
				write(t, file, after)
			}
			write(t, now, test.run)
			err := run(root, []string{"check", now}, io.Discard)
			if (err == nil) != (len(test.want) == 0) {
				t.Errorf("error is %v, want one with %q", err, test.want)
			}
			for _, want := range test.want {
				if !strings.Contains(fmt.Sprint(err), want) {
					t.Errorf("error is %v, want one with %q", err, want)
				}
			}
		})
	}
}

// TestCheckShowsTimesSideBySide of what has run at the same size.
func TestCheckShowsTimesSideBySide(t *testing.T) {
	now := filepath.Join(t.TempDir(), "now.txt")
	write(t, now, output("100 ms", "40 ms", "N=1000/E=10/first", "N=77/E=10/first"))
	var out strings.Builder
	if err := run(checkout(t), []string{"check", now}, &out); err != nil {
		t.Fatal(err)
	}
	shown := map[string]string{}
	for line := range strings.Lines(out.String()) {
		if name, times, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			shown[name] += strings.Join(strings.Fields(times), " ") + "; "
		}
	}
	for name, want := range map[string]string{
		onNFTables + "/N=30000/E=10/first": "100 ms 40 ms; 100 ns 100 ns; ",
		onNFTables + "/N=1000/E=10/first":  "",
	} {
		if got := shown[name]; got != want {
			t.Errorf("times of %s are %q, want %q", name, got, want)
		}
	}
}

// TestWriteIsStable: what is written twice is the same.
func TestWriteIsStable(t *testing.T) {
	root := checkout(t)
	before := read(t, filepath.Join(root, documentFile))
	if err := run(root, []string{"write"}, io.Discard); err != nil {
		t.Fatal(err)
	}
	if got := read(t, filepath.Join(root, documentFile)); got != before {
		t.Errorf("the document is\n%s\nafter the second write, want\n%s", got, before)
	}
	if !strings.Contains(before, "2026-01-02 at commit abc1234: Cray, 2 cores, a load of 0.07 before, Linux 6.18.0, go1.26.8, iptables v1.8.9, nginx 1.22.1.") {
		t.Errorf("the document does not name the machine:\n%s", before)
	}
}

// TestOnlyAQuietMachineCounts: figures of a busy machine, or of code that nobody can
// check out, are not published.
func TestOnlyAQuietMachineCounts(t *testing.T) {
	for text, want := range map[string]string{
		"load: 0.49\n":            "",
		"load: 3.52\n":            `load "3.52" before the first benchmark, want less than 0.5: ` + remeasure,
		"load: \n":                `load ""`,
		"commit: abc1234-dirty\n": "measured with uncommitted changes (abc1234-dirty)",
	} {
		root := checkout(t)
		key, _, _ := strings.Cut(text, ":")
		file := filepath.Join(root, benchmarksFile)
		write(t, file, regexp.MustCompile(`(?m)^`+key+`: .*\n`).ReplaceAllString(read(t, file), text))
		err := run(root, []string{"write"}, io.Discard)
		if (err == nil) != (want == "") || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%q: error is %v, want one with %q", text, err, want)
		}
	}
}

func TestPrintShowsEveryTable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "output.txt")
	write(t, file, output())
	var out strings.Builder
	if err := run(t.TempDir(), []string{"print", file}, &out); err != nil {
		t.Fatal(err)
	}
	for _, table := range tables() {
		for _, r := range table.rows {
			if !strings.Contains(out.String(), "\n| "+r.title()+" | ") {
				t.Errorf("output lacks %q:\n%s", r.title(), out.String())
			}
		}
	}
	if strings.ContainsAny(out.String(), "{}*") {
		t.Errorf("something is not filled in:\n%s", out.String())
	}
}

func TestBadUseIsAnError(t *testing.T) {
	root, dir := checkout(t), t.TempDir()
	empty, partial := filepath.Join(dir, "empty"), filepath.Join(dir, "partial")
	write(t, empty, "PASS\n")
	write(t, partial, output("BenchmarkClean", "BenchmarkTidy"))
	for name, test := range map[string]struct {
		root string
		args []string
		want string
	}{
		"no verb":               {root, nil, "want one of"},
		"unknown verb":          {root, []string{"show"}, "want one of"},
		"no file":               {root, []string{"check"}, "want one of"},
		"missing file":          {root, []string{"print", empty + "-not"}, "no such file"},
		"no benchmarks":         {root, []string{"check", empty}, "no benchmark in it"},
		"a benchmark lacks":     {root, []string{"print", partial}, "no benchmark conntrack.BenchmarkClean/flows=100000/stale=1000: " + remeasure},
		"nothing to write":      {dir, []string{"write"}, "no such file"},
		"no documents to check": {dir, []string{"check", partial}, "no such file"},
	} {
		if err := run(test.root, test.args, io.Discard); !strings.Contains(fmt.Sprint(err), test.want) {
			t.Errorf("%s: error is %v, want one with %q", name, err, test.want)
		}
	}
}
