package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	removed = "Incompatible changes:\n- ./p.(*T).M: removed\n"
	added   = "Compatible changes:\n- ./p.Fresh: added\n"

	told     = "### Breaking\n\n- `p.T.M`: call `p.T.N` with the same arguments.\n\n"
	oldStuff = "## v0.1.0 — 2026-01-31\n\n### Breaking\n\n- `p.Old`: it is all different now.\n\n### New API\n\n- `q`: things.\n"
)

// judged runs the program on a changelog and on a report for one system.
func judged(t *testing.T, changelog, report string, arguments ...string) (out string, err error) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"log": changelog, "report": report} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	given := []string{"-changelog=" + filepath.Join(dir, "log"), "-module=example.com/made", "-root=" + dir}
	q, err := parseArguments(append(append(given, arguments...), "linux="+filepath.Join(dir, "report")))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	err = run(q, &b)
	return b.String(), err
}

func TestTheChangelogNamesWhatChanged(t *testing.T) {
	for name, test := range map[string]struct {
		log, report string
		arguments   []string
		want        string // in the complaint; empty for none
	}{
		"nothing changed": {log: "## Unreleased\n"},
		"a break without a word": {
			log: "## Unreleased\n", report: removed,
			want: "p.T.M: removed\nUndo it, or write under \"### Breaking\" of \"## Unreleased\" what such programs do now:\n  - `p.T.M`: <the way over>",
		},
		"a break that is named":         {log: "## Unreleased\n\n" + told, report: removed},
		"named in a second line":        {log: "## Unreleased\n\n### Breaking\n\n- `p.X`,\n  `p.T.M`: call `p.T.N` with the\n  same.\n", report: removed + "- ./p.X: removed\n"},
		"named under another heading":   {log: "## Unreleased\n\n### New API\n\n- `p.T.M`: it is not here any more.\n", report: removed, want: "does not say so"},
		"named behind the colon":        {log: "## Unreleased\n\n### Breaking\n\n- Methods: those such as `p.T.M` are gone.\n", report: removed, want: "does not say so"},
		"named without code":            {log: "## Unreleased\n\n### Breaking\n\n- p.T.M: call `p.T.N` with the same.\n", report: removed, want: "does not say so"},
		"no way over":                   {log: "## Unreleased\n\n### Breaking\n\n- `p.T.M` is gone.\n", report: removed, want: "CHANGELOG.md:5: shows no way over"},
		"two words are no way over":     {log: "## Unreleased\n\n### Breaking\n\n- `p.T.M`: use `p.T.N`.\n", report: removed, want: "shows no way over"},
		"one of two is named":           {log: "## Unreleased\n\n" + told, report: removed + "- ./p.X: removed\n", want: "  p.X: removed\nUndo"},
		"our proposal as it is":         {log: "## Unreleased\n\n### Breaking\n\n- `p.T.M`: <the way over>\n", report: removed, want: "shows no way over"},
		"a colon in code":               {log: "## Unreleased\n\n### Breaking\n\n- `p.T.M` of `a: b c d`.\n", report: removed, want: "shows no way over"},
		"an entry about nothing":        {log: "## Unreleased\n\n" + told, want: "CHANGELOG.md:5: says that p.T.M breaks"},
		"an entry about an older thing": {log: "## Unreleased\n\n" + told, arguments: []string{"-stale=false"}},
		"an entry about what is fresh":  {log: "## Unreleased\n\n### Breaking\n\n- `p.Fresh`: do this and that.\n\n### New API\n\n- `p`: more.\n", report: added, want: "says that p.Fresh breaks"},
		"an entry about a flag":         {log: "## Unreleased\n\n### Breaking\n\n- `--mode`, `rules_total`, `docs/X.md`: say it with words.\n"},
		"without any section": {
			log: oldStuff, report: removed, arguments: []string{"-since=v0.1.0"}, want: "\"### Breaking\" of \"## Unreleased\"",
		},
		"an older release does not count": {
			log: "## Unreleased\n\n" + strings.Replace(oldStuff, "p.Old", "p.T.M", 1), report: removed, arguments: []string{"-since=v0.1.0"}, want: "does not say so",
		},
		"nor do its stale entries": {log: "## Unreleased\n\n" + oldStuff, arguments: []string{"-since=v0.1.0"}},
		"the section of a release that has no tag yet": {
			log: "## v0.2.0 — 2026-02-01\n\n" + told + oldStuff, report: removed, arguments: []string{"-since=v0.1.0"},
		},
		"the section of a release": {
			log: "## Unreleased\n\n## v0.2.0 — 2026-02-01\n\n" + told + oldStuff, report: removed, arguments: []string{"-since=v0.1.0", "-release=v0.2.0"},
		},
		"what is written above a release comes too late": {
			log: "## Unreleased\n\n" + told + "## v0.2.0 — 2026-02-01\n\n" + oldStuff, report: removed,
			arguments: []string{"-since=v0.1.0", "-release=v0.2.0"}, want: "\"### Breaking\" of \"## v0.2.0 — 2026-02-01\"",
		},
		"a patch release that breaks": {
			log: "## v0.1.1 — 2026-02-01\n\n" + oldStuff, report: removed,
			arguments: []string{"-since=v0.1.0", "-release=v0.1.1"}, want: "But v0.1.1 is a patch release",
		},
		"a patch release that says so": {
			log: "## v0.1.1 — 2026-02-01\n\n" + told + oldStuff, report: removed, arguments: []string{"-since=v0.1.0"}, want: "v0.1.1 is a patch release",
		},
		"a tag without a section": {log: oldStuff, arguments: []string{"-release=v0.2.0"}, want: "no section for the tag v0.2.0"},
		"a last tag without one":  {log: "## Unreleased\n", arguments: []string{"-since=v0.2.0"}, want: "no section for the tag v0.2.0"},

		"new API without a word":          {log: "## Unreleased\n", report: added, want: "`p` has new API, and \"### New API\" of \"## Unreleased\" in CHANGELOG.md does not name it: p.Fresh: added"},
		"new API by its package":          {log: "## Unreleased\n\n### New API\n\n- `p`: more.\n", report: added},
		"new API by one of its names":     {log: "## Unreleased\n\n### New API\n\n- More in `p.Other`.\n", report: added},
		"new API of a longer name":        {log: "## Unreleased\n\n### New API\n\n- `pp`, `x.p`: more.\n", report: added, want: "`p` has new API"},
		"new API named in an old release": {log: "## Unreleased\n\n" + strings.Replace(oldStuff, "`q`", "`p`", 1), report: added, arguments: []string{"-since=v0.1.0"}, want: "`p` has new API"},
		"a package that is new":           {log: "## Unreleased\n\n### New API\n\n- `p`: more.\n", report: "Compatible changes:\n- package example.com/made/x: added\n", want: "`x` has new API"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := judged(t, test.log, test.report, test.arguments...)
			if got := errText(err); (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
				t.Errorf("complaint is\n%s\nwant one with\n%s", got, test.want)
			}
		})
	}
}

func TestTheHeadingsAreInOrder(t *testing.T) {
	for name, test := range map[string]struct{ log, want string }{
		"none":                         {"# Changelog\n", ":1: no section"},
		"unreleased alone":             {"## Unreleased\n", ""},
		"a release alone":              {"## v0.1.0 — 2026-01-31\n", ""},
		"both":                         {"## Unreleased\n\n## v0.1.0 — 2026-01-31\n", ""},
		"newest first":                 {"## v0.10.0 — 2026-02-01\n## v0.9.1 — 2026-03-01\n## v0.9.0 — 2026-01-31\n", ""},
		"oldest first":                 {"## v0.9.0 — 2026-01-31\n## v0.10.0 — 2026-02-01\n", ":2: v0.10.0 stands below v0.9.0"},
		"twice":                        {"## v0.9.0 — 2026-01-31\n## v0.9.0 — 2026-01-31\n", ":2: v0.9.0 stands below v0.9.0"},
		"unreleased below":             {"## v0.1.0 — 2026-01-31\n## Unreleased\n", ":2: \"## Unreleased\" stands above"},
		"a hyphen":                     {"## v0.1.0 - 2026-01-31\n", ":1: \"## v0.1.0 - 2026-01-31\" should be"},
		"no date":                      {"## v0.1.0\n", "of the form"},
		"a day that is none":           {"## v0.1.0 — 2026-02-30\n", "of the form"},
		"another word":                 {"## Next\n", "of the form"},
		"not v0":                       {"## v1.0.0 — 2026-01-31\n", "of the form"},
		"a zero in front":              {"## v0.01.0 — 2026-01-31\n", "of the form"},
		"a part ends with its section": {"## v0.2.0 — 2026-02-01\n### Breaking\n- `x`: do this and that.\n## v0.1.1 — 2026-01-31\n- `y`: do this and that.\n", ""},
		"an older patch breaks":        {"## Unreleased\n## v0.1.1 — 2026-01-31\n### Breaking\n- `x`: do this and that.\n## v0.1.0 — 2026-01-30\n", ":4: v0.1.1 is a patch release"},
	} {
		t.Run(name, func(t *testing.T) {
			got := strings.Join(disorder(parseChangelog(test.log)), "\n")
			if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
				t.Errorf("complaint is %q, want one with %q", got, test.want)
			}
		})
	}
}

func TestWithoutComplaintTheChangesAreTold(t *testing.T) {
	out, err := judged(t, "## Unreleased\n\n"+told+"### New API\n\n- `p`, `q`: more.\n", removed+added+"- ./p.X: added\n- ./q.X: added\n")
	want := "breaking, as CHANGELOG.md says: p.T.M: removed\n1 breaking changes, 3 others: p 2, q 1\n"
	if err != nil || out != want {
		t.Errorf("output is %q, %v, want %q", out, err, want)
	}
}

func TestOurOwnChangelogIsInOrder(t *testing.T) {
	text, err := os.ReadFile("../../../CHANGELOG.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, complaint := range disorder(parseChangelog(string(text))) {
		t.Error(complaint)
	}
}

func TestTheArgumentsAreUnderstood(t *testing.T) {
	for name, args := range map[string][]string{"no file": {"linux"}, "no flag": {"-x"}} {
		if _, err := parseArguments(args); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	broken := t.TempDir()
	write(t, broken, map[string]string{"p/p.go": "package"})
	for name, q := range map[string]question{
		"no syntax":    {changelog: "../../../CHANGELOG.md", root: broken},
		"no changelog": {changelog: filepath.Join(t.TempDir(), "none"), root: t.TempDir()},
		"no report":    {changelog: "../../../CHANGELOG.md", root: t.TempDir(), reports: map[string]string{"linux": filepath.Join(t.TempDir(), "none")}},
	} {
		if err := run(q, os.Stderr); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
