package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
)

// report is what apidiff -m -allow-internal printed for a made-up module.
const report = `Incompatible changes:
- package example.com/made/gone: removed
- ./examples/x.X: removed
- ./internal/in.Base.Shared: removed
- ./internal/in.Other.M: removed
- ./internal/in.Hidden.Shared, method set of *Outer: removed
- ./p.(*List[K, V]).Add: changed from func(K, V) to func(K, *V)
- ./p.Feed, element type: changed from int to string
- ./p/sub.T.F: changed from int to string
Compatible changes:
- ./p.Config.Room: added
- package example.com/made/come: added
- package example.com/made: added
`

// complete is a changelog that names all of it.
const complete = "# Changelog\n\n## Unreleased\n\n### Breaking\n\n" +
	"- `gone`,\n  `p.List.Add`: use `p.List.Put`: it takes a pointer.\n- `p.Feed`, `p/sub.T.F`, `--a-flag`: are strings.\n" +
	"- `p.Alias.Shared`, `internal/in.Hidden.Shared`: drop it.\n\n### New API\n\n- `p.Config.Room`, in a package\n  beside `come` and `made`.\n\n" +
	"## v0.1.0 — 2026-01-31\n\n### Breaking\n\n- `old.Name`: is older.\n"

func TestChangesAreComparedWithTheChangelog(t *testing.T) {
	for name, c := range map[string]struct {
		report, changelog string
		keepStale         bool
		want              []string // parts of the error; none for success
	}{
		"complete":         {report: report, changelog: complete},
		"breaking":         {report: report, changelog: strings.Replace(complete, "`p.Feed`, ", "", 1), want: []string{"p.Feed: changed"}},
		"behind the colon": {report: report, changelog: strings.Replace(complete, "`p.List.Add`:", "x`: `p.List.Add`", 1), want: []string{"p.List.Add: changed"}},
		"an alias":         {report: report, changelog: strings.Replace(complete, "p.Alias.", "p.", 1), want: []string{"p.Alias.Shared: removed", "p.Shared breaks"}},
		"new API":          {report: report, changelog: strings.Replace(complete, "`come`", "it", 1), want: []string{"new API of come"}},
		"stale":            {report: "", changelog: complete, want: []string{"p.Feed breaks, and it does not"}},
		"another base":     {report: "", changelog: complete, keepStale: true},
		"a patch release":  {report: report, changelog: strings.Replace(complete, "Unreleased", "v0.1.1 — 2026-02-01", 1), want: []string{"v0.1.1 is a patch release"}},
		"no section":       {report: report, changelog: "# Changelog\n", want: []string{"no section for the tag v0.1.0"}},
		"another form":     {report: "./p.Feed: removed\n", changelog: complete, want: []string{"not of the form of apidiff"}},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			if err := os.CopyFS(root, fstest.MapFS{
				"CHANGELOG.md": {Data: []byte(c.changelog)}, "linux": {Data: []byte(c.report)}, "p/p.go": {Data: []byte("package p\n\ntype Alias = in.Base\n")},
			}); err != nil {
				t.Fatal(err)
			}
			q := question{module: "example.com/made", since: "v0.1.0", stale: !c.keepStale, reports: []string{filepath.Join(root, "linux")}}
			_, err := q.run(root)
			if (err == nil) != (len(c.want) == 0) {
				t.Fatalf("got the error %v, want %q", err, c.want)
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("got the error %v, want one with %q", err, want)
				}
			}
		})
	}
}
