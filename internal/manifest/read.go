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

// What is read at most, in bytes. Objects in memory are many times as large as
// their text.
const (
	MaxFile      = 16 << 20
	MaxDirectory = 64 << 20 // all files of a directory together
)

// ErrChanging says that a file changed while it was read: read it again soon.
var ErrChanging = errors.New("the file changes while it is read")

// File is what was read of a file of a directory.
type File struct {
	Name string // without the directory
	Text []byte
	Err  error // why there is no Text; fs.ErrNotExist if the file has just gone
}

// ReadDir reads the manifests of a directory, one by one in the order of their
// names. Hidden files are none: they are editors' and, as "..data", those of a
// mounted ConfigMap. A file that cannot be read has its Err. The error is the
// directory's. The sequence ends early when ctx does, with ctx's error as Err.
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

// longestRead bounds the wait for a file that the kernel makes up as it is read,
// such as /proc/kmsg. It does not apply to files of a disk.
const longestRead = time.Second

// read reads a regular file, or what a link to one leads to. To open another kind
// may wait for somebody (a FIFO) or set something off (a device), so that such a
// file is not even opened; O_NONBLOCK is for the one that takes its place then.
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
	defer func() { _ = file.Close() }() // nothing was written
	before, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if err := check(path, before, left); err != nil {
		return nil, err
	}
	_ = file.SetReadDeadline(time.Now().Add(longestRead)) // files of a disk have none
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

// check refuses what is no regular file, and what is too large.
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

// reader is a function that reads.
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
