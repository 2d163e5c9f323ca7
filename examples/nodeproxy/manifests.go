package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/internal/manifest"
)

// key is what an object is known by.
type key struct{ kind, namespace, name string }

func keyOf(v manifest.Value) key {
	return key{v.GetObjectKind().GroupVersionKind().Kind, v.GetNamespace(), v.GetName()}
}

// String is "kind namespace/name".
func (k key) String() string {
	return k.kind + " " + strings.TrimPrefix(k.namespace+"/"+k.name, "/")
}

// manifests is what the files of a directory hold, and held before they broke.
type manifests struct {
	path  string
	log   *zap.Logger
	files map[string]*file // by name
	// twice is where objects are that are in an earlier place too, as was logged.
	twice map[string]bool
}

// file is what was read of one file.
type file struct {
	digest  [sha256.Size]byte
	failure string            // why it could not be read, when it could not
	objects []manifest.Object // of the last version that was not broken
	emptied time.Time         // since when it holds nothing, while objects are kept
	changed int               // how many reads in a row it changed during
}

// mostChanges is how many reads in a row a file may change during before that is logged.
const mostChanges = 5

// emptyFor is how long a file may hold nothing before what it held is removed:
// many programs empty a file before they write it.
const emptyFor = 5 * time.Second

func newManifests(path string, log *zap.Logger) *manifests {
	return &manifests{path: path, log: log, files: map[string]*file{}, twice: map[string]bool{}}
}

// read reads the files that have changed. A file that cannot be read or is broken
// keeps what it held. It returns when to read again at the latest. The error is the
// directory's, or ctx's.
func (m *manifests) read(ctx context.Context) (again time.Duration, err error) {
	files, err := manifest.ReadDir(ctx, m.path)
	if err != nil {
		return 0, fmt.Errorf("read directory of manifests: %w", err)
	}
	there := map[string]bool{}
	again = reread
	for f := range files {
		if errors.Is(f.Err, os.ErrNotExist) {
			continue // a link to nothing, or gone meanwhile
		}
		there[f.Name] = true
		again = min(again, m.take(f))
	}
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	maps.DeleteFunc(m.files, func(name string, _ *file) bool { return !there[name] })
	return again, nil
}

// take takes over what was read of a file, and returns when to read it again.
func (m *manifests) take(read manifest.File) (again time.Duration) {
	f := m.files[read.Name]
	if f == nil {
		f = &file{}
		m.files[read.Name] = f
	}
	switch {
	case errors.Is(read.Err, manifest.ErrChanging) && f.changed < mostChanges:
		f.changed++
		return retry
	case read.Err != nil:
		if f.failure != read.Err.Error() {
			m.log.Error("manifest cannot be read, what it held stays", zap.Error(read.Err))
		}
		f.failure = read.Err.Error()
		return reread
	}
	f.failure, f.changed = "", 0
	if digest := sha256.Sum256(read.Text); f.digest != digest {
		f.digest = digest
		m.parse(f, read.Name, read.Text)
	}
	return m.age(f, read.Name)
}

// age removes what a file held that has been empty for emptyFor.
func (m *manifests) age(f *file, name string) (again time.Duration) {
	if f.emptied.IsZero() {
		return reread
	}
	if left := emptyFor - time.Since(f.emptied); left > 0 {
		return left
	}
	m.log.Warn("manifest is empty, what it held is removed", zap.String("file", name))
	f.objects, f.emptied = nil, time.Time{}
	return reread
}

// parse takes over what is in a file, unless it is broken.
func (m *manifests) parse(f *file, name string, text []byte) {
	objects, errs := manifest.Parse(name, text)
	var broken, foreign []string
	for _, err := range errs {
		if errors.Is(err, manifest.ErrKind) {
			foreign = append(foreign, err.Error())
		} else {
			broken = append(broken, err.Error())
		}
	}
	if len(foreign) > 0 {
		m.log.Warn("objects of other kinds are ignored", zap.Strings("where", foreign))
	}
	if len(broken) > 0 {
		m.log.Error("manifest is broken, what it held stays", zap.Strings("where", broken))
		f.emptied = time.Time{}
		return
	}
	if len(objects) > 0 || len(f.objects) == 0 {
		f.objects, f.emptied = objects, time.Time{}
		return
	}
	if f.emptied.IsZero() {
		f.emptied = time.Now()
		m.log.Warn("manifest is empty now, what it held stays for "+emptyFor.String(), zap.String("file", name))
	}
}

// objects returns all objects. Of those in several places, the first one counts,
// in the order of the files' names.
func (m *manifests) objects() map[key]manifest.Value {
	all, first, twice := map[key]manifest.Value{}, map[key]string{}, map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(m.files)) {
		for _, object := range m.files[name].objects {
			k, place := keyOf(object.Value), fmt.Sprintf("%s:%d", name, object.Line)
			if first[k] == "" {
				all[k], first[k] = object.Value, place
				continue
			}
			line := fmt.Sprintf("%s: %s is at %s already", place, k, first[k])
			if twice[line] = true; !m.twice[line] {
				m.log.Warn("object is ignored", zap.String("where", line))
			}
		}
	}
	m.twice = twice
	return all
}
