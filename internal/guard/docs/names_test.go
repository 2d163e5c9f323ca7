package docs

import (
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// chain is a name with a package or a type in front of it. What follows a slash or
// another name is somebody else's: documents name what is not ours by its path.
func chain() *regexp.Regexp {
	return regexp.MustCompile(`(?:^|[^\w./…-])(\w+(?:\.[A-Z]\w*)+…?)`)
}

// check says what is wrong with a chain.
func (x *index) check(name string) string {
	parts := strings.Split(name, ".")
	first, rest := parts[0], parts[1:]
	if _, ours := x.packages[first]; ours {
		switch {
		case !x.hasName(first, rest[0]):
			return "package " + first + " has no " + rest[0]
		case len(rest) > 1 && !x.has(first, rest[0], rest[1:]...):
			return first + "." + rest[0] + " has no " + strings.Join(rest[1:], ".")
		}
		return ""
	}
	if strings.ToLower(first[:1]) == first[:1] {
		return "" // a variable, or somebody else's package
	}
	for pkg := range x.packages {
		if x.has(pkg, first, rest...) {
			return ""
		}
	}
	return "no type " + first + " of ours has " + strings.Join(rest, ".")
}

// drawings are the lines of blocks that are neither code nor data, as spans.
func (d *document) drawings() []span {
	var all []span
	for _, b := range d.blocks {
		if b.language == "" {
			for i, text := range b.lines {
				all = append(all, span{b.line + i + 1, text})
			}
		}
	}
	return all
}

// gone are the code spans about what is not there any more: before the colon of each
// item under "Breaking".
func (d *document) gone() map[span]bool {
	all := map[span]bool{}
	for _, h := range d.titles {
		if h.title != "Breaking" {
			continue
		}
		for _, l := range d.section(h.line) {
			names, _, _ := strings.Cut(l.text, "`: ")
			if names == l.text {
				continue
			}
			for _, m := range spanPattern().FindAllStringSubmatch(names+"`", -1) {
				all[span{l.number, m[1]}] = true
			}
		}
	}
	return all
}

// TestNamesOfGoExist where a code span, or a drawing, has one with its package or
// type.
func TestNamesOfGoExist(t *testing.T) {
	x := newIndex(t)
	for _, d := range documents(t) {
		gone := d.gone()
		for _, s := range append(d.spans(), d.drawings()...) {
			if gone[s] {
				continue
			}
			for _, m := range chain().FindAllStringSubmatch(s.text, -1) {
				if isFile(m[1]) {
					continue
				}
				if fault := x.check(m[1]); fault != "" {
					t.Errorf("%s:%d: `%s`: %s", d.path, s.line, s.text, fault)
				}
			}
		}
	}
}

// TestNamesOfTestsExist where a code span is one.
func TestNamesOfTestsExist(t *testing.T) {
	var all []string
	for _, names := range newIndex(t).tests {
		all = append(all, names...)
	}
	pattern := regexp.MustCompile(`^(Test|Benchmark|Fuzz|Example)[A-Z]\w*$`)
	for _, d := range documents(t) {
		for _, s := range d.spans() {
			if pattern.MatchString(s.text) && !slices.Contains(all, s.text) {
				t.Errorf("%s:%d: there is no function %s", d.path, s.line, s.text)
			}
		}
	}
}

func isFile(text string) bool {
	return slices.Contains([]string{".go", ".md", ".sh", ".yaml", ".json"}, filepath.Ext(text)) && !strings.Contains(text, " ")
}

// TestPathsExist where a code span is one: below a folder of ours, or the name of a
// file. A name alone is in a folder that the same section speaks of, and a star
// stands for something.
func TestPathsExist(t *testing.T) {
	s := newSite(t)
	for _, d := range documents(t) {
		for _, span := range d.spans() {
			name := strings.TrimPrefix(strings.TrimSuffix(span.text, "/"), "./")
			first, _, below := strings.Cut(name, "/")
			ours := below && s.folders[first]
			if strings.ContainsAny(name, " …$\"") || !isFile(name) && !ours {
				continue
			}
			places := []string{".", path.Dir(d.path)}
			if !below {
				places = append(places, d.folders(s, span.line)...)
			}
			if !slices.ContainsFunc(places, func(folder string) bool { return s.matches(path.Join(folder, name)) }) {
				t.Errorf("%s:%d: there is no `%s` in any of %q", d.path, span.line, span.text, places)
			}
		}
	}
}

func (s *site) matches(pattern string) bool {
	return s.has(pattern) || slices.ContainsFunc(s.files, func(file string) bool {
		matched, err := path.Match(pattern, file)
		return matched && err == nil
	})
}

// folders are those that the section of a line names, or files in them.
func (d *document) folders(s *site, number int) []string {
	var all []string
	for _, l := range d.section(number) {
		for _, text := range texts(l.text) {
			if s.folders[text] {
				all = append(all, text)
			} else if s.has(text) {
				all = append(all, path.Dir(text))
			}
		}
	}
	return all
}

// TestScenariosExist where a document names one by its number, PKT-10 or PKT-10, 12.
func TestScenariosExist(t *testing.T) {
	known := scenarios(t)
	for _, d := range documents(t) {
		for _, l := range d.lines {
			for _, id := range ids(l.text) {
				if !slices.Contains(known, id) {
					t.Errorf("%s:%d: there is no scenario %s", d.path, l.number, id)
				}
			}
		}
	}
}

// scenarios are the names that those of proxiertest begin with.
func scenarios(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, file := range files(t) {
		if matched, _ := path.Match("proxiertest/table_*.go", file); matched {
			for _, m := range regexp.MustCompile(`"(PKT-\d+)`).FindAllStringSubmatch(read(t, file), -1) {
				all = append(all, m[1])
			}
		}
	}
	return all
}

// ids are the scenarios that a text names.
func ids(text string) []string {
	var all []string
	for _, m := range regexp.MustCompile(`PKT-(\d+(?:, \d+\b)*)`).FindAllStringSubmatch(text, -1) {
		for number := range strings.SplitSeq(m[1], ", ") {
			all = append(all, "PKT-"+number)
		}
	}
	return all
}
