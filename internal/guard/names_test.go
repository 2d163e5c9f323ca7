package guard

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/guard/documents"
)

// shared are the exported names that several packages may have, because they mean the same in each.
var shared = map[string]string{ // read-only
	"New": "makes what the package is for", "NewEngine": "makes an engine for a Provider of one's own", "Run": "does it until the context ends",
	"Config": "configures a Provider, or its engine", "Options": "configure what New makes", "Engine": "an engine, or the interface of all",
	"Handler": "makes a http.Handler", "Observer": "gets reports", "Proxy": "what a package needs of a *proxier.Proxier",
	"Node": "a node of Kubernetes", "Service": "a Service, or makes one for a test", "Endpoint": "an endpoint, or makes one for a test",
	"LoadBalancer": "load balancer IPs, or gives them to a Service of a test", "NodePort": "a node port, or gives one to a Service of a test",
}

// TestNamesMeanOneThing: an exported name belongs to one package, or means the same in each.
func TestNamesMeanOneThing(t *testing.T) {
	t.Parallel()
	packages := map[string]map[string]bool{} // by name
	for name, text := range documents.Read(t, root, ".go") {
		folder := path.Dir(name)
		if strings.HasSuffix(name, "_test.go") || unshown.MatchString(folder) {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, declared := range declaredNames(file) {
			if packages[declared] == nil {
				packages[declared] = map[string]bool{}
			}
			packages[declared][folder] = true
		}
	}
	for name, folders := range packages {
		if len(folders) > 1 && shared[name] == "" {
			t.Errorf("packages %v have the exported name %s: choose one that says more, or add its one meaning to the list", slices.Sorted(maps.Keys(folders)), name)
		}
	}
	for name := range shared {
		if len(packages[name]) < 2 {
			t.Errorf("%s is in fewer than two packages: remove it from the list", name)
		}
	}
}

// declaredNames returns the exported names of a file's types, functions, constants and variables.
func declaredNames(file *ast.File) (names []string) {
	add := func(ids ...*ast.Ident) {
		for _, id := range ids {
			if id.IsExported() {
				names = append(names, id.Name)
			}
		}
	}
	for _, declaration := range file.Decls {
		switch d := declaration.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil {
				add(d.Name)
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch s := spec.(type) {
				case *ast.TypeSpec:
					add(s.Name)
				case *ast.ValueSpec:
					add(s.Names...)
				}
			}
		}
	}
	return names
}
