package changetracker

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
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

// TestProblemsOfAnObjectAreBounded: each is a line of the log, and a Service of 1 MB could have a hundred thousand.
func TestProblemsOfAnObjectAreBounded(t *testing.T) {
	const wrong = 5000
	tracker := mustTracker(t)
	service := webService(func(s *v1.Service) {
		for i := range wrong {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprint("wrong-", i))
		}
	})
	tracker.Services.Update(nil, service)
	more := Problem{Object: "Service default/web", Field: "more values", Value: strconv.Itoa(wrong - maxProblems), Reason: ReasonTooMany}
	if got := tracker.Problems(); len(got) != maxProblems+1 || !slices.Contains(got, more) {
		t.Errorf("%d problems, want %d and %v", len(got), maxProblems, more)
	}
	if got := tracker.ProblemCounts(); got[ReasonInvalidAddress] != maxProblems || got[ReasonTooMany] != 1 {
		t.Errorf("%v, want %d and one more", got, maxProblems)
	}
	tracker.Services.Update(service, webService())
	if got := tracker.Problems(); len(got) != 0 {
		t.Errorf("%v, want none when the Service is right", got)
	}
}
