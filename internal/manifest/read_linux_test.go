package manifest

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), 0o600))
}

// sparse creates a file of a size that occupies no disk.
func sparse(t *testing.T, path string, size int64) {
	t.Helper()
	write(t, path, "")
	must(t, os.Truncate(path, size))
}

// TestOnlyRegularFilesAreRead: the errors of other files name the kind, and reading them
// does not block.
func TestOnlyRegularFilesAreRead(t *testing.T) {
	outside := t.TempDir()
	write(t, outside+"/target", "text")
	for name, c := range map[string]struct {
		make func(path string) error
		want string // in the error; empty for none
	}{
		"file":             {func(p string) error { return os.WriteFile(p, []byte("text"), 0o600) }, ""},
		"link":             {func(p string) error { return os.Symlink(outside+"/target", p) }, ""},
		"fifo":             {func(p string) error { return syscall.Mkfifo(p, 0o600) }, "is a FIFO: want a regular file"},
		"link to a device": {func(p string) error { return os.Symlink("/dev/zero", p) }, "is a device"},
		"block device":     {func(p string) error { return syscall.Mknod(p, syscall.S_IFBLK|0o600, 7<<8) }, "is a device"},
		"directory":        {func(p string) error { return os.Mkdir(p, 0o700) }, "is a directory"},
		"link to itself":   {func(p string) error { return os.Symlink(p, p) }, "too many levels"},
		"link to nothing":  {func(p string) error { return os.Symlink(outside+"/gone", p) }, "no such file"},
		"sparse":           {func(p string) error { sparse(t, p, 2<<30); return nil }, "larger than 16 MiB"},
		"socket": {func(p string) error {
			l, err := net.Listen("unix", p)
			if err == nil {
				t.Cleanup(func() { _ = l.Close() })
			}
			return err
		}, "is a socket"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := c.make(dir + "/a.yaml"); errors.Is(err, fs.ErrPermission) {
				t.Skip(err)
			} else if err != nil {
				t.Fatal(err)
			}
			write(t, dir+"/b.yaml", "after")
			files := readAll(t, dir)
			if len(files) != 2 || files[0].Name != "a.yaml" || string(files[1].Text) != "after" {
				t.Fatalf("files %v, want a.yaml, and b.yaml with its text", files)
			}
			f := files[0]
			if c.want == "" && (f.Err != nil || string(f.Text) != "text") {
				t.Errorf("read %q, %v, want %q", f.Text, f.Err, "text")
			}
			if c.want != "" && (f.Err == nil || !strings.Contains(f.Err.Error(), c.want) || !strings.Contains(f.Err.Error(), "a.yaml")) {
				t.Errorf("read: %v, want an error with the file and %q", f.Err, c.want)
			}
		})
	}
}

func readAll(t *testing.T, dir string) (files []File) {
	t.Helper()
	all, err := ReadDir(t.Context(), dir)
	must(t, err)
	for f := range all {
		files = append(files, f)
	}
	return files
}

// TestTheSizeOfADirectoryIsLimited: the files that come first by name are read.
func TestTheSizeOfADirectoryIsLimited(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"1.yaml", "2.yaml", "3.yaml", "4.yaml"} {
		sparse(t, filepath.Join(dir, name), MaxFile)
	}
	sparse(t, dir+"/ignored.txt", MaxFile)
	sparse(t, dir+"/.hidden.yaml", MaxFile)
	write(t, dir+"/5.yaml", "x")
	write(t, dir+"/6.yaml", "")
	files := readAll(t, dir)
	if len(files) != 6 {
		t.Fatalf("%d files, want 6", len(files))
	}
	for i, f := range files {
		if tooMuch := i == 4; (f.Err != nil) != tooMuch || tooMuch && !strings.Contains(f.Err.Error(), "5.yaml: this file and those before it, by name, are larger than 64 MiB") {
			t.Errorf("%s: error %v, want one for 5.yaml only", f.Name, f.Err)
		}
	}
}

// actingContext calls act whenever Err is called.
type actingContext struct {
	context.Context //nolint:containedctx // a wrapper
	act             func()
}

func (c actingContext) Err() error { c.act(); return c.Context.Err() }

// Reading a file while it is written gives an error, and no mix of two versions.
func TestAFileWrittenWhileItIsRead(t *testing.T) {
	path := t.TempDir() + "/a.yaml"
	for name, act := range map[string]func(){
		"longer":  func() { write(t, path, strings.Repeat("x", 1<<20)) },
		"shorter": func() { must(t, os.Truncate(path, 10)) },
	} {
		write(t, path, strings.Repeat("x", 1<<18))
		if _, err := read(actingContext{t.Context(), act}, path, MaxDirectory); !errors.Is(err, ErrChanging) {
			t.Errorf("%s: read = %v, want %v", name, err, ErrChanging)
		}
	}
	if _, err := read(actingContext{t.Context(), func() { must(t, os.Truncate(path, MaxFile+1)) }}, path, MaxDirectory); err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("read = %v, want an error about the size", err)
	}
}

func TestReadingEndsWithItsContext(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/a.yaml", "text")
	write(t, dir+"/b.yaml", "text")
	ctx, stop := context.WithCancel(t.Context())
	stop()
	files, err := ReadDir(ctx, dir)
	must(t, err)
	n := 0
	for f := range files {
		if n++; !errors.Is(f.Err, context.Canceled) {
			t.Errorf("%s: %v, want %v", f.Name, f.Err, context.Canceled)
		}
	}
	if n != 1 {
		t.Errorf("%d files, want the first one only", n)
	}
}
