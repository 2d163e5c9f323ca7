package userspace

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

const (
	// asNobody is set in the child process of TestAnOrdinaryUserCanProxy.
	asNobody = "SERVICEPLANE_TEST_AS_NOBODY"
	nobody   = 65534
	// longTests need no privilege either, but take long and need many descriptors.
	longTests = "^(TestIdleConnectionsAreHeld|TestShortConnectionsLeaveNothing)$"
)

// This runs the package's other tests again, as a user without privileges. Only tests
// with portals need privileges; they say why they are skipped.
func TestAnOrdinaryUserCanProxy(t *testing.T) {
	if os.Getenv(asNobody) != "" {
		return
	}
	if os.Getuid() != 0 {
		t.Skip("all tests run as an ordinary user already")
	}
	dir := privateDir(t)
	cmd := exec.CommandContext(t.Context(), copyProgram(t, dir), "-test.v", "-test.skip="+longTests)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), asNobody+"=1", netnstest.RequireKernel+"=", "TMPDIR="+dir, "GOCOVERDIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("as nobody: %v\n%s", err, failures(string(out)))
	}
	for _, name := range []string{
		"TestConnectionsGoRoundAndEndHalfByHalf", "TestDatagramsOfAnySize", "TestVIPsAreListenedOnAtTheirOwnPorts",
		"TestNodePortsListenWhereTheyAreAccepted", "TestAnswersComeFromTheAddressThatWasAsked", "TestEveryOutcomeOfTCPIsReported",
	} {
		if !strings.Contains(string(out), "--- PASS: "+name+" ") {
			t.Errorf("as nobody: %s has not passed\n%s", name, out)
		}
	}
	mustExplainSkips(t, string(out))
}

// failures returns, of the verbose output of tests, what those that failed and their subtests have
// printed, and the end, where a panic or a leak of goroutines would be. All of it is too long to
// find them.
func failures(out string) string {
	const last = 60 // lines
	lines := strings.SplitAfter(out, "\n")
	of, by, failed := "", map[string][]string{}, []string{}
	said := regexp.MustCompile(`^=== (?:RUN|CONT|NAME|PAUSE) +([^\s/]+)|^ *--- (?:PASS|FAIL|SKIP): ([^\s/]+)`)
	for _, line := range lines {
		if m := said.FindStringSubmatch(line); m != nil {
			of = m[1] + m[2]
		}
		if name, ok := strings.CutPrefix(line, "--- FAIL: "); ok {
			name, _, _ = strings.Cut(name, " ")
			failed = append(failed, name)
		}
		by[of] = append(by[of], line)
	}
	var b strings.Builder
	for _, name := range failed {
		b.WriteString(strings.Join(by[name], ""))
	}
	b.WriteString("the end of the output:\n")
	b.WriteString(strings.Join(lines[max(0, len(lines)-last):], ""))
	return b.String()
}

// TestFailuresAreFound: the reason of a failure is in what is printed of a long output.
func TestFailuresAreFound(t *testing.T) {
	out := "=== RUN   TestA\n    a.go:1: boring\n=== RUN   TestB\n=== RUN   TestB/one\n=== CONT  TestA\n=== NAME  TestB/one\n    b.go:7: the reason\n" +
		"--- FAIL: TestB (0.00s)\n    --- FAIL: TestB/one (0.00s)\n--- PASS: TestA (0.00s)\n" + strings.Repeat("=== RUN   TestC\n--- PASS: TestC (0.00s)\n", 100) +
		"FAIL\ngoleak: Errors on successful test run\n"
	got := failures(out)
	if !strings.Contains(got, "the reason") || !strings.Contains(got, "goleak") || strings.Contains(got, "boring") || strings.Count(got, "\n") > 80 {
		t.Errorf("of the output remains\n%s", got)
	}
}

// mustExplainSkips checks that only tests with network namespaces are skipped.
func mustExplainSkips(t *testing.T, out string) {
	t.Helper()
	for line := range strings.Lines(out) {
		skipped, ok := strings.CutPrefix(strings.TrimSpace(line), "--- SKIP: ")
		if !ok {
			continue
		}
		name, _, _ := strings.Cut(skipped, " ")
		said := regexp.MustCompile(`(?m)^=== (RUN|CONT|NAME) +` + regexp.QuoteMeta(name) + `\n .*: needs `)
		if !said.MatchString(out) {
			t.Errorf("as nobody: %s is skipped and does not say what it needs\n%s", name, out)
		}
	}
}

// privateDir returns a directory of user nobody.
func privateDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "nobody") //nolint:usetesting // nobody else can enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove: %v", err)
		}
	})
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	return dir
}

// copyProgram copies the test's program to where user nobody may run it.
func copyProgram(t *testing.T, dir string) string {
	t.Helper()
	program, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(dir, "test")
	if err := os.WriteFile(to, program, 0o755); err != nil {
		t.Fatal(err)
	}
	return to
}
