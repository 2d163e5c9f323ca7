package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// recorded is what apidiff says of testdata/old and testdata/new.
const recorded = "testdata/report.txt"

func TestEveryLineOfApidiffIsUnderstood(t *testing.T) {
	text, err := os.ReadFile(recorded)
	if err != nil {
		t.Fatal(err)
	}
	public, err := findAliases("testdata/new", "example.com/made")
	if err != nil {
		t.Fatal(err)
	}
	changes, err := parseReport("example.com/made", string(text))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range changes {
		c, ok := public.publish(c)
		if !ok {
			continue
		}
		kind := map[bool]string{true: "breaking", false: "fresh"}[c.breaking]
		got = append(got, strings.Join([]string{kind, c.pkg, c.name, c.what}, " | "))
	}
	want := []string{ // without examples/x and what is internal
		"breaking | gone | gone | removed",
		"breaking | internal/in | internal/in.Hidden.Shared | method set of *Outer removed",
		"breaking | p | p.Alias.Shared | removed",
		"breaking | p | p.Kept.Status | removed",
		"breaking | p | p.List.Add | changed from func(K, V) to func(K, *V)",
		"breaking | p | p.List.Len | removed",
		"breaking | p | p.Config.Name | changed from string to []byte",
		"breaking | p | p.Config.Size | removed",
		"breaking | p | p.Config | old is comparable, new is not",
		"breaking | p | p.Engine.Resync | added",
		"breaking | p | p.Feed | element type changed from int to string",
		"breaking | p | p.Fn | changed from func() to int",
		"breaking | p | p.Impl | no longer implements ./p.Engine",
		"breaking | p | p.Kept.Value | removed",
		"breaking | p | p.Limit | value changed from 1 to 2",
		"breaking | p | p.Loose | changed from struct{A int} to struct{A int; B int}",
		"breaking | p | p.Open | changed from func(string) error to func(string, ...int) error",
		"breaking | p | p.Outer.Name | changed from string to []byte",
		"breaking | p | p.Outer.Size | removed",
		"breaking | p | p.Outer | old is comparable, new is not",
		"breaking | p | p.hidden.X | removed",
		"breaking | p/sub | p/sub.T.F | changed from int to string",
		"fresh | p | p.Config.Room | added",
		"fresh | p | p.Fresh | added",
		"fresh | p | p.Kept.Extra | added",
		"fresh | p | p.Outer.Room | added",
		"fresh | p | p.Swap | changed from func to var",
		"fresh | p | p.hidden.Y | added",
		"fresh | come | come | added",
	}
	for _, line := range want {
		if !slices.Contains(got, line) {
			t.Errorf("no change %q", line)
		}
	}
	for _, line := range got {
		if !slices.Contains(want, line) {
			t.Errorf("change %q, want none", line)
		}
	}
}

func TestOddReports(t *testing.T) {
	aside := "! second, different message for obj x, isNew true, part \"\"\n  first:  a\n  second: b\n"
	for name, test := range map[string]struct {
		report, want, wantErr string
	}{
		"empty":                   {"", "", ""},
		"in the root":             {"Compatible changes:\n- (*T).M: added\n", "made.T.M", ""},
		"the root itself":         {"Incompatible changes:\n- package example.com/made: removed\n", "made", ""},
		"another module":          {"Incompatible changes:\n- k8s.io/api/core/v1.Service.Spec: removed\n", "k8s.io/api/core/v1.Service.Spec", ""},
		"the standard library":    {"Incompatible changes:\n- time.Time.Foo: removed\n", "time.Time.Foo", ""},
		"nested type parameters":  {"Incompatible changes:\n- ./p.(*T[map[K]V, X]).M: removed\n", "p.T.M", ""},
		"examples are no API":     {"Incompatible changes:\n- package example.com/made/examples/x: removed\n", "", ""},
		"documents are no API":    {"Compatible changes:\n- package example.com/made/docs: added\n", "", ""},
		"apidiff talks":           {aside + "Compatible changes:\n- ./p.T: added\n", "p.T", ""},
		"before a heading":        {"- ./p.T: added\n", "", "not the form"},
		"a heading that is new":   {"Perhaps incompatible changes:\n- ./p.T: added\n", "", "not the form"},
		"a line without a colon":  {"Compatible changes:\n- ./p.T added\n", "", "no colon"},
		"a name without a period": {"Compatible changes:\n- ./p: added\n", "", "no package"},
	} {
		t.Run(name, func(t *testing.T) {
			changes, err := parseReport("example.com/made", test.report)
			var got string
			for _, c := range changes {
				got += c.name
			}
			if got != test.want {
				t.Errorf("name is %q, want %q", got, test.want)
			}
			if said := errText(err); (said == "") != (test.wantErr == "") || !strings.Contains(said, test.wantErr) {
				t.Errorf("error is %q, want one with %q", said, test.wantErr)
			}
		})
	}
}

func TestAChangeNamesItsSystemsUnlessItIsOnAll(t *testing.T) {
	write := func(text string) string {
		file := filepath.Join(t.TempDir(), "report")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	everywhere := "Incompatible changes:\n- ./p.A: removed\n"
	changes, err := readReports("example.com/made", nil, map[string]string{
		"linux": write(everywhere), "darwin": write(everywhere + "- ./p.B: removed\n"), "windows": write(everywhere + "- ./p.B: removed\n- ./p.B: removed\n"),
	})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for i := range changes {
		got = append(got, changes[i].String())
	}
	if want := []string{"p.A: removed", "p.B: removed (darwin, windows)"}; !slices.Equal(got, want) {
		t.Errorf("changes are %q, want %q", got, want)
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
