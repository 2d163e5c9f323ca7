package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

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
}

func newManifests(path string, log *zap.Logger) *manifests {
	return &manifests{path: path, log: log, files: map[string]*file{}, twice: map[string]bool{}}
}

// read reads the files that have changed. A file that is broken keeps what it
// held. The error is the directory's: nothing was read.
func (m *manifests) read() error {
	entries, err := os.ReadDir(m.path)
	if err != nil {
		return fmt.Errorf("read directory of manifests: %w", err)
	}
	there := map[string]bool{}
	for _, entry := range entries {
		name := entry.Name()
		// Hidden files are editors' and, as "..data", those of a mounted ConfigMap.
		if !manifest.IsName(name) || strings.HasPrefix(name, ".") || entry.IsDir() {
			continue
		}
		there[name] = m.readFile(name)
	}
	maps.DeleteFunc(m.files, func(name string, _ *file) bool { return !there[name] })
	return nil
}

// readFile returns false for a file that has gone meanwhile.
func (m *manifests) readFile(name string) (exists bool) {
	f := m.files[name]
	text, err := os.ReadFile(filepath.Join(m.path, name))
	if errors.Is(err, os.ErrNotExist) {
		return false
	}
	digest := sha256.Sum256(text)
	if f == nil {
		f = &file{}
		m.files[name] = f
	} else if err == nil && f.failure == "" && f.digest == digest {
		return true
	}
	if err != nil {
		if f.failure != err.Error() {
			m.log.Error("manifest cannot be read, what it held stays", zap.Error(err))
		}
		f.failure = err.Error()
		return true
	}
	f.failure, f.digest = "", digest
	m.parse(f, name, text)
	return true
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
		return
	}
	f.objects = objects
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
