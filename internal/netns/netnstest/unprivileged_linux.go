package netnstest

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// unprivileged is set in the child process of Unprivileged.
const unprivileged = "SERVICEPLANE_TEST_UNPRIVILEGED"

const nobody = 65534

// Unprivileged runs f, as the whole of a top-level test, without privileges: if this
// process runs as root, in a child process of user nobody.
func Unprivileged(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	if os.Getuid() != 0 || os.Getenv(unprivileged) == "1" {
		f(t)
		return
	}
	binary := copyForEverybody(t)
	cmd := exec.CommandContext(t.Context(), binary, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), unprivileged+"=1", "GOCOVERDIR="+t.TempDir())
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("as nobody: %v\n%s", err, out)
	}
}

// copyForEverybody copies the test's program to a directory where every user may run it.
func copyForEverybody(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "unprivileged") //nolint:usetesting // nobody else can enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove: %v", err)
		}
	})
	program, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(dir, "test")
	if err := os.WriteFile(binary, program, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return binary
}
