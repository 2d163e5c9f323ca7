package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// placeholder stands in the lines that we propose, and must not stay there.
const placeholder = "<the way over>"

// judge complains of changes that the changelog does not name, and of entries that
// lead nowhere or are about nothing.
func judge(log []section, changes []found, q question) []string {
	complaints := missingSections(log, q)
	if len(complaints) > 0 {
		return complaints
	}
	current := since(log, q)
	target := headingUnreleased
	if len(current) > 0 {
		target = current[0].heading
	}
	var broken, fresh []entry
	for i := range current {
		broken = append(broken, current[i].under(headingBreaking)...)
		fresh = append(fresh, current[i].under(headingNewAPI)...)
	}
	complaints = append(complaints, unnamed(changes, broken, target)...)
	if len(complaints) > 0 && len(current) > 0 && current[0].isPatch() {
		complaints = append(complaints, fmt.Sprintf("But %s is a patch release, which may break nothing: it has to be a minor one.", current[0].version))
	}
	for _, e := range broken {
		complaints = append(complaints, aimless(&e)...)
		if q.stale {
			complaints = append(complaints, stale(&e, changes)...)
		}
	}
	return append(complaints, silent(changes, fresh, target)...)
}

// missingSections complains if a release that is tagged is not in the changelog.
func missingSections(log []section, q question) []string {
	var complaints []string
	for _, tag := range []string{q.release, q.since} {
		if tag != "" && !slices.ContainsFunc(log, func(s section) bool { return s.version == tag }) {
			complaints = append(complaints, fmt.Sprintf(
				"CHANGELOG.md has no section for the tag %s: want a heading of the form %s", tag, headingForm))
		}
	}
	return complaints
}

// since returns the sections that are newer than the last release, up to the one
// that is judged.
func since(log []section, q question) []section {
	first, end := 0, len(log)
	for i := range log {
		if log[i].version == "" {
			continue
		}
		if log[i].version == q.release {
			first = i
		}
		if log[i].version == q.since {
			end = i
		}
	}
	return log[first:max(first, end)]
}

// unnamed complains of changes that break and that nobody is told of.
func unnamed(changes []found, broken []entry, target string) []string {
	named := map[string]bool{}
	for i := range broken {
		names, _ := broken[i].split()
		for _, name := range names {
			named[name] = true
		}
	}
	var what, lines []string
	for i := range changes {
		c := &changes[i]
		if !c.breaking || named[c.name] {
			continue
		}
		what = append(what, "  "+c.String())
		lines = append(lines, fmt.Sprintf("  - `%s`: %s", c.name, placeholder))
	}
	if len(what) == 0 {
		return nil
	}
	complaint := []string{"This breaks programs, and CHANGELOG.md does not say so:"}
	complaint = append(complaint, what...)
	complaint = append(complaint, fmt.Sprintf("Undo it, or write under %q of %q what such programs do now:", headingBreaking, target))
	return append(complaint, slices.Compact(lines)...)
}

// aimless complains of an entry that shows no way over, or was not filled in.
func aimless(e *entry) []string {
	const words = 3 // fewer tell nobody what to do
	_, way := e.split()
	if len(strings.Fields(way)) >= words && !strings.Contains(way, placeholder) {
		return nil
	}
	return []string{fmt.Sprintf(
		"CHANGELOG.md:%d: shows no way over: want the names of what broke, a colon, and what programs do now: %q", e.line, e.text)}
}

// exportedName is the form of package.Symbol and package.Type.Member.
var exportedName = regexp.MustCompile(`^([\w.-]+/)*[a-z]\w*\.[A-Z]\w*(\.\w+)?$`)

// stale complains of an entry's names, before its colon, that did not change. What
// is no exported name, such as a flag or a metric, is nobody's business here.
func stale(e *entry, changes []found) []string {
	names, _ := e.split()
	var complaints []string
	for _, name := range names {
		broke := slices.ContainsFunc(changes, func(c found) bool { return c.breaking && c.name == name })
		if exportedName.MatchString(name) && !broke {
			complaints = append(complaints, fmt.Sprintf(
				"CHANGELOG.md:%d: says that %s breaks, and it does not: before the colon stands only what broke since the last release", e.line, name))
		}
	}
	return complaints
}

// silent complains of packages with new API that "### New API" does not name.
func silent(changes []found, fresh []entry, target string) []string {
	examples := map[string][]string{}
	var pkgs []string
	for i := range changes {
		if c := &changes[i]; !c.breaking {
			examples[c.pkg] = append(examples[c.pkg], c.String())
			pkgs = append(pkgs, c.pkg)
		}
	}
	slices.Sort(pkgs)
	var complaints []string
	for _, pkg := range slices.Compact(pkgs) {
		isNamed := func(code string) bool { return code == pkg || strings.HasPrefix(code, pkg+".") }
		if slices.ContainsFunc(fresh, func(e entry) bool { return slices.ContainsFunc(e.code(), isNamed) }) {
			continue
		}
		complaints = append(complaints, fmt.Sprintf("`%s` has new API, and %q of %q in CHANGELOG.md does not name it: %s",
			pkg, headingNewAPI, target, strings.Join(examples[pkg], "; ")))
	}
	return complaints
}
