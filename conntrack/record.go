package conntrack

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// change is a kernel setting that we have changed.
type change struct {
	Path string `json:"path"` // from the root
	Old  string `json:"old"`  // before this instance
	New  string `json:"new"`  // by this instance
}

func (c change) samePath(other change) bool { return c.Path == other.Path }

// merge adds changes, or replaces those of the same path.
func merge(into, changes []change) []change {
	into = slices.Clone(into)
	for _, c := range changes {
		if i := slices.IndexFunc(into, c.samePath); i >= 0 {
			into[i] = c
		} else {
			into = append(into, c)
		}
	}
	return into
}

// record keeps changes in a file, so that they survive restarts. Without a path it keeps
// nothing.
type record struct{ path string }

// load returns no changes if there is no record.
func (r record) load() ([]change, error) {
	if r.path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read record of kernel settings: %w", err)
	}
	var changes []change
	if err := json.Unmarshal(text, &changes); err != nil {
		return nil, fmt.Errorf("read record of kernel settings %s: %w", r.path, err)
	}
	return changes, nil
}

// save writes all changes to the file. Without changes it removes the file, and its
// directory if that is empty.
func (r record) save(changes []change) error {
	if r.path == "" {
		return nil
	}
	if len(changes) == 0 {
		return r.remove()
	}
	text, err := json.MarshalIndent(changes, "", "\t")
	if err != nil {
		return fmt.Errorf("write record of kernel settings: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(r.path), 0o755); err != nil {
		return fmt.Errorf("write record of kernel settings: %w", err)
	}
	fresh := r.path + ".new"
	if err := os.WriteFile(fresh, append(text, '\n'), 0o600); err != nil {
		return fmt.Errorf("write record of kernel settings: %w", err)
	}
	if err := os.Rename(fresh, r.path); err != nil {
		return fmt.Errorf("write record of kernel settings: %w", err)
	}
	return nil
}

func (r record) remove() error {
	if err := os.Remove(r.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove record of kernel settings: %w", err)
	}
	_ = os.Remove(filepath.Dir(r.path)) // fails if it holds other records
	return nil
}
