package guard

import (
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/guard/documents"
)

const root = "../.."

var (
	fenced      = regexp.MustCompile("(?ms)^ *```([a-z]*)\n(.*?)^ *```$")      // read-only
	codeSpan    = regexp.MustCompile("`[^`\n]+`")                              // read-only
	link        = regexp.MustCompile(`\]\(([^)\s#]*)#?([^)\s]*)\)`)            // read-only
	heading     = regexp.MustCompile(`(?m)^#+ (.*)$`)                          // read-only
	notInASlug  = regexp.MustCompile(`\]\([^)]*\)|[^\p{L}\p{M}\p{N}\p{Pc} -]`) // read-only
	indentation = regexp.MustCompile(`(?m)^[\t ]+`)                            // read-only
)

// TestLinks: links between documents lead to a file, and to a title where they have an
// anchor. A link leads to every document.
func TestLinks(t *testing.T) {
	t.Parallel()
	texts, linked := documents.Read(t, root, ".md"), map[string]bool{"README.md": true}
	for name, text := range texts {
		for _, m := range link.FindAllStringSubmatch(codeSpan.ReplaceAllString(fenced.ReplaceAllString(text, ""), "x"), -1) {
			target := name
			if m[1] != "" {
				target = path.Join(path.Dir(name), m[1])
			}
			info, err := os.Stat(path.Join(root, target))
			switch {
			case strings.HasPrefix(m[1], "https://"):
				continue
			case err != nil:
				t.Errorf("%s links to %s: %v", name, m[1], err)
				continue
			case info.IsDir():
				target = path.Join(target, "README.md")
			}
			linked[target] = true
			if m[2] != "" && !slices.Contains(slugs(texts[target]), m[2]) {
				t.Errorf("%s links to #%s, which is no title of %s", name, m[2], target)
			}
		}
	}
	for name := range texts {
		if !linked[name] {
			t.Errorf("no document links to %s", name)
		}
	}
}

// slugs are the anchors that GitHub gives to the titles of a document.
func slugs(text string) (all []string) {
	for _, m := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
		all = append(all, strings.ReplaceAll(notInASlug.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
	}
	return all
}

// unindent removes the indentation, which documents have less of.
func unindent(code string) string { return indentation.ReplaceAllString("\n"+code, "") }

// TestGoSnippets: the lines of Go in a document are lines of a file that is compiled.
// "// …" stands for lines left out.
func TestGoSnippets(t *testing.T) {
	t.Parallel()
	var code strings.Builder
	for _, text := range documents.Read(t, root, ".go") {
		code.WriteString(unindent(text))
	}
	for name, text := range documents.Read(t, root, ".md") {
		for _, block := range fenced.FindAllStringSubmatch(text, -1) {
			for piece := range strings.SplitSeq(unindent(block[2]), "\n// …\n") {
				if block[1] == "go" && !strings.Contains(code.String(), strings.Trim(piece, "\n")) {
					t.Errorf("%s: no Go file has these lines:\n%s", name, piece)
				}
			}
		}
	}
}

// Commands of tests, and flags with which go test still answers from its cache: see "go help test".
var (
	testCommand = regexp.MustCompile("go test [^`#&;\n]*")                            // read-only
	testFlag    = regexp.MustCompile(`\s--?([a-z.]+)`)                                // read-only
	cachedFlags = regexp.MustCompile(`^(v|run|skip|timeout|short|race|tags|exec|p)$`) // read-only
)

// TestCommandsRunTheTests: a command that a document gives runs the tests. From the cache of go test it would print
// the seeds of the time before, and what another kernel did.
func TestCommandsRunTheTests(t *testing.T) {
	t.Parallel()
	for name, text := range documents.Read(t, root, ".md") {
		for _, command := range testCommand.FindAllString(text, -1) {
			flags := testFlag.FindAllStringSubmatch(command, -1)
			if !slices.ContainsFunc(flags, func(m []string) bool { return !cachedFlags.MatchString(m[1]) }) {
				t.Errorf("%s: the cache may answer %q, want -count=1 in it", name, command)
			}
		}
	}
}
