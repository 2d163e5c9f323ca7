package main

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
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
		if p.name == "" || names[p.name] || !strings.HasSuffix(p.proves, ".") || len(p.packages)+len(p.files) == 0 {
			t.Errorf("%+v: want a name of its own, a sentence, and packages or files", p)
		}
		names[p.name] = true
		for _, pattern := range p.packages {
			if len(m.match([]string{pattern})) == 0 {
				t.Errorf("%s: no package is named %s", p.name, pattern)
			}
		}
		for _, pattern := range p.files {
			if found, err := filepath.Glob(strings.TrimSuffix(pattern, "/")); err != nil || len(found) == 0 {
				t.Errorf("%s: no file is named %s (%v)", p.name, pattern, err)
			}
		}
		for _, f := range []form{p.whole, p.short} {
			for _, fault := range f.faults(m) {
				t.Errorf("%s: %s: %s", p.name, f.command(), fault)
			}
		}
		if p.whole.words == nil || p.short.words != nil && p.short.minutes >= p.whole.minutes || p.whole.minutes < 0 || p.short.minutes < 0 {
			t.Errorf("%s takes %g minutes, and %g short: want a whole form, and a shorter short one or none", p.name, p.whole.minutes, p.short.minutes)
		}
	}
}

var (
	runFlag = regexp.MustCompile(`^-(?:run|skip)=\^?\(?(.*?)\)?\$?$`)    // read-only
	anyFlag = regexp.MustCompile(`^-((?:[a-z]+\.)?[a-z-]+)`)             // read-only
	goFlags = regexp.MustCompile(`^-(count|timeout|run|skip|race)\b.*$`) // read-only
)

// faults says what is wrong with a command.
func (f *form) faults(m module) (faults []string) {
	i := slices.IndexFunc(f.words, func(word string) bool { return !strings.Contains(word, "=") })
	if i < 0 {
		return nil
	}
	if f.words[i] != "go" {
		if info, err := os.Stat(f.words[i]); err != nil || info.Mode()&0o111 == 0 {
			faults = append(faults, fmt.Sprintf("no such script (%v)", err))
		}
		return faults
	}
	var tests strings.Builder
	for _, folder := range m.match(slices.DeleteFunc(slices.Clone(f.words), func(word string) bool { return !strings.HasPrefix(word, "./") })) {
		files, _ := filepath.Glob(folder + "/*_test.go")
		for _, file := range files {
			text, err := os.ReadFile(file)
			fmt.Fprintf(&tests, "\n%s\n", text)
			if err != nil {
				faults = append(faults, err.Error())
			}
		}
	}
	for _, word := range f.words[i+2:] {
		if named := runFlag.FindStringSubmatch(word); named != nil {
			for name := range strings.SplitSeq(named[1], "|") {
				if !strings.Contains(tests.String(), "\nfunc "+name) {
					faults = append(faults, "no test is named "+name)
				}
			}
		}
		if own := anyFlag.FindStringSubmatch(word); own != nil && !goFlags.MatchString(word) && !strings.Contains(tests.String(), `"`+own[1]+`"`) {
			faults = append(faults, "no test has the flag "+word)
		}
	}
	return faults
}

// TestEachPackageWithAKernelIsRaced: the gate has no race detector where there is a kernel.
func TestEachPackageWithAKernelIsRaced(t *testing.T) {
	m := lister(t)
	var raced []string
	for _, p := range races() {
		raced = append(raced, m.match(p.packages)...)
	}
	for folder, p := range m {
		if (slices.Contains(p.tests, "internal/netns") || slices.Contains(p.tests, "internal/netns/netnstest")) && !slices.Contains(raced, folder) {
			t.Errorf("the tests of %s make network namespaces, and no proof runs them with the race detector", folder)
		}
	}
}

// TestEveryKindOfProofIsDrawn: what is never drawn rots. These are too long for CI, and have a part that
// other proofs draw, or are nothing for it.
func TestEveryKindOfProofIsDrawn(t *testing.T) {
	t.Parallel()
	never := []string{"kernels-all", "kernels-packets", "chaos-ipvs", "race-examples", "gate-busy"}
	all, drawn := proofs(), map[string]bool{}
	for seed := range uint64(2000) {
		for _, c := range draw(all, 10*time.Minute, seed) {
			drawn[c.name] = true
		}
	}
	for _, p := range all {
		if drawn[p.name] == slices.Contains(never, p.name) {
			t.Errorf("%s: drawn is %v", p.name, drawn[p.name])
		}
	}
}

// TestDocumentsNameProofs: a proof that a document names exists. ENGINE stands for each engine.
func TestDocumentsNameProofs(t *testing.T) {
	t.Parallel()
	sentence, cell := `(?i)[^.|]*\bproofs? [^|]*?\.\s`, "(?m)\\| (`[^|]*`) \\|$"
	span := regexp.MustCompile("`([a-z]+(?:-[a-zA-Z0-9.]+)*)`")
	all, names := proofs(), 0
	for document, pattern := range map[string]string{
		"README.md": sentence, "CONTRIBUTING.md": sentence, "SECURITY.md": sentence, "docs/ENGINES.md": sentence, "docs/PROOFS.md": sentence + "|" + cell,
	} {
		text, err := os.ReadFile(path.Join(root, document))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range span.FindAllStringSubmatch(strings.Join(regexp.MustCompile(pattern).FindAllString(string(text), -1), ""), -1) {
			names++
			if _, err := named(all, []string{strings.ReplaceAll(name[1], "ENGINE", "*")}, false); err != nil {
				t.Errorf("%s names the proof %s, which is not there", document, name[1])
			}
		}
	}
	if names < 20 {
		t.Errorf("documents name %d proofs, want 20 at least: does the test find them?", names)
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
		return choice{&proof{needs: needs}, form{1, []string{"VALUE=7", "sh", "-c", script}}, name}
	}
	var out strings.Builder
	r := &prover{out: &out, met: map[need]bool{}}
	err := r.run(t.Context(), []choice{
		sh("fails", "exit 3", install), sh("passes", `echo "seed $VALUE"`, install), sh("rooted", "true", needsRoot), sh("bare", "true", "false"),
		sh("a (short)", "for i in 1 2 3 4 5 6; do echo seed $i; done"),
	})
	if err == nil || err.Error() != "FAILED: fails, rooted, bare" {
		t.Errorf("got %v, want that fails, rooted and bare failed", err)
	}
	_, table, _ := strings.Cut(out.String(), "\n\nproof")
	want := `      result  seconds  seeds
fails      FAILED  0        -
passes     passed  0        7
rooted     FAILED  0        -
bare       FAILED  0        -
a (short)  passed  0        1, 2, 3, 4, and 2 more, above
`
	if table = regexp.MustCompile(`(passed|FAILED)  [0-9]+ +`).ReplaceAllString(table, "$1  0        "); table != want {
		t.Errorf("got the table\nproof%s\nwant\nproof%s", table, want)
	}
	if text, err := os.ReadFile(count); string(text) != "once\n" {
		t.Errorf("installed %q (%v), want once", text, err)
	}
}
