package guard

import (
	"fmt"
	"go/ast"
	"go/build"
	"go/doc"
	"go/parser"
	"go/token"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestPublicPackagesShowThemselves: the first screen of a package's documentation says
// what it is for, and has code that runs.
func TestPublicPackagesShowThemselves(t *testing.T) {
	public := publicPackages(t)
	if len(public) < 15 {
		t.Fatalf("there are %d public packages, want 15 at least", len(public))
	}
	for _, name := range public {
		for _, fault := range packageFaults(t, filepath.Join("../..", name)) {
			t.Errorf("%s: %s", name, fault)
		}
	}
}

// TestTheModuleShowsItself: its own page leads to every public package, and is nothing
// but a page.
func TestTheModuleShowsItself(t *testing.T) {
	p, err := build.Default.ImportDir("../..", 0)
	if err != nil {
		t.Fatalf("the module's folder is no package: %v", err)
	}
	if !slices.Equal(p.GoFiles, []string{"doc.go"}) || len(p.Imports) > 0 {
		t.Fatalf("the module's folder has the files %q with the imports %q, want doc.go alone", p.GoFiles, p.Imports)
	}
	page := parse(t, "../..", p.GoFiles)[0].Doc.Text()
	for _, name := range publicPackages(t) {
		if name != "." && name != "docs" && !regexp.MustCompile(`(?m)^ *- [^:]*\b`+name+`\b[^:]*:`).MatchString(page) {
			t.Errorf("the module's page does not say what %s is", name)
		}
	}
}

// publicPackages are the folders of the packages that others may import, the module's
// own among them as ".". Test packages are there too.
func publicPackages(t *testing.T) (folders []string) {
	t.Helper()
	for _, p := range list(t, "linux", module+"/...") {
		if !within(p.ImportPath, module+"/internal") && !within(p.ImportPath, module+"/examples") {
			folders = append(folders, path.Join(".", "./"+strings.TrimPrefix(p.ImportPath, module)))
		}
	}
	return folders
}

// packageFaults says what the documentation of a package lacks, as Linux sees it.
func packageFaults(t *testing.T, folder string) (faults []string) {
	t.Helper()
	system := build.Default
	system.GOOS = "linux"
	p, err := system.ImportDir(folder, 0)
	if err != nil {
		t.Fatal(err)
	}
	if len(p.GoFiles) == 0 {
		return nil // it has tests only: nobody can import it
	}
	comment := ""
	for _, file := range parse(t, folder, p.GoFiles) {
		comment += file.Doc.Text()
	}
	if want := "Package " + p.Name + " "; !strings.HasPrefix(comment, want) {
		faults = append(faults, fmt.Sprintf("its comment begins with %.20q, want %q", comment, want))
	}
	if got := len(regexp.MustCompile(`\.\s`).FindAllString(comment, -1)); got < 3 {
		faults = append(faults, fmt.Sprintf("its comment has %d sentences, want 3 at least: what it is, what it is for, where it works", got))
	}
	if !regexp.MustCompile(`\b(everywhere|Linux)\b`).MatchString(comment) {
		faults = append(faults, "its comment does not say where it works: everywhere, or on Linux")
	}
	examples := doc.Examples(parse(t, folder, slices.Concat(p.TestGoFiles, p.XTestGoFiles))...)
	if !slices.ContainsFunc(examples, func(e *doc.Example) bool { return e.Output != "" }) {
		faults = append(faults, fmt.Sprintf("it has %d Examples, want one with output", len(examples)))
	}
	return faults
}

// parse reads files of a folder.
func parse(t *testing.T, folder string, names []string) (files []*ast.File) {
	t.Helper()
	for _, name := range names {
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(folder, name), nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	return files
}
