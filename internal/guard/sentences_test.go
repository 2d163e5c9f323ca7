package guard

import (
	"cmp"
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"regexp"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/guard/documents"
)

var (
	comment  = regexp.MustCompile(`(?m)(?:^\s*//.*\n)+|\s// .*$`)                           // read-only
	slashes  = regexp.MustCompile(`(?m)^\s*// ?`)                                           // read-only
	sentence = regexp.MustCompile("[.!?]\\s+(?:[A-Z`*\\[])|\n\n|\\||\n +- ")                // read-only
	pointer  = regexp.MustCompile(`(?i)\b(?:(?:that|those) (?:of|in|that)|whose|theirs)\b`) // read-only
)

// What may follow the name that a doc comment begins with, and what may not: no sentence has it after its subject.
var (
	another   = regexp.MustCompile(`^(?:,| and) (\w+)`)                                                // read-only
	condition = regexp.MustCompile(`^, (?:if|unless) [^,.:;]+,`)                                       // read-only
	clause    = regexp.MustCompile(`^(?:\s+(?:` + adverbs + `)\b)*(?:,|\s+(?:` + connectives + `)\b)`) // read-only
)

const (
	adverbs     = "again|alone|also|even|exactly|once|only"
	connectives = "about|after|against|although|among|and|as|at|because|before|behind|below|beside|between|but|by|during|except|" +
		"for|from|how|however|if|in|instead|into|like|nor|of|on|or|over|per|since|so|than|that|through|to|under|unless|until|" +
		"what|whatever|when|whenever|where|wherever|whether|which|whichever|while|who|whoever|whose|why|with|within|without"
)

// TestASentenceRepeatsTheNoun: a sentence of a comment or a document may point back to a noun once, as the words of
// pointer do. Where it would do so twice, it says the noun again.
func TestASentenceRepeatsTheNoun(t *testing.T) {
	t.Parallel()
	check := func(name, text string) {
		for _, one := range sentence.Split(text, -1) {
			if found := pointer.FindAllString(one, -1); len(found) > 1 {
				t.Errorf("%s points back by %q, want the noun in: %s", name, found, strings.Join(strings.Fields(one), " "))
			}
		}
	}
	for name, text := range documents.Read(t, root, ".go") {
		if !strings.Contains(path.Base(name), "_bpfe") {
			for _, one := range comment.FindAllString(text, -1) {
				check(name, slashes.ReplaceAllString(one, ""))
			}
		}
	}
	for name, text := range documents.Read(t, root, ".md") {
		check(name, fenced.ReplaceAllString(text, ""))
	}
}

// TestADocCommentIsASentence: a doc comment that begins with the declared name goes on with a verb, or with a colon and
// a sentence. Other names may join the first one, and a condition between commas may come before the verb.
func TestADocCommentIsASentence(t *testing.T) {
	t.Parallel()
	for name, text := range documents.Read(t, root, ".go") {
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, name, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		docs, declared := docComments(file), map[string]bool{}
		for id := range docs {
			declared[id.Name] = true
		}
		for id, doc := range docs {
			rest, begins := strings.CutPrefix(doc.Text(), id.Name)
			for m := another.FindStringSubmatch(rest); m != nil && declared[m[1]]; m = another.FindStringSubmatch(rest) {
				rest = rest[len(m[0]):]
			}
			if found := clause.FindString(condition.ReplaceAllString(rest, "")); begins && found != "" {
				t.Errorf("%v: %q cannot follow the subject %s: make the comment a sentence of its own", files.Position(doc.Pos()), strings.TrimSpace(found), id)
			}
		}
	}
}

// docComments returns the doc comments of a file by the names that they are for.
func docComments(file *ast.File) map[*ast.Ident]*ast.CommentGroup {
	docs := map[*ast.Ident]*ast.CommentGroup{}
	ast.Inspect(file, func(n ast.Node) bool {
		switch d := n.(type) {
		case *ast.FuncDecl:
			docs[d.Name] = d.Doc
		case *ast.Field:
			for _, name := range d.Names {
				docs[name] = d.Doc
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch s := spec.(type) {
				case *ast.TypeSpec:
					docs[s.Name] = cmp.Or(s.Doc, d.Doc)
				case *ast.ValueSpec:
					for _, name := range s.Names {
						docs[name] = cmp.Or(s.Doc, d.Doc)
					}
				}
			}
		}
		return true
	})
	return docs
}
