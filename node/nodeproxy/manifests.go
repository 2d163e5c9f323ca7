package nodeproxy

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

// key identifies an object.
type key struct{ kind, namespace, name string }

func keyOf(v manifest.Value) key {
	return key{v.GetObjectKind().GroupVersionKind().Kind, v.GetNamespace(), v.GetName()}
}

// String is "kind namespace/name".
func (k key) String() string {
	return k.kind + " " + strings.TrimPrefix(k.namespace+"/"+k.name, "/")
}

// manifests holds the objects of the last valid version of each file in a directory.
type manifests struct {
	path  string
	log   *zap.Logger
	files map[string]*file // by name
	// duplicates holds the logged messages about objects that are in two places.
	duplicates map[string]bool
}

// file is the state of one file.
type file struct {
	digest  [sha256.Size]byte
	failure lastFailure       // of the last read
	objects []manifest.Object // of the last valid version
	emptied time.Time         // when it became empty, while its objects stay
	changed int               // number of reads in a row during which it was written
}

// mostChanges bounds the reads in a row that may see a file change before it is logged.
const mostChanges = 5

// emptyGrace is how long the objects of a file stay after it became empty: many programs
// truncate a file before they write it.
const emptyGrace = 5 * time.Second

func newManifests(path string, log *zap.Logger) *manifests {
	return &manifests{path: path, log: log, files: map[string]*file{}, duplicates: map[string]bool{}}
}

// read reads the directory. A file that cannot be read, or is invalid, keeps its objects.
// It returns the pause until the next read. The error is about the directory, or of ctx.
func (m *manifests) read(ctx context.Context) (again time.Duration, err error) {
	files, err := manifest.ReadDir(ctx, m.path)
	if err != nil {
		return 0, fmt.Errorf("read directory of manifests: %w", err)
	}
	there := map[string]bool{}
	again = rereadInterval
	for f := range files {
		if errors.Is(f.Err, os.ErrNotExist) {
			continue // a link without a target, or just deleted
		}
		there[f.Name] = true
		again = min(again, m.update(f))
	}
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	maps.DeleteFunc(m.files, func(name string, _ *file) bool { return !there[name] })
	return again, nil
}

// update stores the content of a file, and returns the pause until the next read.
func (m *manifests) update(read manifest.File) (again time.Duration) {
	f := m.files[read.Name]
	if f == nil {
		f = &file{}
		m.files[read.Name] = f
	}
	switch {
	case errors.Is(read.Err, manifest.ErrChanging) && f.changed < mostChanges:
		f.changed++
		return retryInterval
	case read.Err != nil:
		if f.failure.isNew(read.Err) {
			m.log.Error("manifest cannot be read, its objects stay", zap.Error(read.Err))
		}
		return rereadInterval
	}
	f.failure, f.changed = "", 0
	if digest := sha256.Sum256(read.Text); f.digest != digest {
		f.digest = digest
		m.parse(f, read.Name, read.Text)
	}
	return m.expire(f, read.Name)
}

// expire removes the objects of a file that has been empty for emptyGrace.
func (m *manifests) expire(f *file, name string) (again time.Duration) {
	if f.emptied.IsZero() {
		return rereadInterval
	}
	if left := emptyGrace - time.Since(f.emptied); left > 0 {
		return left
	}
	m.log.Warn("manifest is empty, its objects are removed", zap.String("file", name))
	f.objects, f.emptied = nil, time.Time{}
	return rereadInterval
}

// parse stores the objects of a file, unless it is invalid.
func (m *manifests) parse(f *file, name string, text []byte) {
	objects, errs := manifest.Parse(name, text)
	var invalid, foreign []string
	for _, err := range errs {
		if errors.Is(err, manifest.ErrKind) {
			foreign = append(foreign, err.Error())
		} else {
			invalid = append(invalid, err.Error())
		}
	}
	if len(foreign) > 0 {
		m.log.Warn("objects of other kinds are ignored", zap.Strings("where", foreign))
	}
	if len(invalid) > 0 {
		m.log.Error("manifest is invalid, its previous objects stay", zap.Strings("where", invalid))
		f.emptied = time.Time{}
		return
	}
	if len(objects) > 0 || len(f.objects) == 0 {
		f.objects, f.emptied = objects, time.Time{}
		return
	}
	if f.emptied.IsZero() {
		f.emptied = time.Now()
		m.log.Warn("manifest is empty, its objects stay for a while", zap.String("file", name), zap.Duration("for", emptyGrace))
	}
}

// objects returns all objects. An object that is in several places is read from the
// first one, in the order of the files' names.
func (m *manifests) objects() map[key]manifest.Value {
	all, first, duplicates := map[key]manifest.Value{}, map[key]string{}, map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(m.files)) {
		for _, object := range m.files[name].objects {
			k, place := keyOf(object.Value), fmt.Sprintf("%s:%d", name, object.Line)
			if first[k] == "" {
				all[k], first[k] = object.Value, place
				continue
			}
			line := fmt.Sprintf("%s: %s is at %s already", place, k, first[k])
			if duplicates[line] = true; !m.duplicates[line] {
				m.log.Warn("duplicate object is ignored", zap.String("where", line))
			}
		}
	}
	m.duplicates = duplicates
	return all
}
