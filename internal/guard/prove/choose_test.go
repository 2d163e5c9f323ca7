package main

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/serviceplane/serviceplane/internal/guard/gocmd"
)

// of returns a command that is there and takes some minutes.
func of(minutes float64) form { return form{minutes, []string{"true"}} }

// small is a module: program -> engine -> tracker, and the tests of engine import a harness.
func small() module {
	return module{
		".": {}, "tracker": {}, "engine": {deps: []string{"tracker", "test/harness"}},
		"test/harness": {deps: []string{"tracker"}}, "program": {deps: []string{"engine", "tracker"}}, "program/sub": {},
	}
}

func titles(choices []choice) string {
	var all []string
	for _, c := range choices {
		all = append(all, c.title)
	}
	return strings.Join(all, ", ")
}

func TestSees(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		packages, files, changed []string
		direct                   bool
		n                        int
	}{
		"its own package":               {[]string{"./engine"}, nil, []string{"engine/a.go"}, true, 1},
		"its own test":                  {[]string{"./engine"}, nil, []string{"engine/a_test.go"}, true, 1},
		"two files of a package":        {[]string{"./engine"}, nil, []string{"engine/a.go", "engine/b.go"}, true, 1},
		"an import":                     {[]string{"./program"}, nil, []string{"tracker/a.go"}, false, 1},
		"a test of an import":           {[]string{"./program"}, nil, []string{"tracker/a_test.go"}, false, 0},
		"an import of its test":         {[]string{"./engine"}, nil, []string{"test/harness/a.go"}, false, 1},
		"an import of another's test":   {[]string{"./program"}, nil, []string{"test/harness/a.go"}, false, 0},
		"what imports it":               {[]string{"./tracker"}, nil, []string{"engine/a.go"}, false, 0},
		"its data":                      {[]string{"./engine"}, nil, []string{"engine/testdata/deep/x"}, true, 1},
		"a folder above":                {[]string{"./program/..."}, nil, []string{"program/sub/a.go", "program/a.go"}, true, 2},
		"only the folder":               {[]string{"./program"}, nil, []string{"program/sub/a.go"}, false, 0},
		"everything":                    {[]string{"./..."}, nil, []string{"tracker/a.go", "doc.go"}, true, 2},
		"a document":                    {[]string{"./..."}, nil, []string{"docs/X.md", "README.md"}, false, 0},
		"a script of its own":           {nil, []string{"hack/x.sh"}, []string{"hack/x.sh"}, true, 1},
		"a folder of its own":           {nil, []string{"hack/vm/"}, []string{"hack/vm/a/b", "hack/vms"}, true, 1},
		"a pattern":                     {nil, []string{"e/*.o"}, []string{"e/x.o", "e/x.go"}, true, 1},
		"dependencies":                  {[]string{"./tracker"}, nil, []string{"go.mod", "go.sum"}, false, 2},
		"dependencies, without package": {nil, []string{"hack/x.sh"}, []string{"go.mod"}, false, 0},
		"nothing":                       {[]string{"./..."}, []string{"hack/"}, nil, false, 0},
	} {
		p := proof{packages: test.packages, files: test.files}
		if direct, n := p.sees(small(), test.changed); direct != test.direct || n != test.n {
			t.Errorf("%s: sees %v: got %v, %d, want %v, %d", name, test.changed, direct, n, test.direct, test.n)
		}
	}
}

func TestChoose(t *testing.T) {
	t.Parallel()
	all := []proof{
		{name: "program", packages: []string{"./program"}, whole: of(20), short: of(2)},
		{name: "engine", packages: []string{"./engine"}, whole: of(10), short: of(5)},
		{name: "both", packages: []string{"./engine", "./program"}, whole: of(8)},
		{name: "script", files: []string{"hack/x.sh"}, whole: of(100)},
	}
	for name, test := range map[string]struct {
		changed    []string
		budget     time.Duration
		want, left string
	}{
		"nothing changed":                       {nil, time.Hour, "", ""},
		"what nobody sees":                      {[]string{"docs/X.md"}, time.Hour, "", ""},
		"its own package before an import":      {[]string{"engine/a.go"}, 19 * time.Minute, "engine (short), both, program (short)", ""},
		"more in a minute first":                {[]string{"tracker/a.go"}, 15 * time.Minute, "program (short), engine (short), both", ""},
		"whole where it fits, in the order":     {[]string{"engine/a.go"}, 21 * time.Minute, "engine, both, program (short)", ""},
		"the whole of what comes later":         {[]string{"tracker/a.go"}, 20 * time.Minute, "program (short), engine, both", ""},
		"a large budget":                        {[]string{"tracker/a.go"}, time.Hour, "program, engine, both", ""},
		"too little for all":                    {[]string{"engine/a.go"}, 7 * time.Minute, "engine (short), program (short)", "both"},
		"too little for anything":               {[]string{"hack/x.sh"}, 30 * time.Minute, "", "script"},
		"no more packages, but in more of them": {[]string{"engine/a.go", "program/a.go", "tracker/a.go"}, 7 * time.Minute, "program (short), engine (short)", "both"},
	} {
		chosen, left := choose(all, small(), test.changed, test.budget)
		if got := titles(chosen); got != test.want || titles(left) != test.left {
			t.Errorf("%s: got %q, no room for %q, want %q and %q", name, got, titles(left), test.want, test.left)
		}
	}
}

// TestTelling: what is about everything says little about one package, although it takes less time.
func TestTelling(t *testing.T) {
	t.Parallel()
	all := []proof{{name: "everything", packages: []string{"./..."}, whole: of(1)}, {name: "engine", packages: []string{"./engine"}, whole: of(2)}}
	got := telling(all, small(), []string{"engine/a.go"})
	if len(got) != 2 || got[0].name != "engine" {
		t.Errorf("got %v, want engine first", got)
	}
}

func TestDraw(t *testing.T) {
	t.Parallel()
	all := []proof{
		{name: "a", whole: of(4)}, {name: "b", whole: of(60), short: of(6)}, {name: "c", whole: of(5)}, {name: "long", whole: of(11)},
	}
	drawn := map[string]int{}
	for seed := range uint64(200) {
		first := draw(all, 10*time.Minute, seed)
		if again := draw(all, 10*time.Minute, seed); titles(first) != titles(again) {
			t.Errorf("seed %d drew %q, then %q", seed, titles(first), titles(again))
		}
		var sum float64
		for _, c := range first {
			sum += c.minutes
			drawn[c.title]++
		}
		if sum > 10 {
			t.Errorf("seed %d: %q takes %g minutes, want at most 10", seed, titles(first), sum)
		}
	}
	if drawn["a"] == 0 || drawn["b (short)"] == 0 || drawn["c"] == 0 || len(drawn) != 3 {
		t.Errorf("200 seeds drew %v, want a, the short form of b, and c", drawn)
	}
}

func TestNamed(t *testing.T) {
	t.Parallel()
	all := []proof{{name: "race-a", whole: of(4), short: of(1)}, {name: "race-b", whole: of(5)}, {name: "fuzz", whole: of(9)}}
	for name, test := range map[string]struct {
		patterns []string
		short    bool
		want     string
		fails    bool
	}{
		"in the order of names": {[]string{"fuzz", "race-a"}, false, "fuzz, race-a", false},
		"a pattern":             {[]string{"race-*"}, false, "race-a, race-b", false},
		"short where there is":  {[]string{"race-*"}, true, "race-a (short), race-b", false},
		"each once":             {[]string{"race-b", "race-*"}, false, "race-b, race-a", false},
		"no such":               {[]string{"rice"}, false, "", true},
		"no pattern":            {[]string{"["}, false, "", true},
	} {
		got, err := named(all, test.patterns, test.short)
		if (err != nil) != test.fails || titles(got) != test.want {
			t.Errorf("%s: got %q, %v, want %q", name, titles(got), err, test.want)
		}
	}
}

func TestParseFlags(t *testing.T) {
	t.Parallel()
	for _, right := range []string{"", "-short a b", "-changed HEAD~1 -budget 10m", "-draw -seed 7 -n"} {
		if o, err := parseFlags(strings.Fields(right)); err != nil {
			t.Errorf("%q: got %+v, %v, want no error", right, o, err)
		}
	}
	for _, wrong := range []string{"a -short", "-draw a", "-draw -changed HEAD", "-unknown", "-draw -budget 10"} {
		if o, err := parseFlags(strings.Fields(wrong)); err == nil {
			t.Errorf("%q: got %+v, want an error", wrong, o)
		}
	}
}

func TestCollect(t *testing.T) {
	t.Parallel()
	const top, a, b, c = gocmd.Module, gocmd.Module + "/a", gocmd.Module + "/b", gocmd.Module + "/c"
	m := collect([]gocmd.Package{
		{ImportPath: top, Deps: []string{"fmt"}},
		{ImportPath: a, Deps: []string{b, "os"}, TestImports: []string{c}, XTestImports: []string{top}},
		{ImportPath: a + ".test", Deps: []string{a + " [" + a + ".test]", c, top + " [" + a + ".test]"}},
		{ImportPath: a + "_test [" + a + ".test]", Deps: []string{"net"}},
	})
	want := module{".": {}, "a": {tests: []string{"c", "."}, deps: []string{"b", "a", "c", "."}}}
	if diff := cmp.Diff(want, m, cmp.AllowUnexported(pkg{}), cmpopts.EquateEmpty()); diff != "" {
		t.Error(diff)
	}
}
