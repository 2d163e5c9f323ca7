package docs

import (
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// commands are those of a block of sh, each with the lines that belong to it.
func (b *block) commands() []string {
	heredoc := regexp.MustCompile(`<<-?['"]?(\w+)['"]?`)
	var all []string
	end := "" // of a here-document
	for _, text := range b.lines {
		trimmed := strings.TrimSpace(text)
		last := len(all) - 1
		switch {
		case end != "":
			all[last] += "\n" + text
			if trimmed == end {
				end = ""
			}
			continue
		case last >= 0 && strings.HasSuffix(all[last], "\\"):
			all[last] += "\n" + text
		case trimmed == "" || strings.HasPrefix(trimmed, "#"):
			continue
		default:
			all = append(all, text)
		}
		if m := heredoc.FindStringSubmatch(text); m != nil {
			end = m[1]
		}
	}
	return all
}

// script is a piece of a document that somebody is asked to run.
type script struct {
	path     string
	line     int
	commands []string
}

// scripts are the blocks of sh, and the code spans that are commands.
func scripts(t *testing.T) []script {
	t.Helper()
	command := regexp.MustCompile(`^(go (run|test|build|vet|install|get)|make|\./hack/\S+\.sh)( |$)`)
	var all []script
	for _, d := range documents(t) {
		for _, b := range d.blocks {
			if b.language == "sh" {
				all = append(all, script{d.path, b.line, b.commands()})
			}
		}
		for _, s := range d.spans() {
			if command.MatchString(s.text) || strings.HasPrefix(s.text, "./hack/") {
				all = append(all, script{d.path, s.line, []string{s.text}})
			}
		}
	}
	return all
}

// elsewhere are the commands that are not run here, but somewhere else in CI; check
// says what is wrong with one.
type elsewhere struct {
	pattern string
	where   string
	check   func(t *testing.T, words []string) string
}

func checkedElsewhere() []elsewhere {
	return []elsewhere{
		{`^\./hack/test\.sh$`, "it is what runs this test", isExecutable},
		{`^\./hack/[\w/]+\.sh\b`, "hack/test.sh, or whom it takes too long", isExecutable},
		{`^make\b`, "Makefile: hack/test.sh runs what its targets run", hasTargets},
		{`^go test\b`, "hack/test.sh runs all tests and benchmarks", hasTests},
		{`^go get \S+`, "go.mod", isOurs},
		{`^go run \./examples/own-engine\b`, "its tests; here it would need nginx", hasFlags},
	}
}

// findElsewhere is the first rule for a command, or nil if it is to be run here.
func findElsewhere(command string) *elsewhere {
	for _, e := range checkedElsewhere() {
		if regexp.MustCompile(e.pattern).MatchString(command) {
			return &e
		}
	}
	return nil
}

// TestCommandsThatAreCheckedElsewhereExist with the flags and targets that they have.
func TestCommandsThatAreCheckedElsewhereExist(t *testing.T) {
	for _, s := range scripts(t) {
		for _, command := range s.commands {
			if e := findElsewhere(command); e != nil {
				if fault := e.check(t, strings.Fields(command)); fault != "" {
					t.Errorf("%s:%d: %q: %s (checked elsewhere: %s)", s.path, s.line, command, fault, e.where)
				}
			}
		}
	}
}

func isExecutable(t *testing.T, words []string) string {
	t.Helper()
	if _, err := exec.LookPath(filepath.Join(root, words[0])); err != nil {
		return err.Error()
	}
	return ""
}

func hasTargets(t *testing.T, words []string) string {
	t.Helper()
	command := exec.CommandContext(t.Context(), "make", append([]string{"-n"}, words[1:]...)...)
	command.Dir = root
	if out, err := command.CombinedOutput(); err != nil {
		return string(out)
	}
	return ""
}

func isOurs(t *testing.T, words []string) string {
	t.Helper()
	module, _, _ := strings.Cut(strings.TrimPrefix(read(t, "go.mod"), "module "), "\n")
	if got, _, _ := strings.Cut(words[2], "@"); got != module {
		return "want " + module
	}
	return ""
}

// hasTests wants every folder to be there, and to have what -run, -bench and -fuzz
// ask for.
func hasTests(t *testing.T, words []string) string {
	t.Helper()
	x := newIndex(t)
	var names []string
	for _, word := range words[2:] {
		if folder, ok := strings.CutPrefix(word, "./"); ok {
			names = append(names, x.below(folder)...)
		}
	}
	for _, word := range words[2:] {
		m := regexp.MustCompile(`^-(run|bench|fuzz)=['"]?([^/'"]*)`).FindStringSubmatch(word)
		if m == nil || m[2] == "^$" {
			continue
		}
		pattern, err := regexp.Compile(m[2])
		if err != nil {
			return err.Error()
		}
		if !slices.ContainsFunc(names, pattern.MatchString) {
			return "there is nothing for " + word
		}
	}
	if len(names) == 0 {
		return "there are no tests"
	}
	return ""
}

// below are the functions of tests in a folder, or in all below "folder/...".
func (x *index) below(pattern string) []string {
	folder, all := strings.CutSuffix(pattern, "...")
	folder = strings.TrimSuffix(folder, "/")
	var names []string
	for at, functions := range x.tests {
		if at == folder || all && (folder == "" || strings.HasPrefix(at, folder+"/")) {
			names = append(names, functions...)
		}
	}
	return names
}

// hasFlags wants a program of ours to have the flags that a command has.
func hasFlags(t *testing.T, words []string) string {
	t.Helper()
	flags := flagsOf(t, strings.TrimPrefix(words[2], "./"))
	for _, word := range words[3:] {
		name, _, _ := strings.Cut(strings.TrimLeft(word, "-"), "=")
		if strings.HasPrefix(word, "-") && !slices.Contains(flags, name) {
			return "its flags are " + strings.Join(flags, ", ")
		}
	}
	return ""
}

// flagsOf are the flags that a program makes with package flag, by its source.
func flagsOf(t *testing.T, folder string) []string {
	t.Helper()
	pattern := regexp.MustCompile(`\bflag\.\w+\((?:&[\w.]+, )?"([\w-]+)"`)
	var flags []string
	for _, file := range files(t) {
		if path.Dir(file) == folder && filepath.Ext(file) == ".go" {
			for _, m := range pattern.FindAllStringSubmatch(read(t, file), -1) {
				flags = append(flags, m[1])
			}
		}
	}
	return flags
}

// TestFlagsOfExamplesExist where a code span begins with one, such as -plan.
func TestFlagsOfExamplesExist(t *testing.T) {
	known := []string{"v"} // of nodeproxy
	for folder := range newSite(t).folders {
		if path.Dir(folder) == "examples" {
			known = append(known, flagsOf(t, folder)...)
		}
	}
	pattern := regexp.MustCompile(`^-([a-z][\w-]*)`)
	for _, d := range documents(t) {
		for _, s := range d.spans() {
			if m := pattern.FindStringSubmatch(s.text); m != nil && !slices.Contains(known, m[1]) {
				t.Errorf("%s:%d: no example has the flag of `%s`", d.path, s.line, s.text)
			}
		}
	}
}

// TestCommandsHavePlaceholdersOnlyInVariables: a word in capitals is nothing that a
// shell can run.
func TestCommandsHavePlaceholdersOnlyInVariables(t *testing.T) {
	placeholder := regexp.MustCompile(`(^|[^\w$\{])([A-Z][A-Z_]+)\b[^\w=]|<[a-z][a-z -]*>`)
	for _, s := range scripts(t) {
		for _, command := range s.commands {
			first, _, _ := strings.Cut(command, "<<")
			first, _, _ = strings.Cut(first, " #")
			if m := placeholder.FindString(first + " "); m != "" {
				t.Errorf("%s:%d: %q has a placeholder %q, want a variable", s.path, s.line, command, m)
			}
		}
	}
}
