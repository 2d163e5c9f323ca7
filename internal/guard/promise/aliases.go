package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"path/filepath"
	"strconv"
	"strings"
)

// aliases are the public names of internal types, which apidiff does not look
// behind: internal/netns.Flow is proxiertest.Flow.
type aliases map[string]string

// findAliases reads the public packages below a directory, for all systems.
func findAliases(root, module string) (aliases, error) {
	found := aliases{}
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if name != root && isPrivate(entry.Name()) {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		directory, err := filepath.Rel(root, filepath.Dir(name))
		if err != nil {
			return err
		}
		return found.read(name, filepath.ToSlash(directory), module)
	})
	if err != nil {
		return nil, fmt.Errorf("find aliases: %w", err)
	}
	return found, nil
}

// isPrivate says what of a module no program can import.
func isPrivate(directory string) bool {
	switch directory {
	case "internal", "testdata", "examples", "hack":
		return true
	default:
		return strings.HasPrefix(directory, ".") || strings.HasPrefix(directory, "_")
	}
}

// read adds the aliases of one file of a package.
func (a aliases) read(file, pkg, module string) error {
	syntax, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	internal := map[string]string{} // by the name that the file has for it
	for _, spec := range syntax.Imports {
		imported, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return err
		}
		local := path.Base(imported)
		if spec.Name != nil {
			local = spec.Name.Name
		}
		if inside, ok := strings.CutPrefix(imported, module+"/"); ok && isInternal(inside) {
			internal[local] = inside
		}
	}
	ast.Inspect(syntax, func(n ast.Node) bool {
		declared, ok := n.(*ast.TypeSpec)
		if !ok || !declared.Assign.IsValid() || !declared.Name.IsExported() {
			return true
		}
		if original, ok := declared.Type.(*ast.SelectorExpr); ok {
			if local, ok := original.X.(*ast.Ident); ok && internal[local.Name] != "" {
				a[internal[local.Name]+"."+original.Sel.Name] = pkg + "." + declared.Name.Name
			}
		}
		return true
	})
	return nil
}

// publish returns a change under its public name, or false if it has none.
func (a aliases) publish(c change) (change, bool) {
	for original, alias := range a {
		rest, ok := strings.CutPrefix(c.name, original)
		if ok && (rest == "" || rest[0] == '.') {
			c.name = alias + rest
			c.pkg, _, _ = strings.Cut(path.Base(alias), ".")
			c.pkg = path.Join(path.Dir(alias), c.pkg)
			return c, true
		}
	}
	// A public type may embed an internal one, and so have its methods.
	return c, !isInternal(c.pkg) || strings.HasPrefix(c.what, methodSet)
}

// isInternal reports whether a package of the module cannot be imported by others.
func isInternal(pkg string) bool { return strings.Contains("/"+pkg+"/", "/internal/") }
