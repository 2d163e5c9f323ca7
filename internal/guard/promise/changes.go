package main

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// change is what apidiff says about one exported name.
type change struct {
	pkg      string // below the module, such as proxier
	name     string // as the changelog has it: proxier.Engine.Apply, or a package
	what     string // such as "removed"
	breaking bool
}

// found is a change, and the systems that have it.
type found struct {
	change
	systems []string // sorted
	partial bool     // other systems were looked at, and do not have it
}

func (f *found) String() string {
	if f.partial {
		return fmt.Sprintf("%s: %s (%s)", f.name, f.what, strings.Join(f.systems, ", "))
	}
	return f.name + ": " + f.what
}

// readReports joins the reports of several systems; the result is sorted.
func readReports(module string, public aliases, files map[string]string) ([]found, error) {
	systems := map[change][]string{}
	for _, system := range slices.Sorted(maps.Keys(files)) {
		text, err := os.ReadFile(files[system])
		if err != nil {
			return nil, err
		}
		changes, err := parseReport(module, string(text))
		if err != nil {
			return nil, fmt.Errorf("read what apidiff says for %s: %w", system, err)
		}
		for _, c := range changes {
			if c, ok := public.publish(c); ok && !slices.Contains(systems[c], system) {
				systems[c] = append(systems[c], system)
			}
		}
	}
	var all []found
	for c, has := range systems {
		all = append(all, found{change: c, systems: has, partial: len(has) < len(files)})
	}
	slices.SortFunc(all, func(a, b found) int {
		return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.what, b.what))
	})
	return all, nil
}

// methodSet begins what apidiff says of a method that another type has by embedding.
const methodSet = "method set of "

// parseReport reads what apidiff -m -allow-internal prints. A line of another form is an error: a
// newer apidiff may say differently that something is broken.
func parseReport(module, text string) ([]change, error) {
	var changes []change
	headings := map[string]bool{"Incompatible changes:": true, "Compatible changes:": false}
	breaking, begun := false, false
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if kind, ok := headings[line]; ok {
			breaking, begun = kind, true
			continue
		}
		if isAside(line) {
			continue
		}
		body, ok := strings.CutPrefix(line, "- ")
		if !ok || !begun {
			return nil, fmt.Errorf("parse line %q: not the form of apidiff", line)
		}
		c, err := parseChange(module, body)
		if err != nil {
			return nil, err
		}
		if c.breaking = breaking; isAPI(c.pkg) {
			changes = append(changes, c)
		}
	}
	return changes, nil
}

// isAside reports whether a line is apidiff talking of two messages that it has for
// one name. One of them is in the list.
func isAside(line string) bool {
	return strings.HasPrefix(line, "! second, different message") ||
		strings.HasPrefix(line, "  first: ") || strings.HasPrefix(line, "  second: ")
}

// isAPI leaves out programs, and the tests beside the documents.
func isAPI(pkg string) bool {
	first, _, _ := strings.Cut(pkg, "/")
	return !slices.Contains([]string{"examples", "hack", "docs"}, first)
}

// typeParameters are those of a receiver: (*List[K, V]).Add.
var typeParameters = regexp.MustCompile(`\[.*\]`)

// parseChange reads one line, for example "./proxier.(*Proxier).Status: removed".
func parseChange(module, line string) (change, error) {
	subject, what, ok := strings.Cut(line, ": ")
	if !ok {
		return change{}, fmt.Errorf("parse line %q: no colon", line)
	}
	if name, ok := strings.CutPrefix(subject, "package "); ok {
		name = below(module, name)
		return change{pkg: name, name: name, what: what}, nil
	}
	subject = typeParameters.ReplaceAllString(subject, "")
	if name, part, ok := strings.Cut(subject, ", "); ok { // ", element type"
		subject, what = name, part+" "+what
	}
	subject = strings.NewReplacer("(*", "", ")", "").Replace(subject)
	subject, inside := strings.CutPrefix(subject, "./")
	if !inside && unicode.IsUpper([]rune(subject + "x")[0]) { // in the root of the module
		subject = path.Base(module) + "." + subject
	}
	directory, rest := path.Split(subject)
	pkg, _, ok := strings.Cut(rest, ".")
	if !ok {
		return change{}, fmt.Errorf("parse line %q: no package", line)
	}
	return change{pkg: directory + pkg, name: subject, what: what}, nil
}

// below returns the path of a package in its module.
func below(module, pkg string) string {
	if pkg == module {
		return path.Base(module)
	}
	return strings.TrimPrefix(pkg, module+"/")
}

// summary is what stands in the log of a comparison without complaint.
func summary(changes []found) string {
	var b strings.Builder
	broken, fresh := 0, map[string]int{}
	for _, c := range changes {
		if !c.breaking {
			fresh[c.pkg]++
			continue
		}
		broken++
		fmt.Fprintf(&b, "breaking, as CHANGELOG.md says: %s\n", c.String())
	}
	fmt.Fprintf(&b, "%d breaking changes, %d others", broken, len(changes)-broken)
	for i, pkg := range slices.Sorted(maps.Keys(fresh)) {
		fmt.Fprintf(&b, "%s%s %d", []string{": ", ", "}[min(i, 1)], pkg, fresh[pkg])
	}
	b.WriteByte('\n')
	return b.String()
}
