package bpftest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// FileSystem mounts a BPF file system until the test ends.
func FileSystem(tb testing.TB) string {
	tb.Helper()
	return mount(tb, "bpf")
}

func mount(tb testing.TB, kind string) string {
	tb.Helper()
	dir := tb.TempDir()
	err := unix.Mount("none", dir, kind, 0, "")
	if errors.Is(err, unix.EPERM) {
		err = fmt.Errorf("%w: mount a file system of kind %s: %w", netns.ErrPrivilege, kind, err)
	}
	netnstest.Check(tb, err)
	tb.Cleanup(func() { netnstest.Check(tb, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

// NewCgroup makes a directory of cgroup v2 in which nobody is.
func NewCgroup(tb testing.TB) string {
	tb.Helper()
	dir := filepath.Join(mount(tb, "cgroup2"), fmt.Sprintf("serviceplane-test-%d-%d", os.Getpid(), time.Now().UnixNano()))
	netnstest.Check(tb, os.Mkdir(dir, 0o700))
	tb.Cleanup(func() {
		if !poll.Soon(func() bool { return os.Remove(dir) == nil }) { // its processes have just ended
			tb.Errorf("%s is in use", dir)
		}
	})
	return dir
}

// OwnCgroup is the directory of this process in cgroup v2.
func OwnCgroup(tb testing.TB) string {
	tb.Helper()
	root := mount(tb, "cgroup2")
	text, err := os.ReadFile("/proc/self/cgroup")
	netnstest.Check(tb, err)
	for line := range strings.Lines(string(text)) {
		if path, is := strings.CutPrefix(strings.TrimSpace(line), "0::"); is {
			return filepath.Join(root, path)
		}
	}
	tb.Fatal("this process is in no cgroup of version 2")
	return ""
}
