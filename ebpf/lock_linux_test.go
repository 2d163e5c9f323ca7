package ebpf

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// The lock ends with its owner, also while a child of the process has not closed the file yet, as it does between
// fork and exec.
func TestTheLockEndsWithItsOwner(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first, second := &programs{dir: dir}, &programs{dir: dir}
	if err := first.open(dir); err != nil {
		t.Fatal(err)
	}
	inherited, err := unix.Dup(int(first.lock.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(inherited) }()
	if err := second.open(dir); !errors.Is(err, proxier.ErrInUse) {
		t.Errorf("while the first one has the lock: error %v, want ErrInUse", err)
	}
	if err := second.close(); err != nil {
		t.Error(err)
	}
	if err := first.close(); err != nil {
		t.Error(err)
	}
	if err := second.open(dir); err != nil {
		t.Errorf("after the first one: %v", err)
	}
	if err := second.close(); err != nil {
		t.Error(err)
	}
}

// TestNoFolderIsLeft: whichever folders another program has removed, or a process that died has not, none is
// left.
func TestNoFolderIsLeft(t *testing.T) {
	t.Parallel()
	config := Config{Sockets: Sockets{BPFFS: bpftest.FileSystem(t)}}.WithDefaults()
	for _, family := range config.Families {
		for dir := dirOf(&config, family); dir != config.Sockets.BPFFS; dir = filepath.Dir(dir) {
			netnstest.Check(t, os.MkdirAll(dir, 0o700))
			netnstest.Check(t, RemoveSockets(config))
			if _, err := os.Stat(filepath.Join(config.Sockets.BPFFS, "serviceplane")); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("something of %s is left: %v", dir, err)
			}
		}
	}
}
