package docs

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// quickStart is where the README's code is an Example.
const quickStart = "nftables/example_linux_test.go"

// unindented are lines without their leading tabs, which documents have fewer of.
// There is an empty line before and after them.
func unindented(lines []string) string {
	var b strings.Builder
	b.WriteString("\n")
	for _, text := range lines {
		b.WriteString(strings.TrimLeft(text, "\t") + "\n")
	}
	return b.String()
}

// pieces cuts a snippet where it leaves something out.
func pieces(lines []string) [][]string {
	gap := regexp.MustCompile(`^\s*// …$`)
	all := [][]string{nil}
	for _, text := range lines {
		if gap.MatchString(text) {
			all = append(all, nil)
			continue
		}
		all[len(all)-1] = append(all[len(all)-1], text)
	}
	for i, piece := range all {
		all[i] = strings.Split(strings.Trim(strings.Join(piece, "\n"), "\n"), "\n")
	}
	return all
}

// sources are the Go files that are compiled, unindented.
func sources(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, file := range files(t) {
		if filepath.Ext(file) == ".go" && !strings.Contains(file, "testdata/") {
			all = append(all, unindented(strings.Split(read(t, file), "\n")))
		}
	}
	return all
}

// examples are the bodies of a file's Examples, unindented.
func examples(t *testing.T, file string) []string {
	t.Helper()
	text := read(t, file)
	set := token.NewFileSet()
	parsed, err := parser.ParseFile(set, file, text, 0)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, d := range parsed.Decls {
		f, ok := d.(*ast.FuncDecl)
		if ok && strings.HasPrefix(f.Name.Name, "Example") {
			body := text[set.Position(f.Body.Lbrace).Offset+1 : set.Position(f.Body.Rbrace).Offset]
			all = append(all, unindented(strings.Split(body, "\n")))
		}
	}
	return all
}

// TestSnippetsAreCodeThatCompiles: each piece is in a file of the build, line by
// line, and those of the README are in the Example of the quick start.
func TestSnippetsAreCodeThatCompiles(t *testing.T) {
	everywhere, quick := sources(t), examples(t, quickStart)
	for _, d := range documents(t) {
		from, where := everywhere, "any Go file"
		if d.path == "README.md" {
			from, where = quick, "an Example of "+quickStart
		}
		for _, b := range d.blocks {
			if b.language != "go" {
				continue
			}
			for _, piece := range pieces(b.lines) {
				want := unindented(piece)
				if !slices.ContainsFunc(from, func(source string) bool { return strings.Contains(source, want) }) {
					t.Errorf("%s:%d: these lines are not in %s:\n%s", d.path, b.line, where, strings.Join(piece, "\n"))
				}
			}
		}
	}
}

// TestDataIsWellFormed in blocks of YAML and JSON.
func TestDataIsWellFormed(t *testing.T) {
	for _, d := range documents(t) {
		for _, b := range d.blocks {
			text := []byte(strings.Join(b.lines, "\n"))
			var err error
			switch b.language {
			case "yaml":
				err = yaml.Unmarshal(text, new(yaml.Node))
			case "json":
				err = json.Unmarshal(text, new(any))
			}
			if err != nil {
				t.Errorf("%s:%d: %v", d.path, b.line, err)
			}
		}
	}
}
