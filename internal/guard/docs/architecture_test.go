package docs

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
)

const (
	architecture = "docs/ARCHITECTURE.md"
	module       = "github.com/serviceplane/serviceplane/"
)

// pkg is a package of ours, as the go command sees it on Linux.
type pkg struct {
	ImportPath             string
	GoFiles, Imports, Deps []string
}

func packages(t *testing.T) map[string]pkg {
	t.Helper()
	command := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,GoFiles,Imports,Deps", "./...")
	command.Dir = root
	command.Env = append(command.Environ(), "GOOS=linux")
	out, err := command.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	all := map[string]pkg{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		if len(p.GoFiles) > 0 { // or it has tests only
			all[strings.TrimPrefix(p.ImportPath, module)] = p
		}
	}
}

// heavy are what an embedder may not want, by the words of the document.
func heavy() map[string][]string {
	return map[string][]string{
		"client-go":     {"k8s.io/client-go"},
		"Prometheus":    {"github.com/prometheus"},
		"OpenTelemetry": {"go.opentelemetry.io"},
		"netlink":       {"github.com/vishvananda/netlink", "github.com/mdlayher/netlink", "github.com/google/nftables", "github.com/moby/ipvs"},
	}
}

// imports are what the table says of a package: the packages of ours that it imports,
// but for internal ones, and what is heavy among all that it brings.
func (p *pkg) imports() []string {
	var all []string
	for _, i := range p.Imports {
		if name, ours := strings.CutPrefix(i, module); ours && !strings.HasPrefix(name, "internal/") {
			all = append(all, name)
		}
	}
	for word, paths := range heavy() {
		for _, heavy := range paths {
			if slices.ContainsFunc(p.Deps, func(dep string) bool { return dep == heavy || strings.HasPrefix(dep, heavy+"/") }) {
				all = append(all, word)
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// words are what a cell names, with or without backquotes.
func words(cell string) []string {
	all := strings.FieldsFunc(strings.ReplaceAll(cell, "`", ""), func(r rune) bool { return r == ',' || r == ' ' })
	slices.Sort(all)
	return all
}

// TestTheTableOfPackagesIsComplete, with what each imports. A row of a folder stands
// for what is below it.
func TestTheTableOfPackagesIsComplete(t *testing.T) {
	all := packages(t)
	said := map[string]bool{}
	for _, cells := range find(t, architecture).table(t, "Packages") {
		name := texts(cells[0])[0]
		said[strings.TrimSuffix(name, "/")] = true
		p, exists := all[name]
		switch {
		case strings.HasSuffix(name, "/"):
		case !exists:
			t.Errorf("%s is in the table, and no package", name)
		case !slices.Equal(words(cells[2]), p.imports()):
			t.Errorf("%s: the table says %q, want %q", name, words(cells[2]), p.imports())
		}
	}
	for name := range all {
		folder := name
		for folder != "." && !said[folder] {
			folder = path.Dir(folder)
		}
		if folder == "." {
			t.Errorf("%s is not in the table", name)
		}
	}
}

// TestTheLightPackagesAreNamed: all that bring nothing heavy, and no others.
func TestTheLightPackagesAreNamed(t *testing.T) {
	var want []string
	for name, p := range packages(t) {
		light := !slices.ContainsFunc(p.imports(), func(word string) bool { return heavy()[word] != nil })
		if light && !strings.Contains(name, "/") {
			want = append(want, name)
		}
	}
	slices.Sort(want)
	for _, l := range find(t, architecture).lines {
		if text, isList := strings.CutPrefix(l.text, "Light packages: "); isList {
			if got := words(strings.TrimRight(text, ".")); !slices.Equal(got, want) {
				t.Errorf("%s:%d: %q, want %q", architecture, l.number, got, want)
			}
			return
		}
	}
	t.Errorf("%s names no light packages, want %q", architecture, want)
}
