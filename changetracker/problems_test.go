package changetracker

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strings"
	"testing"

	discovery "k8s.io/api/discovery/v1"
)

func TestValuesAreCutBetweenCharacters(t *testing.T) {
	for value, want := range map[string]string{
		"":                         "",
		strings.Repeat("a", 64):    strings.Repeat("a", 64),
		strings.Repeat("a", 65):    strings.Repeat("a", 64),
		strings.Repeat("語", 30):    strings.Repeat("語", 21), // 3 bytes each
		"a\xff\xfe" + "b":          "a?b",
		strings.Repeat("\xbf", 99): "?",
	} {
		if got := readable(value); got != want {
			t.Errorf("readable(%q) = %q, want %q", value, got, want)
		}
	}
}

// Reasons has each constant of the type.
func TestReasonsAreComplete(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "problems.go", nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	listed := Reasons()
	declared := 0
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || fmt.Sprint(spec.Type) != "Reason" {
			return true
		}
		declared++
		text, ok := spec.Values[0].(*ast.BasicLit)
		if !ok || !slices.Contains(listed, Reason(strings.Trim(text.Value, `"`))) {
			t.Errorf("Reasons lacks %s", spec.Names[0])
		}
		return true
	})
	if declared != len(listed) {
		t.Errorf("%d constants are declared, and Reasons has %d", declared, len(listed))
	}
}

func TestTableOfHintsIsBounded(t *testing.T) {
	tracker := mustTracker(t)
	s := webSlice("a")
	for i := range maxInterned + 1 {
		s.Endpoints = append(s.Endpoints, at(fmt.Sprintf("10.0.%d.%d", i/250, i%250+1), func(e *discovery.Endpoint) {
			e.Hints = &discovery.EndpointHints{ForNodes: []discovery.ForNode{{Name: fmt.Sprintf("n%d", i)}}}
		}))
	}
	tracker.Endpoints.EndpointSliceUpdate(s, false)
	if got := len(tracker.store.parser.interned); got > maxInterned {
		t.Errorf("hints held = %d, want at most %d", got, maxInterned)
	}
}
