// Command promise compares API changes, as apidiff prints them, with CHANGELOG.md by
// the rules of docs/STABILITY.md: each breaking change is named under "### Breaking",
// each package with new API under "### New API", and a patch release breaks nothing.
package main

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

func main() {
	var q question
	flag.StringVar(&q.module, "module", "", "path of the module")
	flag.StringVar(&q.since, "since", "", "the last release; its section of the changelog and older ones do not count")
	flag.BoolVar(&q.stale, "stale", true, "also report entries about names that did not change")
	flag.Parse()
	q.reports = flag.Args() // files with the output of apidiff, one a system
	out, err := q.run(".")
	fmt.Print(out)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

type question struct {
	module, since string
	stale         bool
	reports       []string
}

// run answers for the module in a directory.
func (q *question) run(root string) (out string, err error) {
	changelog, err := os.ReadFile(filepath.Join(root, "CHANGELOG.md"))
	if err != nil {
		return "", err
	}
	public, err := publicNames(root)
	if err != nil {
		return "", err
	}
	breaking, compatible := map[string]string{}, map[string]string{} // what changed, by name
	for _, file := range q.reports {
		report, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		if err := parseReport(q.module, string(report), public, breaking, compatible); err != nil {
			return "", fmt.Errorf("read %s: %w", file, err)
		}
	}
	faults := q.faults(string(changelog), breaking, compatible)
	return fmt.Sprintf("%d breaking changes, %d others\n", len(breaking), len(compatible)), errors.Join(faults...)
}

// publicNames returns the public aliases of internal types. apidiff compares internal
// types under their internal names: internal/netns.Flow is proxiertest.Flow.
func publicNames(root string) (map[string]string, error) {
	files, err := filepath.Glob(filepath.Join(root, "*", "*.go"))
	alias := regexp.MustCompile(`(?m)^type ([A-Z]\w*) = (\w+\.[A-Z]\w*)$`)
	names := map[string]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for _, m := range alias.FindAllStringSubmatch(string(text), -1) {
			names["internal/"+m[2]] = filepath.Base(filepath.Dir(file)) + "." + m[1]
		}
	}
	return names, err
}

// parseReport adds the changes of public names to the maps. A line of unknown form is an
// error: another version of apidiff may report breaking changes in another way.
func parseReport(module, text string, public, breaking, compatible map[string]string) error {
	into := map[string]map[string]string{"Incompatible changes:": breaking, "Compatible changes:": compatible}
	var changes map[string]string
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if into[line] != nil {
			changes = into[line]
			continue
		}
		if strings.HasPrefix(line, "! second, different message") || strings.HasPrefix(line, "  first: ") || strings.HasPrefix(line, "  second: ") {
			continue // one of both messages has its own line
		}
		subject, what, ok := strings.Cut(line, ": ")
		subject, isItem := strings.CutPrefix(subject, "- ")
		if !ok || !isItem || changes == nil {
			return fmt.Errorf("line %q is not of the form of apidiff", line)
		}
		if name := exported(module, subject, public); name != "" {
			changes[name] = what
		}
	}
	return nil
}

// exported returns the name that the changelog uses: "./p.(*List[K, V]).Add" is
// p.List.Add. It is empty if programs cannot import the package.
func exported(module, subject string, public map[string]string) string {
	subject = strings.TrimPrefix(strings.TrimPrefix(subject, "package "), path.Dir(module)+"/")
	subject = strings.TrimPrefix(subject, path.Base(module)+"/") // the root package keeps its name
	subject = regexp.MustCompile(`\[.*\]|\(\*|\)|^\./`).ReplaceAllString(subject, "")
	name, detail, _ := strings.Cut(subject, ", ") // ", element type"
	for internal, alias := range public {
		if rest, ok := strings.CutPrefix(name, internal); ok && (rest == "" || rest[0] == '.') {
			return alias + rest
		}
	}
	embedded := strings.HasPrefix(detail, "method set of ") // a public type has the methods of an internal one
	if first, _, _ := strings.Cut(name, "/"); !embedded && slices.Contains([]string{"internal", "examples", "hack", "docs"}, first) {
		return ""
	}
	return name
}

// faults compares changes with the sections above the last release.
func (q *question) faults(changelog string, breaking, compatible map[string]string) (faults []error) {
	if q.since != "" {
		before, _, found := strings.Cut(changelog, "\n## "+q.since+" ")
		if !found {
			return []error{fmt.Errorf(`CHANGELOG.md has no section for the tag %s: add a heading "## %[1]s — YYYY-MM-DD"`, q.since)}
		}
		changelog = before
	}
	names, fresh := entries(changelog)
	for _, name := range slices.Sorted(maps.Keys(breaking)) {
		if !slices.Contains(names, name) {
			faults = append(faults, fmt.Errorf("CHANGELOG.md does not name a breaking change: %s: %s: undo it, or write under \"### Breaking\": - `%[1]s`: what programs do now", name, breaking[name]))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(compatible)) {
		pkg, _, _ := strings.Cut(path.Base(name), ".")
		pkg = path.Join(path.Dir(name), pkg)
		if !slices.ContainsFunc(fresh, func(code string) bool { return code == pkg || strings.HasPrefix(code, pkg+".") }) {
			faults = append(faults, fmt.Errorf("CHANGELOG.md does not name new API of %s: %s: %s: add it under \"### New API\"", pkg, name, compatible[name]))
		}
	}
	isName := regexp.MustCompile(`^([\w-]+/)*[a-z]\w*\.[A-Z]\w*(\.\w+)?$`) // and no flag or metric
	for _, name := range names {
		if q.stale && isName.MatchString(name) && breaking[name] == "" {
			faults = append(faults, fmt.Errorf("CHANGELOG.md says that %s breaks, and it does not: delete the name", name))
		}
	}
	if m := regexp.MustCompile(`(?m)^## (v\d+\.\d+\.[1-9]\d*) `).FindStringSubmatch(changelog); m != nil && len(breaking) > 0 {
		faults = append(faults, fmt.Errorf("%s is a patch release, and breaks programs: make it a minor release", m[1]))
	}
	return faults
}

// entries returns the code spans that items of "### Breaking" have before their first
// colon, and all of "### New API".
func entries(changelog string) (breaking, fresh []string) {
	code := regexp.MustCompile("`([^`]+)`")
	heading := ""
	for line := range strings.Lines(strings.ReplaceAll(changelog, "\n  ", " ")) {
		if strings.HasPrefix(line, "#") {
			heading = strings.TrimSpace(line)
		}
		isItem := strings.HasPrefix(line, "- ")
		names, _, _ := strings.Cut(line, "`: ")
		for _, m := range code.FindAllStringSubmatch(line, -1) {
			switch {
			case heading == "### New API":
				fresh = append(fresh, m[1])
			case heading == "### Breaking" && isItem && strings.Contains(names+"`", m[0]):
				breaking = append(breaking, m[1])
			}
		}
	}
	return breaking, fresh
}
