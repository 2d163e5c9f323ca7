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
	module, since        string
	stale                bool
	reports              []string
	breaking, compatible map[string]string // what changed, by name
}

// run answers for the module in a directory.
func (q *question) run(root string) (out string, err error) {
	changelog, err := os.ReadFile(filepath.Join(root, "CHANGELOG.md"))
	public, errOfNames := publicNames(root)
	if err := errors.Join(err, errOfNames); err != nil {
		return "", err
	}
	q.breaking, q.compatible = map[string]string{}, map[string]string{}
	for _, file := range q.reports {
		report, err := os.ReadFile(file)
		if err == nil {
			err = q.parse(string(report), public)
		}
		if err != nil {
			return "", fmt.Errorf("read %s: %w", file, err)
		}
	}
	return fmt.Sprintf("%d breaking changes, %d others\n", len(q.breaking), len(q.compatible)), errors.Join(q.faults(string(changelog))...)
}

var (
	item    = regexp.MustCompile(`^- (.*?): (.*)$`)                        // read-only
	code    = regexp.MustCompile("`([^`]+)`")                              // read-only
	apiName = regexp.MustCompile(`^([\w-]+/)*[a-z]\w*\.[A-Z]\w*(\.\w+)?$`) // and no flag or metric // read-only
)

// publicNames returns the public aliases of internal types. apidiff compares internal
// types under their internal names: internal/netns.Flow is proxiertest.Conn.
func publicNames(root string) (map[string]string, error) {
	files, err := filepath.Glob(filepath.Join(root, "*", "*.go"))
	alias, names := regexp.MustCompile(`(?m)^type ([A-Z]\w*) = (\w+\.[A-Z]\w*)$`), map[string]string{}
	for _, file := range files {
		text, errOfFile := os.ReadFile(file)
		err = errors.Join(err, errOfFile)
		for _, m := range alias.FindAllStringSubmatch(string(text), -1) {
			names["internal/"+m[2]] = filepath.Base(filepath.Dir(file)) + "." + m[1]
		}
	}
	return names, err
}

// parse adds the changes of public names. A line of unknown form is an error: another
// version of apidiff may report breaking changes in another way.
func (q *question) parse(report string, public map[string]string) error {
	var changes map[string]string
	for line := range strings.Lines(report) {
		line = strings.TrimSuffix(line, "\n")
		m := item.FindStringSubmatch(line)
		switch {
		case line == "Incompatible changes:":
			changes = q.breaking
		case line == "Compatible changes:":
			changes = q.compatible
		case regexp.MustCompile(`^(! second, different message|  first: |  second: )`).MatchString(line): // one of both messages has its own line
		case m == nil || changes == nil:
			return fmt.Errorf("line %q is not of the form of apidiff", line)
		default:
			if name := exported(q.module, m[1], public); name != "" {
				changes[name] = m[2]
			}
		}
	}
	return nil
}

// exported returns the name that the changelog uses: "./p.(*List[K, V]).Add" is
// p.List.Add. It is empty if programs cannot import the package.
func exported(module, subject string, public map[string]string) string {
	subject = strings.TrimPrefix(strings.TrimPrefix(subject, "package "), path.Dir(module)+"/")
	subject = strings.TrimPrefix(subject, path.Base(module)+"/")                                                  // the root package keeps its name
	name, detail, _ := strings.Cut(regexp.MustCompile(`\[.*\]|\(\*|\)|^\./`).ReplaceAllString(subject, ""), ", ") // ", element type"
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
func (q *question) faults(changelog string) (faults []error) {
	add := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	changelog, _, found := strings.Cut(changelog, "\n## "+q.since+" ")
	if q.since != "" && !found {
		add(`CHANGELOG.md has no section for the tag %s: add a heading "## %[1]s — YYYY-MM-DD"`, q.since)
		return faults
	}
	names, fresh := entries(changelog)
	for _, name := range slices.Sorted(maps.Keys(q.breaking)) {
		if !slices.Contains(names, name) {
			add("CHANGELOG.md does not name a breaking change: %s: %s: undo it, or write under \"### Breaking\": - `%[1]s`: what programs do now", name, q.breaking[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(q.compatible)) {
		pkg, _, _ := strings.Cut(path.Base(name), ".")
		pkg = path.Join(path.Dir(name), pkg)
		if !slices.ContainsFunc(fresh, func(code string) bool { return code == pkg || strings.HasPrefix(code, pkg+".") }) {
			add("CHANGELOG.md does not name new API of %s: %s: %s: add it under \"### New API\"", pkg, name, q.compatible[name])
		}
	}
	for _, name := range names {
		if q.stale && apiName.MatchString(name) && q.breaking[name] == "" {
			add("CHANGELOG.md says that %s breaks, and it does not: delete the name", name)
		}
	}
	if m := regexp.MustCompile(`(?m)^## (v\d+\.\d+\.[1-9]\d*) `).FindStringSubmatch(changelog); m != nil && len(q.breaking) > 0 {
		add("%s is a patch release, and breaks programs: make it a minor release", m[1])
	}
	return faults
}

// entries returns the code spans that items of "### Breaking" have before their first
// colon, and all of "### New API".
func entries(changelog string) (breaking, fresh []string) {
	heading := ""
	for line := range strings.Lines(strings.ReplaceAll(changelog, "\n  ", " ")) {
		if strings.HasPrefix(line, "#") {
			heading = strings.TrimSpace(line)
		}
		names, _, _ := strings.Cut(line, "`: ")
		for _, m := range code.FindAllStringSubmatch(line, -1) {
			switch {
			case heading == "### New API":
				fresh = append(fresh, m[1])
			case heading == "### Breaking" && strings.HasPrefix(line, "- ") && strings.Contains(names+"`", m[0]):
				breaking = append(breaking, m[1])
			}
		}
	}
	return breaking, fresh
}
