// Command promise compares API changes, as apidiff prints them, with CHANGELOG.md by
// the rules of docs/STABILITY.md: each breaking change is named under "### Breaking",
// and a patch release breaks nothing.
package main

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
)

func main() {
	module := flag.String("module", "", "path of the module")
	since := flag.String("since", "", "the last release; its section of the changelog and older ones do not count")
	flag.Parse() // the arguments are files with the output of apidiff, one a system
	changelog, err := os.ReadFile("CHANGELOG.md")
	breaking := map[string]string{}
	for _, file := range flag.Args() {
		report, errOfFile := os.ReadFile(file)
		err = errors.Join(err, errOfFile, parse(breaking, *module, string(report)))
	}
	fmt.Printf("%d breaking changes\n", len(breaking))
	if err := errors.Join(err, errors.Join(faults(breaking, *since, string(changelog))...)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

var (
	item = regexp.MustCompile(`^- (.*?): (.*)$`) // read-only
	code = regexp.MustCompile("`([^`]+)`")       // read-only
)

// parse adds the breaking changes of a report, by name. A line of unknown form is an error: another
// version of apidiff may report breaking changes in another way.
func parse(breaking map[string]string, module, report string) error {
	heading := ""
	for line := range strings.Lines(report) {
		line = strings.TrimSuffix(line, "\n")
		m := item.FindStringSubmatch(line)
		switch {
		case line == "Incompatible changes:" || line == "Compatible changes:":
			heading = line
		case regexp.MustCompile(`^(! second, different message|  first: |  second: )`).MatchString(line): // one of both messages has its own line
		case m == nil || heading == "":
			return fmt.Errorf("line %q is not of the form of apidiff", line)
		case heading == "Incompatible changes:":
			if name := exported(module, m[1]); name != "" {
				breaking[name] = m[2]
			}
		}
	}
	return nil
}

// exported returns the name that the changelog uses: "./p.(*List[K, V]).Add" is
// p.List.Add. It is empty if programs cannot import the package.
func exported(module, subject string) string {
	subject = strings.TrimPrefix(strings.TrimPrefix(subject, "package "), path.Dir(module)+"/")
	subject = strings.TrimPrefix(subject, path.Base(module)+"/")                                                  // the root package keeps its name
	name, detail, _ := strings.Cut(regexp.MustCompile(`\[.*\]|\(\*|\)|^\./`).ReplaceAllString(subject, ""), ", ") // ", element type"
	embedded := strings.HasPrefix(detail, "method set of ")                                                       // a public type has the methods of an internal one
	if first, _, _ := strings.Cut(name, "/"); !embedded && slices.Contains([]string{"internal", "examples"}, first) {
		return ""
	}
	return name
}

// faults compares breaking changes with the sections above the last release.
func faults(breaking map[string]string, since, changelog string) (faults []error) {
	add := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	changelog, _, found := strings.Cut(changelog, "\n## "+since+" ")
	if since != "" && !found {
		add(`CHANGELOG.md has no section for the tag %s: add a heading "## %[1]s — YYYY-MM-DD"`, since)
		return faults
	}
	names := named(changelog)
	for _, name := range slices.Sorted(maps.Keys(breaking)) {
		if !slices.Contains(names, name) {
			add("CHANGELOG.md does not name a breaking change: %s: %s: undo it, or write under \"### Breaking\": - `%[1]s`: what programs do now", name, breaking[name])
		}
	}
	if m := regexp.MustCompile(`(?m)^## (v\d+\.\d+\.[1-9]\d*) `).FindStringSubmatch(changelog); m != nil && len(breaking) > 0 {
		add("%s is a patch release, and breaks programs: make it a minor release", m[1])
	}
	return faults
}

// named returns the code spans that items of "### Breaking" have before their first colon.
func named(changelog string) (names []string) {
	heading := ""
	for line := range strings.Lines(strings.ReplaceAll(changelog, "\n  ", " ")) {
		if strings.HasPrefix(line, "#") {
			heading = strings.TrimSpace(line)
		}
		before, _, _ := strings.Cut(line, "`: ")
		if heading == "### Breaking" && strings.HasPrefix(line, "- ") {
			for _, m := range code.FindAllStringSubmatch(before+"`", -1) {
				names = append(names, m[1])
			}
		}
	}
	return names
}
