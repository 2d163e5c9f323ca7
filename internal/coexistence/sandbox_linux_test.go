package coexistence

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// The releases of Debian whose programs the tests run.
const (
	bullseye = "bullseye"
	bookworm = "bookworm"
	trixie   = "trixie"
)

// roots returns the directory with a root of each release.
var roots = sync.OnceValues(func() (string, error) { // read-only
	if os.Getuid() != 0 {
		return "", errors.New("want root, to build roots of Debian")
	}
	var stderr strings.Builder
	script := exec.Command("../../hack/foreign.sh")
	script.Stderr = &stderr
	out, err := script.Output()
	if err != nil {
		return "", fmt.Errorf("hack/foreign.sh: %w\n%s", err, &stderr)
	}
	return strings.TrimSpace(string(out)), nil
})

// mustRoots skips the test where the programs cannot be had, unless tests may not be skipped.
func mustRoots(t *testing.T) string {
	t.Helper()
	dir, err := roots()
	switch {
	case err == nil:
	case os.Getenv(netnstest.RequireKernel) != "1":
		t.Skip(err)
	default:
		t.Fatal(err)
	}
	return dir
}

// doer runs functions in a network namespace.
type doer interface{ Do(f func() error) error }

// sandbox is a network namespace, and a root of a release whose files it changes for itself
// alone.
type sandbox struct {
	t      *testing.T
	in     doer
	target string // process that keeps the mount namespace; empty: the files are those of the machine
	root   string // in that mount namespace
}

// enclose makes a writable layer over a root, and the file systems that programs expect.
const enclose = `set -eu
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" overlay "$1/root"
mount --rbind /proc "$1/root/proc"
mount --rbind /dev "$1/root/dev"
mount -t tmpfs tmpfs "$1/root/run"
mount -t tmpfs tmpfs "$1/root/tmp"
echo ready
read -r end || true
`

func newSandbox(t *testing.T, release string, in doer) *sandbox {
	t.Helper()
	dir, err := os.MkdirTemp("", "sandbox") //nolint:usetesting // t.TempDir has the test's name, and mount options no commas
	check(t, err)
	t.Cleanup(func() { check(t, os.Remove(dir)) }) // empty, outside of the mount namespace
	s := &sandbox{t: t, in: in, root: filepath.Join(dir, "root")}
	holder := exec.CommandContext(context.WithoutCancel(t.Context()), "sh", "-c", enclose, "sh", dir, filepath.Join(mustRoots(t), release))
	holder.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	var stderr strings.Builder
	holder.Stderr = &stderr
	end, err := holder.StdinPipe()
	check(t, err)
	out, err := holder.StdoutPipe()
	check(t, err)
	check(t, holder.Start())
	t.Cleanup(func() {
		_ = end.Close()
		_ = holder.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("enclose a root of %s: %q, %v\n%s", release, line, err, &stderr)
	}
	s.target = strconv.Itoa(holder.Process.Pid)
	return s
}

// command returns a command that runs in the sandbox when s.in.Do starts it.
func (s *sandbox) command(args ...string) *exec.Cmd {
	if s.target == "" {
		return exec.CommandContext(s.t.Context(), args[0], args[1:]...)
	}
	all := append([]string{"--mount", "--target", s.target, "chroot", s.root}, args...)
	c := exec.CommandContext(s.t.Context(), "nsenter", all...)
	c.Env = []string{"PATH=/usr/sbin:/usr/bin:/usr/lib/podman:/usr/lib/cni", "LC_ALL=C", "DBUS_SYSTEM_BUS_ADDRESS=unix:path=/run/bus"}
	return c
}

// try runs a shell script, and returns its output.
func (s *sandbox) try(script string) (string, error) {
	return s.tryWith(s.command("sh", "-c", "set -eu\n"+script), nil)
}

func (s *sandbox) tryWith(c *exec.Cmd, stdin io.Reader) (string, error) {
	var stdout, stderr strings.Builder
	c.Stdin, c.Stdout, c.Stderr = stdin, &stdout, &stderr
	if err := s.in.Do(c.Run); err != nil {
		return stdout.String(), fmt.Errorf("%w\n%s%s", err, &stdout, &stderr)
	}
	return stdout.String(), nil
}

// run is try, and fails the test if the script fails.
func (s *sandbox) run(script string) string {
	s.t.Helper()
	out, err := s.try(script)
	if err != nil {
		s.t.Fatalf("%s: %v", script, err)
	}
	return out
}

// write makes a file in the sandbox.
func (s *sandbox) write(name, text string) {
	s.t.Helper()
	if _, err := s.tryWith(s.command("sh", "-c", `mkdir -p "${1%/*}"; cat >"$1"`, "sh", name), strings.NewReader(text)); err != nil {
		s.t.Fatalf("write %s: %v", name, err)
	}
}

// daemon starts a program that runs until the test ends.
func (s *sandbox) daemon(args ...string) {
	s.t.Helper()
	c := s.command(args...)
	c.Cancel = func() error { return c.Process.Signal(syscall.SIGTERM) }
	var out strings.Builder
	c.Stdout, c.Stderr = &out, &out
	check(s.t, s.in.Do(c.Start))
	s.t.Cleanup(func() {
		_ = c.Process.Signal(syscall.SIGTERM)
		_ = c.Wait() // a signal ended it
		if s.t.Failed() {
			s.t.Logf("%v:\n%s", args, &out)
		}
	})
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
