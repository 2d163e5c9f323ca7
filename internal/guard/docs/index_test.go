package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// index knows the exported names of our packages, on all systems, and the tests.
type index struct {
	packages map[string]map[string]*declaration // by package, and by name
	tests    map[string][]string                // functions of _test.go files, by folder
}

// declaration is an exported name of a package.
type declaration struct {
	members  map[string]string // fields with their types as "pkg.Name", and methods
	embedded []string          // types whose members are ours
}

func newIndex(t *testing.T) *index {
	t.Helper()
	x := &index{packages: map[string]map[string]*declaration{}, tests: map[string][]string{}}
	function := regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz|Example)\w*)\(`)
	for _, file := range files(t) {
		if filepath.Ext(file) != ".go" || strings.Contains(file, "testdata/") {
			continue
		}
		text := read(t, file)
		if strings.HasSuffix(file, "_test.go") {
			for _, m := range function.FindAllStringSubmatch(text, -1) {
				x.tests[path.Dir(file)] = append(x.tests[path.Dir(file)], m[1])
			}
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, text, 0)
		if err != nil {
			t.Fatal(err)
		}
		if parsed.Name.Name != "main" {
			x.add(parsed)
		}
	}
	return x
}

func (x *index) add(file *ast.File) {
	pkg := file.Name.Name
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil {
				x.declaration(pkg, d.Name.Name)
				continue
			}
			_, name := typeName(pkg, d.Recv.List[0].Type)
			x.declaration(pkg, name).members[d.Name.Name] = ""
		case *ast.GenDecl:
			for _, s := range d.Specs {
				x.addSpec(pkg, s)
			}
		}
	}
}

func (x *index) addSpec(pkg string, s ast.Spec) {
	switch s := s.(type) {
	case *ast.ValueSpec:
		for _, name := range s.Names {
			x.declaration(pkg, name.Name)
		}
	case *ast.TypeSpec:
		d := x.declaration(pkg, s.Name.Name)
		switch kind := s.Type.(type) {
		case *ast.StructType:
			d.addFields(pkg, kind.Fields)
		case *ast.InterfaceType:
			d.addFields(pkg, kind.Methods)
		default: // perhaps of another type, whose members it has if it is an alias
			if p, name := typeName(pkg, kind); s.Assign.IsValid() && name != "" {
				d.embedded = append(d.embedded, p+"."+name)
			}
		}
	}
}

func (d *declaration) addFields(pkg string, fields *ast.FieldList) {
	for _, f := range fields.List {
		p, kind := typeName(pkg, f.Type)
		for _, name := range f.Names {
			d.members[name.Name] = p + "." + kind
		}
		if len(f.Names) == 0 && kind != "" {
			d.members[kind] = p + "." + kind
			d.embedded = append(d.embedded, p+"."+kind)
		}
	}
}

func (x *index) declaration(pkg, name string) *declaration {
	if x.packages[pkg] == nil {
		x.packages[pkg] = map[string]*declaration{}
	}
	if x.packages[pkg][name] == nil {
		x.packages[pkg][name] = &declaration{members: map[string]string{}}
	}
	return x.packages[pkg][name]
}

// typeName is the name of a type, without what it points to or takes.
func typeName(pkg string, e ast.Expr) (of, name string) {
	switch e := e.(type) {
	case *ast.Ident:
		return pkg, e.Name
	case *ast.StarExpr:
		return typeName(pkg, e.X)
	case *ast.IndexExpr:
		return typeName(pkg, e.X)
	case *ast.IndexListExpr:
		return typeName(pkg, e.X)
	case *ast.SelectorExpr:
		if p, ok := e.X.(*ast.Ident); ok {
			return p.Name, e.Sel.Name
		}
	}
	return "", ""
}

// has says whether a type has members that are members of each other. The last one
// may end with an ellipsis.
func (x *index) has(pkg, name string, members ...string) bool {
	d := x.packages[pkg][name]
	if d == nil {
		return false
	}
	for m, kind := range d.members {
		if !matches(m, members[0]) {
			continue
		}
		if p, n, _ := strings.Cut(kind, "."); len(members) == 1 || x.has(p, n, members[1:]...) {
			return true
		}
	}
	return slices.ContainsFunc(d.embedded, func(e string) bool {
		p, n, _ := strings.Cut(e, ".")
		return x.has(p, n, members...)
	})
}

// hasName says whether a package has a name.
func (x *index) hasName(pkg, name string) bool {
	for n := range x.packages[pkg] {
		if matches(n, name) {
			return true
		}
	}
	return false
}

// matches says whether a name is the one that is wanted, or begins with it if that
// ends with an ellipsis.
func matches(name, wanted string) bool {
	begin, open := strings.CutSuffix(wanted, "…")
	return name == begin || open && strings.HasPrefix(name, begin)
}
