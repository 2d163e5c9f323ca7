package guard

import (
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
