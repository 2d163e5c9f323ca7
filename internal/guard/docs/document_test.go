package docs

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// root is the folder of the repository, as the tests of this package see it.
const root = "../../.."

// document is a Markdown file of the repository.
type document struct {
	path   string // from the root
	titles []heading
	lines  []line // what is not in blocks
	blocks []block
}

// heading is a line with a title.
type heading struct {
	line        int
	depth       int
	title, slug string // slug is what a link has after "#"
}

// line is one of the text.
type line struct {
	number int
	text   string
}

// block is what is between two fences.
type block struct {
	line     int // of the first fence
	language string
	lines    []string
}

// span is a piece of text in backquotes.
type span struct {
	line int
	text string
}

// files are those that git has or would take, from the root and sorted; in a copy that
// git knows nothing of, all that there are.
func files(t *testing.T) []string {
	t.Helper()
	if _, err := os.Stat(filepath.Join(root, ".git")); err != nil {
		return filesOfACopy(t)
	}
	command := exec.CommandContext(t.Context(), "git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	command.Dir = root
	out, err := command.Output()
	if err != nil {
		t.Fatalf("list files: %v", err)
	}
	all := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
	slices.Sort(all)
	return slices.DeleteFunc(slices.Compact(all), func(path string) bool {
		_, err := os.Stat(filepath.Join(root, path))
		return err != nil // deleted, and not committed yet
	})
}

func filesOfACopy(t *testing.T) (all []string) {
	t.Helper()
	err := fs.WalkDir(os.DirFS(root), ".", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			all = append(all, path)
		}
		return err
	})
	if err != nil {
		t.Fatalf("list files: %v", err)
	}
	return all
}

// documents are all Markdown files. Of the changelog only what is not released
// counts: the rest tells of its own time.
func documents(t *testing.T) []*document {
	t.Helper()
	var all []*document
	for _, path := range files(t) {
		if filepath.Ext(path) == ".md" && !strings.Contains(path, "testdata/") {
			all = append(all, parse(path, read(t, path)))
		}
	}
	return all
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// find returns the document of a path.
func find(t *testing.T, path string) *document {
	t.Helper()
	for _, d := range documents(t) {
		if d.path == path {
			return d
		}
	}
	t.Fatalf("there is no %s", path)
	return nil
}

func parse(path, text string) *document {
	d := &document{path: path}
	slugs := map[string]int{}
	released := func() bool {
		parts := slices.DeleteFunc(slices.Clone(d.titles), func(h heading) bool { return h.depth != 2 })
		return path == "CHANGELOG.md" && len(parts) > 1
	}
	inBlock := false
	for i, text := range strings.Split(text, "\n") {
		fence, isFence := strings.CutPrefix(strings.TrimLeft(text, " "), "```")
		title := strings.TrimLeft(text, "#")
		switch {
		case isFence && !inBlock:
			inBlock = true
			d.blocks = append(d.blocks, block{line: i + 1, language: fence})
		case isFence:
			inBlock = false
		case inBlock:
			last := &d.blocks[len(d.blocks)-1]
			last.lines = append(last.lines, text)
		case strings.HasPrefix(text, "#") && strings.HasPrefix(title, " "):
			h := heading{line: i + 1, depth: len(text) - len(title), title: strings.TrimSpace(title)}
			h.slug = slug(h.title, slugs)
			d.titles = append(d.titles, h)
			d.lines = append(d.lines, line{i + 1, text})
		default:
			d.lines = append(d.lines, line{i + 1, text})
		}
		if released() {
			return d
		}
	}
	return d
}

// slug is the anchor that GitHub gives to a title: letters, digits, hyphens and
// underlines in lower case, with hyphens for spaces, and a number if there was the
// same before.
func slug(title string, before map[string]int) string {
	kept := regexp.MustCompile(`[^\p{L}\p{M}\p{N}\p{Pc} -]`).ReplaceAllString(strings.ToLower(linkPattern().ReplaceAllString(title, "$1")), "")
	s := strings.ReplaceAll(kept, " ", "-")
	count := before[s]
	before[s]++
	if count > 0 {
		return s + "-" + string(rune('0'+count))
	}
	return s
}

func spanPattern() *regexp.Regexp { return regexp.MustCompile("`([^`]+)`") }

// spans are the pieces in backquotes.
func (d *document) spans() []span {
	var all []span
	for _, l := range d.lines {
		for _, m := range spanPattern().FindAllStringSubmatch(l.text, -1) {
			all = append(all, span{l.number, m[1]})
		}
	}
	return all
}

// texts are the spans of a piece of text.
func texts(text string) []string {
	var all []string
	for _, m := range spanPattern().FindAllStringSubmatch(text, -1) {
		all = append(all, m[1])
	}
	return all
}

// section returns the lines under the title that a line stands under.
func (d *document) section(number int) []line {
	first, last := 0, 1<<30
	for _, h := range d.titles {
		if h.line <= number {
			first = h.line
		} else {
			last = min(last, h.line)
		}
	}
	var lines []line
	for _, l := range d.lines {
		if l.number >= first && l.number < last {
			lines = append(lines, l)
		}
	}
	return lines
}

// table returns the rows of the first table under a title, without its head.
func (d *document) table(t *testing.T, title string) [][]string {
	t.Helper()
	i := slices.IndexFunc(d.titles, func(h heading) bool { return h.title == title })
	if i < 0 {
		t.Fatalf("%s has no title %q", d.path, title)
	}
	var rows [][]string
	for _, l := range d.section(d.titles[i].line) {
		if !strings.HasPrefix(l.text, "|") {
			if len(rows) > 0 {
				break
			}
			continue
		}
		var cells []string
		for cell := range strings.SplitSeq(strings.Trim(l.text, "|"), "|") {
			cells = append(cells, strings.TrimSpace(cell))
		}
		rows = append(rows, cells)
	}
	if len(rows) < 3 {
		t.Fatalf("%s has no table under %q", d.path, title)
	}
	return rows[2:]
}

// TestCodeSpansEndOnTheirLine, or the other tests would not see them.
func TestCodeSpansEndOnTheirLine(t *testing.T) {
	for _, d := range documents(t) {
		for _, l := range d.lines {
			if strings.Count(l.text, "`")%2 != 0 {
				t.Errorf("%s:%d: a code span goes on in the next line: %s", d.path, l.number, l.text)
			}
		}
	}
}

// TestBlocksSayWhatTheyAre: each language has its test, and what has none cannot
// hide what should be tested.
func TestBlocksSayWhatTheyAre(t *testing.T) {
	known := []string{"go", "sh", "yaml", "json", "text", ""}
	command := regexp.MustCompile(`^(\$ |# )?(sudo )?(go (run|test|build|get|install)|make|\./hack/\S+) `)
	for _, d := range documents(t) {
		for _, b := range d.blocks {
			if !slices.Contains(known, b.language) {
				t.Errorf("%s:%d: a block of %q, want one of %q", d.path, b.line, b.language, known)
			}
			for _, text := range b.lines {
				if (b.language == "" || b.language == "text") && command.MatchString(text) {
					t.Errorf("%s:%d: %q is a command, but this is no block of sh", d.path, b.line, text)
				}
			}
		}
	}
}
