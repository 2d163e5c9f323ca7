package manifest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Limits in bytes. Objects need many times as much memory as their text.
const (
	MaxFile      = 16 << 20
	MaxDirectory = 64 << 20 // all files of a directory together
)

// ErrChanging is the error of a file that was written while it was read. A retry may
// succeed.
var ErrChanging = errors.New("the file was written while it was read")

// File is the content of a file in a directory.
type File struct {
	Name string // without the directory
	Text []byte
	Err  error // why there is no Text; fs.ErrNotExist if the file was just deleted
}

// ReadDir reads the manifests in a directory, one by one in the order of their names. It
// skips hidden files: editors write them, and "..data" is in mounted ConfigMaps. The
// error is about the directory; a file that cannot be read has an Err. If ctx ends, the
// sequence ends with the error of ctx as Err.
func ReadDir(ctx context.Context, path string) (iter.Seq[File], error) {
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	return func(yield func(File) bool) {
		left := int64(MaxDirectory)
		for _, entry := range entries {
			name := entry.Name()
			if !IsName(name) || strings.HasPrefix(name, ".") {
				continue
			}
			f := File{Name: name}
			f.Text, f.Err = read(ctx, filepath.Join(path, name), left)
			left -= int64(len(f.Text))
			if !yield(f) || ctx.Err() != nil {
				return
			}
		}
	}, nil
}

// longestRead bounds the wait for files that the kernel generates, such as /proc/kmsg.
// Files on disks have no read deadline.
const longestRead = time.Second

// read reads a regular file, or the target of a link to one. It does not open files of
// other kinds: a FIFO would block, and a device may react. O_NONBLOCK covers a FIFO that
// replaces the file between Stat and Open.
func read(ctx context.Context, path string, left int64) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if err := check(path, info, left); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // opened for reading
	before, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if err := check(path, before, left); err != nil {
		return nil, err
	}
	_ = file.SetReadDeadline(time.Now().Add(longestRead)) // fails for files on disks
	var text bytes.Buffer
	if _, err := io.Copy(&text, io.LimitReader(cancellable(ctx, file), min(MaxFile, left)+1)); err != nil {
		return nil, err
	}
	if err := checkSize(path, int64(text.Len()), left); err != nil {
		return nil, err
	}
	after, err := file.Stat()
	if err == nil && (after.Size() != before.Size() || !after.ModTime().Equal(before.ModTime())) {
		err = fmt.Errorf("read %s: %w", path, ErrChanging)
	}
	return text.Bytes(), err
}

// check refuses files that are not regular, or too large.
func check(path string, info fs.FileInfo, left int64) error {
	if kind := info.Mode().Type(); kind != 0 {
		return fmt.Errorf("read %s: it is a %s: want a regular file, or a link to one", path, nameOf(kind))
	}
	return checkSize(path, info.Size(), left)
}

func nameOf(kind fs.FileMode) string {
	switch {
	case kind.IsDir():
		return "directory"
	case kind&fs.ModeNamedPipe != 0:
		return "FIFO"
	case kind&fs.ModeSocket != 0:
		return "socket"
	case kind&fs.ModeDevice != 0:
		return "device"
	default:
		return "file of mode " + kind.String()
	}
}

func checkSize(path string, size, left int64) error {
	switch {
	case size > MaxFile:
		return fmt.Errorf("read %s: it is larger than %d MiB: split it", path, MaxFile>>20)
	case size > left:
		return fmt.Errorf("read %s: this file and those before it, by name, are larger than %d MiB together: remove some", path, MaxDirectory>>20)
	default:
		return nil
	}
}

// reader implements io.Reader.
type reader func([]byte) (int, error)

func (r reader) Read(p []byte) (int, error) { return r(p) }

// cancellable reads until ctx ends.
func cancellable(ctx context.Context, from io.Reader) io.Reader {
	return reader(func(p []byte) (int, error) {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		return from.Read(p)
	})
}
