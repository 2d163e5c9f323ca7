package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

const root = "../../.."

// lister returns the packages of the repository.
func lister(t *testing.T) module {
	t.Helper()
	t.Chdir(root)
	m, err := list(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestTable: each row can be found, run and chosen.
func TestTable(t *testing.T) {
	m := lister(t)
	names := map[string]bool{}
	for _, p := range proofs() {
		if names[p.name] {
			t.Errorf("two proofs are named %s", p.name)
		}
		names[p.name] = true
		if p.name == "" || !strings.HasSuffix(p.proves, ".") || len(p.packages)+len(p.files) == 0 {
			t.Errorf("%+v: want a name, a sentence, and packages or files", p)
		}
		for _, pattern := range p.packages {
			if len(m.match([]string{pattern})) == 0 {
				t.Errorf("%s: no package is named %s", p.name, pattern)
			}
		}
		for _, pattern := range p.files {
			if found, err := fs.Glob(os.DirFS("."), strings.TrimSuffix(pattern, "/")); err != nil || len(found) == 0 {
				t.Errorf("%s: no file is named %s (%v)", p.name, pattern, err)
			}
		}
		for _, f := range []form{p.whole, p.short} {
			for _, fault := range f.faults(m, &p) {
				t.Errorf("%s: %s: %s", p.name, f.command(), fault)
			}
		}
		if p.whole.argv == nil || p.short.argv != nil && p.short.minutes >= p.whole.minutes {
			t.Errorf("%s takes %g minutes, and %g short: want a whole form, and a shorter short one or none", p.name, p.whole.minutes, p.short.minutes)
		}
	}
}

var runFlag = regexp.MustCompile(`^-run=\^?\(?(.*?)\)?\$?$`) // read-only

// faults says what is wrong with a command.
func (f *form) faults(m module, p *proof) (faults []string) {
	if f.argv == nil {
		return nil
	}
	if f.minutes <= 0 {
		faults = append(faults, "want an estimate")
	}
	if f.argv[0] != "go" {
		if info, err := os.Stat(f.argv[0]); err != nil || info.Mode()&0o111 == 0 {
			faults = append(faults, fmt.Sprintf("no such script (%v)", err))
		}
		return faults
	}
	tests := ""
	for _, word := range f.argv[2:] {
		if strings.HasPrefix(word, "./") {
			tested := m.match([]string{word})
			for folder := range tested {
				tests += testsIn(folder)
				if !m.match(p.packages)[folder] {
					faults = append(faults, folder+" is none of its packages")
				}
			}
		}
	}
	for _, word := range f.argv[2:] {
		if named := runFlag.FindStringSubmatch(word); named != nil {
			for name := range strings.SplitSeq(named[1], "|") {
				if !strings.Contains(tests, "\nfunc "+name) {
					faults = append(faults, "no test is named "+name)
				}
			}
		}
		if own := regexp.MustCompile(`^-((?:[a-z]+\.)?[a-z-]+)`).FindStringSubmatch(word); own != nil && !slices.Contains([]string{"count", "timeout", "run", "race"}, own[1]) && !strings.Contains(tests, `"`+own[1]+`"`) {
			faults = append(faults, "no test has the flag "+word)
		}
	}
	return faults
}

// testsIn returns the text of the tests of a package.
func testsIn(folder string) (text string) {
	files, err := fs.Glob(os.DirFS("."), path.Join(folder, "*_test.go"))
	if err != nil {
		return ""
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err == nil {
			text += "\n" + string(content)
		}
	}
	return text
}

// TestEachPackageWithAKernelIsRaced: the gate has no race detector where there is a kernel.
func TestEachPackageWithAKernelIsRaced(t *testing.T) {
	m := lister(t)
	raced := map[string]bool{}
	for _, p := range races() {
		for folder := range m.match(p.packages) {
			raced[folder] = true
		}
	}
	for folder, p := range m {
		if (slices.Contains(p.testImports, "internal/netns") || slices.Contains(p.testImports, "internal/netns/netnstest")) && !raced[folder] {
			t.Errorf("the tests of %s make network namespaces, and no proof runs them with the race detector", folder)
		}
	}
}

// TestEveryKindOfProofIsDrawn: what is never drawn rots. These are too long for CI, and have a part that
// other proofs draw, or are nothing for it.
func TestEveryKindOfProofIsDrawn(t *testing.T) {
	t.Parallel()
	never := []string{"kernels-all", "kernels-packets", "chaos-ipvs", "race-examples", "gate-busy"}
	drawn := map[string]bool{}
	for seed := range uint64(2000) {
		for _, c := range draw(proofs(), 10*time.Minute, seed) {
			drawn[c.name] = true
		}
	}
	for _, p := range proofs() {
		if drawn[p.name] == slices.Contains(never, p.name) {
			t.Errorf("%s: drawn is %v", p.name, drawn[p.name])
		}
	}
}

// TestDocumentsNameProofs: a proof that a document names exists. ENGINE stands for each engine.
func TestDocumentsNameProofs(t *testing.T) {
	t.Parallel()
	sentence, span := regexp.MustCompile(`(?i)[^.|]*\bproofs? [^|]*?\.\s`), regexp.MustCompile("`([a-z]+(?:-[a-zA-Z0-9.]+)*)`")
	named := 0
	for _, document := range []string{"README.md", "CONTRIBUTING.md", "docs/RELIABILITY.md", "docs/ENGINES.md"} {
		text, err := os.ReadFile(path.Join(root, document))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range span.FindAllStringSubmatch(strings.Join(sentence.FindAllString(string(text), -1), ""), -1) {
			named++
			pattern := strings.ReplaceAll(name[1], "ENGINE", "*")
			if !slices.ContainsFunc(proofs(), func(p proof) bool { ok, _ := path.Match(pattern, p.name); return ok }) {
				t.Errorf("%s names the proof %s, which is not there", document, name[1])
			}
		}
	}
	if named < 20 {
		t.Errorf("documents name %d proofs, want 20 at least: does the test find them?", named)
	}
}

func TestReport(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	good := choice{&proof{name: "good"}, of(1), true}
	bad := choice{&proof{name: "bad"}, of(1), false}
	table, failed := report([]result{
		{good, nil, 61 * time.Second, []string{"1", "2", "3", "4", "5", "6"}},
		{bad, errors.New("no"), time.Second, nil},
	})
	out.WriteString(table)
	want := `proof         result  seconds  seeds
good (short)  passed  61       1, 2, 3, 4, and 2 more, above
bad           FAILED  1        -
`
	if out.String() != want || !slices.Equal(failed, []string{"bad"}) {
		t.Errorf("failed: %q, and\n%s\nwant\n%s", failed, out.String(), want)
	}
}

func TestSeedsIn(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"p TestA: a_test.go:7: 20 seeds from 4711; to run one again: X_SEED=N go test": "4711",
		"to run the same again: SERVICEPLANE_HISTORY_SEED=7 go test":                   "7",
		"seed 1, seed 2 and again seed 1":                                              "1 2",
		"drawn, seed 5; again: DRAW_SEED=5":                                            "5",
		"nothing is drawn":                                                             "",
	} {
		if got := strings.Join(seedsIn(text), " "); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

// TestRun: proofs after one that fails run too, and what each needs is installed once.
func TestRun(t *testing.T) {
	t.Chdir(root)
	count := path.Join(t.TempDir(), "count")
	install := need("echo once >>" + count)
	sh := func(name, script string, needs ...need) choice {
		return choice{&proof{name: name, needs: needs}, form{1, []string{"VALUE=7"}, []string{"sh", "-c", script}}, false}
	}
	var out bytes.Buffer
	r := &prover{out: &out, met: map[need]bool{}}
	err := r.run(t.Context(), []choice{
		sh("fails", "exit 3", install), sh("passes", `echo "seed $VALUE"`, install), sh("rooted", "true", needsRoot), sh("bare", "true", "false"),
	})
	if err == nil || err.Error() != "FAILED: fails, rooted, bare" {
		t.Errorf("got %v, want that fails, rooted and bare failed", err)
	}
	if line := regexp.MustCompile(`(?m)^passes +passed +\d+ +7$`); !line.MatchString(out.String()) {
		t.Errorf("no row with the seed:\n%s", out.String())
	}
	if text, err := os.ReadFile(count); string(text) != "once\n" {
		t.Errorf("installed %q (%v), want once", text, err)
	}
}
