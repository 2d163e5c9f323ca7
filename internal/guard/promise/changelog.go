package main

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The headings that rules are about.
const (
	headingUnreleased = "## Unreleased"
	headingBreaking   = "### Breaking"
	headingNewAPI     = "### New API"
	headingForm       = `"## v0.N.M — YYYY-MM-DD"`
)

// section is one release, or what will be the next one.
type section struct {
	heading string
	line    int
	version string // v0.N.M; empty if unreleased, or if the heading is malformed
	numbers [2]int // N and M
	entries []entry
}

// entry is one point of a list.
type entry struct {
	heading string // ### and so on
	line    int
	text    string // in one line
}

// parseChangelog reads the sections, in the order of the file.
func parseChangelog(text string) []section {
	var sections []section
	part, open := "", false // open: the entry goes on
	number := 0
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n\t ")
		number++
		if strings.HasPrefix(line, "## ") {
			sections = append(sections, newSection(line, number))
			part, open = "", false
			continue
		}
		if len(sections) == 0 {
			continue
		}
		s := &sections[len(sections)-1]
		item, isItem := strings.CutPrefix(line, "- ")
		switch {
		case strings.HasPrefix(line, "### "):
			part, open = line, false
		case isItem:
			s.entries = append(s.entries, entry{heading: part, line: number, text: strings.TrimSpace(item)})
			open = true
		case open && strings.HasPrefix(line, " "):
			s.entries[len(s.entries)-1].text += " " + strings.TrimSpace(line)
		default:
			open = false
		}
	}
	return sections
}

var releaseForm = regexp.MustCompile(`^## v0\.(0|[1-9]\d*)\.(0|[1-9]\d*) — (\d{4}-\d\d-\d\d)$`)

func newSection(heading string, line int) section {
	s := section{heading: heading, line: line}
	m := releaseForm.FindStringSubmatch(heading)
	if m == nil {
		return s
	}
	minor, err1 := strconv.Atoi(m[1])
	patch, err2 := strconv.Atoi(m[2])
	_, err3 := time.Parse(time.DateOnly, m[3])
	if cmp.Or(err1, err2, err3) != nil {
		return s
	}
	s.version, s.numbers = fmt.Sprintf("v0.%d.%d", minor, patch), [2]int{minor, patch}
	return s
}

// under returns the entries below a heading.
func (s *section) under(heading string) []entry {
	return slices.DeleteFunc(slices.Clone(s.entries), func(e entry) bool { return e.heading != heading })
}

// isPatch reports whether the section is a release that may break nothing.
func (s *section) isPatch() bool { return s.version != "" && s.numbers[1] > 0 }

// disorder complains of headings, and of patch releases that break.
func disorder(log []section) []string {
	var complaints []string
	complain := func(line int, format string, args ...any) {
		complaints = append(complaints, fmt.Sprintf("CHANGELOG.md:%d: ", line)+fmt.Sprintf(format, args...))
	}
	if len(log) == 0 {
		complain(1, "no section; want %q, or a release", headingUnreleased)
	}
	var newer *section
	for i := range log {
		s := &log[i]
		switch {
		case s.heading == headingUnreleased && i > 0:
			complain(s.line, "%q stands above all releases, and once", headingUnreleased)
		case s.heading != headingUnreleased && s.version == "":
			complain(s.line, "%q should be %q or of the form %s", s.heading, headingUnreleased, headingForm)
		}
		if s.version == "" {
			continue
		}
		if newer != nil && slices.Compare(newer.numbers[:], s.numbers[:]) <= 0 {
			complain(s.line, "%s stands below %s; the newest release comes first", s.version, newer.version)
		}
		if broken := s.under(headingBreaking); s.isPatch() && len(broken) > 0 {
			complain(broken[0].line, "%s is a patch release, which may break nothing", s.version)
		}
		newer = s
	}
	return complaints
}

// split separates the names before an entry's first colon from the way over behind
// it. A colon in a code span does not count.
func (e *entry) split() (names []string, way string) {
	spans := strings.Split(e.text, "`") // every second one is code
	for i, span := range spans {
		if i%2 == 1 {
			names = append(names, span)
			continue
		}
		if _, after, ok := strings.Cut(span, ":"); ok {
			rest := append([]string{after}, spans[i+1:]...)
			return names, strings.TrimSpace(strings.Join(rest, "`"))
		}
	}
	return names, ""
}

// code returns all code spans of an entry.
func (e *entry) code() []string {
	var code []string
	for i, span := range strings.Split(e.text, "`") {
		if i%2 == 1 {
			code = append(code, span)
		}
	}
	return code
}
