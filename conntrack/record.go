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
type record struct {
	path string
	// unsaved are the changes that could not be written to the file. They are kept until they can.
	unsaved []change
}

// errBroken means that the text of a record has no meaning: it is lost.
var errBroken = errors.New("it is not a record")

// load returns the changes of the file, if it can be read, and those that are not in it yet.
func (r *record) load() ([]change, error) {
	if r.path == "" {
		return nil, nil
	}
	changes, err := r.read()
	for _, c := range r.unsaved {
		if i := slices.IndexFunc(changes, c.samePath); i >= 0 {
			c.Old = changes[i].Old // the value before this instance
		}
		changes = merge(changes, []change{c})
	}
	if err != nil {
		err = fmt.Errorf("read record of kernel settings: %w", err)
	}
	return changes, err
}

func (r *record) read() (changes []change, err error) {
	text, err := os.ReadFile(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &changes); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", r.path, errBroken, err)
	}
	return changes, nil
}

// save writes all changes to the file, or keeps them for the next time. Without changes it removes
// the file, and its directory if that is empty.
func (r *record) save(changes []change) error {
	if r.path == "" {
		return nil
	}
	r.unsaved = changes
	err := r.write(changes)
	if err == nil {
		r.unsaved = nil
	}
	return err
}

func (r *record) write(changes []change) error {
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
	err = os.WriteFile(fresh, append(text, '\n'), 0o600)
	if err == nil {
		err = os.Rename(fresh, r.path)
	}
	if err != nil {
		_ = os.Remove(fresh) // a part of it, if the disk is full
		return fmt.Errorf("write record of kernel settings: %w", err)
	}
	return nil
}

func (r *record) remove() error {
	if err := os.Remove(r.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove record of kernel settings: %w", err)
	}
	_ = os.Remove(filepath.Dir(r.path)) // fails if it holds other records
	return nil
}
