package guard

import (
	"bytes"
	"context"
	"encoding"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/debughttp"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/userspace"
	"github.com/serviceplane/serviceplane/userspace/connection"
)

// enums are the exported enumerations that have a String, by "package.Type".
func enums() map[string]func(uint8) fmt.Stringer {
	return map[string]func(uint8) fmt.Stringer{
		"desired.Protocol":             func(v uint8) fmt.Stringer { return desired.Protocol(v) },
		"desired.Kind":                 func(v uint8) fmt.Stringer { return desired.Kind(v) },
		"desired.Scope":                func(v uint8) fmt.Stringer { return desired.Scope(v) },
		"desired.Action":               func(v uint8) fmt.Stringer { return desired.Action(v) },
		"desired.Masquerade":           func(v uint8) fmt.Stringer { return desired.Masquerade(v) },
		"desired.Verdict":              func(v uint8) fmt.Stringer { return desired.Verdict(v) },
		"desired.Origin":               func(v uint8) fmt.Stringer { return desired.Origin(v) },
		"userspace/connection.Outcome": func(v uint8) fmt.Stringer { return connection.Outcome(v) },
		"userspace.Role":               func(v uint8) fmt.Stringer { return userspace.Role(v) },
	}
}

// TestEveryValueOfAnEnumerationHasAName: docs/STABILITY.md promises new ones.
func TestEveryValueOfAnEnumerationHasAName(t *testing.T) {
	t.Parallel()
	for name, value := range enums() {
		seen := map[string]int{}
		for n := range 256 {
			v := value(uint8(n))
			text := v.String()
			if other, twice := seen[text]; twice || text == "" && n > 0 {
				t.Errorf("%s(%d) is called %q, as is %d", name, n, text, other)
			}
			seen[text] = n
			if m, ok := v.(encoding.TextMarshaler); ok {
				if got, err := m.MarshalText(); err != nil || string(got) != text {
					t.Errorf("%s(%d).MarshalText() = %q, %v; want %q", name, n, got, err, text)
				}
			}
			if _, err := json.Marshal(v); err != nil {
				t.Errorf("%s(%d) as JSON: %v", name, n, err)
			}
		}
	}
}

// TestEveryEnumerationIsKnown looks for those that enums does not have.
func TestEveryEnumerationIsKnown(t *testing.T) {
	t.Parallel()
	var found []string
	for _, folder := range publicPackages(t) {
		numbers, named := map[string]bool{}, map[string]bool{}
		files, err := filepath.Glob(filepath.Join("../..", folder, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			tree, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(tree, func(n ast.Node) bool { return noteEnum(n, numbers, named) })
		}
		for name := range numbers {
			if named[name] && ast.IsExported(name) {
				found = append(found, folder+"."+name)
			}
		}
	}
	slices.Sort(found)
	if want := slices.Sorted(maps.Keys(enums())); !slices.Equal(found, want) {
		t.Errorf("the enumerations with a String are %q, and enums has %q", found, want)
	}
}

// noteEnum notes types that are numbers, and those that have a String.
func noteEnum(n ast.Node, numbers, named map[string]bool) (deeper bool) {
	switch n := n.(type) {
	case *ast.TypeSpec:
		if kind, ok := n.Type.(*ast.Ident); ok && strings.Contains(kind.Name, "int") {
			numbers[n.Name.Name] = true
		}
	case *ast.FuncDecl:
		if n.Recv != nil && n.Name.Name == "String" {
			if receiver, ok := n.Recv.List[0].Type.(*ast.Ident); ok {
				named[receiver.Name] = true
			}
		}
		return false
	}
	return true
}

// unforeseen is a Source that explains packets in values of tomorrow.
type unforeseen uint8

func (unforeseen) Status() proxier.Status                      { return proxier.Status{} }
func (unforeseen) History() []proxier.SyncReport               { return nil }
func (unforeseen) Programmed(v1.IPFamily) *changetracker.State { return nil }
func (u unforeseen) frontend() desired.Frontend {
	return desired.Frontend{
		Kind: desired.Kind(u), Scope: desired.Scope(u), Action: desired.Action(u), Masquerade: desired.Masquerade(u),
		VIP: netip.MustParseAddr("10.96.0.1"), Port: 80,
	}
}

func (u unforeseen) Resolved(_ v1.IPFamily, name changetracker.ServicePortName) (*desired.Service, bool) {
	return &desired.Service{Name: name, Protocol: desired.TCP, Frontends: []desired.Frontend{u.frontend()}}, true
}

func (u unforeseen) Explain(_ context.Context, p desired.Packet) (desired.Explanation, error) {
	f := u.frontend()
	return desired.Explanation{
		Packet: p, Verdict: desired.Verdict(u), Scope: desired.Scope(u), Service: &changetracker.ServicePortName{}, Frontend: &f,
	}, nil
}

// TestThePageShowsValuesOfTomorrow.
func TestThePageShowsValuesOfTomorrow(t *testing.T) {
	t.Parallel()
	for _, n := range []uint8{0, 1, 9, 255} {
		handler := debughttp.Handler(unforeseen(n))
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET",
			"http://localhost/explain?protocol=TCP&origin=outside&source=192.0.2.1&destination=10.96.0.1:80", nil))
		if !json.Valid(w.Body.Bytes()) || w.Code != 200 || n > 4 && !bytes.Contains(w.Body.Bytes(), fmt.Appendf(nil, "unknown_%d", n)) {
			t.Errorf("%d: status %d, %s", n, w.Code, w.Body)
		}
	}
}
