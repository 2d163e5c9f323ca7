package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The files of made-up repositories.
const (
	without   = "package p\n\ntype T struct{}\n"
	with      = without + "\nfunc (T) M() {}\n"
	onWindows = "package p\n\nfunc Windows() {}\n"
	quiet     = "# Changelog\n\n## Unreleased\n"
	loud      = "# Changelog\n\n## Unreleased\n\n" + told
	compared  = "breaking changes, "
)

// apidiffPath returns where hack/tools.sh puts apidiff, or skips the test. Where all
// tests have to run, one that cannot run fails.
func apidiffPath(t *testing.T) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "bash", "-c", `source ../../../hack/tools.sh && git --version >/dev/null && printf %s "$APIDIFF"`).Output()
	if err == nil {
		_, err = os.Stat(string(out))
	}
	if err != nil {
		if os.Getenv("SERVICEPLANE_REQUIRE_APIDIFF") == "1" {
			t.Fatalf("find apidiff, bash and git: %v", err)
		}
		t.Skipf("needs apidiff, bash and git: %v", err)
	}
	return string(out)
}

// TestApidiffPrintsWhatWasRecorded: the parser is tested with what the real tool says.
func TestApidiffPrintsWhatWasRecorded(t *testing.T) {
	apidiff := apidiffPath(t)
	data := map[string]string{}
	for _, version := range []string{"old", "new"} {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(filepath.Join("testdata", version))); err != nil {
			t.Fatal(err)
		}
		write(t, dir, map[string]string{"go.mod": goMod})
		data[version] = filepath.Join(t.TempDir(), version)
		command(t, dir, apidiff, "-m", "-w", data[version], "example.com/made")
	}
	got, err := exec.CommandContext(t.Context(), apidiff, "-m", "-allow-internal", data["old"], data["new"]).Output()
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(recorded)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Errorf("apidiff prints\n%s\nand %s has\n%s", got, recorded, want)
	}
}

const goMod = "module example.com/made\n\ngo 1.26\n"

// made is a repository of a small module, with the real script and judge in it.
type made struct {
	t   *testing.T
	dir string
}

// makeRepository writes a module with one commit, which is the script's first base.
func makeRepository(t *testing.T) *made {
	t.Helper()
	apidiffPath(t)
	m := &made{t: t, dir: t.TempDir()}
	write(t, m.dir, map[string]string{"go.mod": goMod, "p/p.go": with, "p/p_windows.go": onWindows, "CHANGELOG.md": quiet})
	sources, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range append(sources, "../../../hack/api.sh", "../../../hack/tools.sh") {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		same := filepath.Join("internal/guard/promise", file) // where it is here
		write(t, m.dir, map[string]string{same: read(t, file)})
	}
	m.git("init", "-q", "-b", "main")
	m.commit()
	m.firstBase(strings.TrimSpace(m.git("rev-parse", "HEAD")))
	return m
}

// firstBase changes the script.
func (m *made) firstBase(commit string) {
	m.t.Helper()
	script := filepath.Join(m.dir, "hack/api.sh")
	line := regexp.MustCompile(`(?m)^FIRST_BASE=[0-9a-f]{40}$`)
	text := read(m.t, script)
	if n := len(line.FindAllString(text, -1)); n != 1 {
		m.t.Fatalf("hack/api.sh has %d lines with the first base, want 1", n)
	}
	write(m.t, m.dir, map[string]string{"hack/api.sh": line.ReplaceAllString(text, "FIRST_BASE="+commit)})
	m.commit()
}

// write changes the files whose content is not empty.
func (m *made) write(code, changelog string) {
	m.t.Helper()
	write(m.t, m.dir, map[string]string{"p/p.go": code, "CHANGELOG.md": changelog})
}

func (m *made) commit() {
	m.t.Helper()
	m.git("add", "-A")
	m.git("commit", "-q", "--allow-empty", "-m", "a change")
}

func (m *made) git(args ...string) string {
	m.t.Helper()
	return command(m.t, m.dir, "git", args...)
}

// clone makes a shallow clone that has the last commit alone.
func (m *made) clone(repository string) *made {
	m.t.Helper()
	c := &made{t: m.t, dir: m.t.TempDir()}
	command(m.t, c.dir, "git", "clone", "-q", "--depth=1", "file://"+repository, ".")
	return c
}

// passes runs the script, which must succeed, and say so.
func (m *made) passes(want string, env ...string) {
	m.t.Helper()
	if out, err := m.run(env); err != nil || !strings.Contains(out, want) {
		m.t.Errorf("hack/api.sh: %v, want success and %q; it says\n%s", err, want, out)
	}
}

// fails runs the script, which must not succeed.
func (m *made) fails(want string) {
	m.t.Helper()
	if out, err := m.run(nil); err == nil || !strings.Contains(out, want) {
		m.t.Errorf("hack/api.sh: %v, want a failure with %q; it says\n%s", err, want, out)
	}
}

func (m *made) run(env []string) (string, error) {
	cmd := exec.CommandContext(m.t.Context(), "bash", "hack/api.sh")
	cmd.Dir = m.dir
	cmd.Env = append(environment(), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestAChangeSinceTheFirstBaseMustBeNamed(t *testing.T) {
	m := makeRepository(t)
	m.passes("0 " + compared)
	m.write(without, quiet) // not committed: what is here counts
	m.fails("  - `p.T.M`: <the way over>")
	m.write(without, loud)
	m.passes("p.T.M: removed\n1 " + compared)
	m.write(with, loud)
	m.fails("says that p.T.M breaks, and it does not")
}

func TestAChangeOnOneSystemCounts(t *testing.T) {
	m := makeRepository(t)
	m.git("rm", "-q", "p/p_windows.go")
	m.fails("p.Windows: removed (windows)")
}

func TestTheLastTagIsTheBase(t *testing.T) {
	m := makeRepository(t)
	first := "## v0.1.0 — 2026-01-31\n"
	m.write(without, first)
	m.commit()
	m.git("tag", "v0.1.0")
	m.git("tag", "-a", "-m", "no release", "v0.1.1-rc.1")
	m.fails("p.T.M: removed") // the release is compared with what was before it
	m.write("", "## Unreleased\n\n"+strings.TrimSuffix(first, "\n")+"\n\n"+told)
	m.commit()
	m.git("tag", "-f", "v0.1.0")
	m.passes("1 " + compared) // nor does it need a tag of an older one
	m.write(with, first)
	m.fails("\"### New API\" of \"## Unreleased\"") // after the release: M is new
	m.write(with, "## Unreleased\n\n### New API\n\n- `p.T.M`.\n\n"+first)
	m.commit()
	m.passes("compared with v0.1.0 ")
	m.git("tag", "v0.2.0")
	m.fails("no section for the tag v0.2.0")
	m.write(with, "## v0.2.0 — 2026-02-01\n\n### New API\n\n- `p.T.M`.\n\n"+first)
	m.commit()
	m.git("tag", "-f", "v0.2.0")
	m.passes("compared with v0.1.0 ")
	m.git("tag", "-d", "v0.1.0", "v0.2.0")
	m.passes("!! THE API WAS NOT COMPARED: CHANGELOG.md knows releases")
}

func TestAnotherBaseLeavesOlderEntriesAlone(t *testing.T) {
	m := makeRepository(t)
	m.write(without, loud)
	m.commit()
	m.passes("0 "+compared, "SERVICEPLANE_API_BASE=HEAD")
	m.passes("!! THE API WAS NOT COMPARED: commit nowhere is not", "SERVICEPLANE_API_BASE=nowhere")
}

func TestWithoutHistoryOnlyTheChangelogIsJudged(t *testing.T) {
	m := makeRepository(t)
	m.write(without, loud)
	if err := os.RemoveAll(filepath.Join(m.dir, ".git")); err != nil {
		t.Fatal(err)
	}
	m.passes("!! THE API WAS NOT COMPARED: there is no history here.\nthe changelog is in order\n")
	m.write("", "## Soon\n")
	m.fails("\"## Soon\" should be")

	m.write("", quiet) // in a directory of a repository of somebody else
	command(t, filepath.Dir(m.dir), "git", "init", "-q")
	m.passes("!! THE API WAS NOT COMPARED: there is no history here.")
}

func TestABaseThatIsNowhereIsNotCompared(t *testing.T) {
	m := makeRepository(t)
	m.firstBase(strings.Repeat("0", 40))
	m.write(without, quiet)
	m.passes("!! THE API WAS NOT COMPARED: commit 0000")
}

func TestAShallowCloneIsCompleted(t *testing.T) {
	m := makeRepository(t)
	m.write(without, quiet)
	m.commit()
	m.clone(m.dir).fails("p.T.M: removed")

	orphan := m.clone(m.dir)
	orphan.git("remote", "set-url", "origin", filepath.Join(t.TempDir(), "gone"))
	orphan.passes("!! THE API WAS NOT COMPARED: commit ")

	m.git("tag", "v0.1.0") // the clone has it, and need not ask
	m.write("", "## Unreleased\n\n## v0.1.0 — 2026-01-31\n")
	m.commit()
	tagged := m.clone(m.dir)
	tagged.passes("compared with v0.1.0 ")
}

// environment is ours, without what git or the script would take from it.
func environment() []string {
	env := []string{
		"GIT_CONFIG_GLOBAL=" + os.DevNull, "GIT_CONFIG_NOSYSTEM=1", "SERVICEPLANE_API_BASE=",
		"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.com", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.com",
	}
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "GIT_") && !strings.HasPrefix(variable, "SERVICEPLANE_API_BASE=") {
			env = append(env, variable)
		}
	}
	return env
}

func command(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir, cmd.Env = dir, environment()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// write writes the files whose content is not empty.
func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		file := filepath.Join(dir, name)
		if text == "" {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
