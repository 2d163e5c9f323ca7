package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/proxiertest"
)

const engines = "docs/ENGINES.md"

// deviations are the fields of proxiertest.Features, with the scenarios that their
// comments name. Skip is none.
func deviations(t *testing.T) map[string][]string {
	t.Helper()
	text := read(t, "proxiertest/features.go")
	file, err := parser.ParseFile(token.NewFileSet(), "features.go", text, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]string{}
	ast.Inspect(file, func(n ast.Node) bool {
		s, ok := n.(*ast.StructType)
		for i := 0; ok && i < s.Fields.NumFields(); i++ {
			f := s.Fields.List[i]
			all[f.Names[0].Name] = ids(strings.ReplaceAll(f.Doc.Text(), "\n", " "))
		}
		return !ok
	})
	delete(all, "Skip")
	if want := reflect.TypeFor[proxiertest.Features]().NumField() - 1; len(all) != want {
		t.Fatalf("%d features are read, want %d", len(all), want)
	}
	return all
}

// declared are the deviations that the tests of an engine declare when they run the
// scenarios.
func declared(t *testing.T, engine string) []string {
	t.Helper()
	var all []string
	for _, file := range files(t) {
		if filepath.Dir(file) != engine || !strings.HasSuffix(file, "_test.go") {
			continue
		}
		for _, m := range regexp.MustCompile(`proxiertest\.Features\{([^}]*)\}`).FindAllStringSubmatch(read(t, file), -1) {
			for _, field := range regexp.MustCompile(`(\w+): +true`).FindAllStringSubmatch(m[1], -1) {
				all = append(all, field[1])
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// TestTheTableOfPacketsIsWhatTestsDeclare: in the column of each engine, the fields of
// proxiertest.Features that it sets, and in the first column the scenarios that these
// speak of.
func TestTheTableOfPacketsIsWhatTestsDeclare(t *testing.T) {
	features := deviations(t)
	rows := find(t, engines).table(t, "What packets see")
	told := map[string][]string{} // scenarios by feature
	for i, engine := range []string{"nftables", "iptables", "ipvs", "userspace"} {
		var got []string
		for _, cells := range rows {
			for _, name := range texts(cells[i+1]) {
				if _, known := features[name]; known {
					got = append(got, name)
					told[name] = append(told[name], ids(cells[0])...)
				}
			}
		}
		slices.Sort(got)
		got = slices.Compact(got)
		if want := declared(t, engine); !slices.Equal(got, want) {
			t.Errorf("%s deviates by %q, its tests say %q", engine, got, want)
		}
	}
	for name, got := range told {
		want := features[name]
		slices.Sort(got)
		slices.Sort(want)
		if got, want := slices.Compact(got), slices.Compact(want); !slices.Equal(got, want) {
			t.Errorf("%s is about %q, its comment says %q", name, got, want)
		}
	}
}

// TestEveryDeviationIsExplained, also those that no engine of ours has.
func TestEveryDeviationIsExplained(t *testing.T) {
	d := find(t, engines)
	for name := range deviations(t) {
		if !slices.ContainsFunc(d.spans(), func(s span) bool { return s.text == name }) {
			t.Errorf("%s does not speak of %s", engines, name)
		}
	}
}
