package main

import (
	"errors"
	"strings"
	"testing"
)

// report is what apidiff -m -allow-internal printed for a made-up module.
const report = `Incompatible changes:
- package example.com/made/gone: removed
- ./examples/x.X: removed
- ./internal/in.Other.M: removed
- ./internal/in.Hidden.Shared, method set of *Outer: removed
- ./p.(*List[K, V]).Add: changed from func(K, V) to func(K, *V)
- ./p.Feed, element type: changed from int to string
- ./p/sub.T.F: changed from int to string
Compatible changes:
- ./p.Config.Room: added
- package example.com/made: added
`

// complete is a changelog that names what breaks.
const complete = "# Changelog\n\n## Unreleased\n\n### Breaking\n\n" +
	"- `gone`,\n  `p.List.Add`: use `p.List.Put`: it takes a pointer.\n- `p.Feed`, `p/sub.T.F`, `--a-flag`: are strings.\n" +
	"- `internal/in.Hidden.Shared`: drop it.\n\n## v0.1.0 — 2026-01-31\n\n### Breaking\n\n- `old.Name`: is older.\n"

func TestChangesAreComparedWithTheChangelog(t *testing.T) {
	for name, c := range map[string]struct{ report, changelog, want string }{
		"complete":         {report, complete, ""},
		"breaking":         {report, strings.Replace(complete, "`p.Feed`, ", "", 1), "p.Feed: changed"},
		"behind the colon": {report, strings.Replace(complete, "`p.List.Add`:", "x`: `p.List.Add`", 1), "p.List.Add: changed"},
		"a patch release":  {report, strings.Replace(complete, "Unreleased", "v0.1.1 — 2026-02-01", 1), "v0.1.1 is a patch release"},
		"no section":       {report, "# Changelog\n", "no section for the tag v0.1.0"},
		"another form":     {"./p.Feed: removed\n", complete, "not of the form of apidiff"},
	} {
		breaking := map[string]string{}
		err := errors.Join(parse(breaking, "example.com/made", c.report), errors.Join(faults(breaking, "v0.1.0", c.changelog)...))
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got the error %v, want %q", name, err, c.want)
		}
	}
}
