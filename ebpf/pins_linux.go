package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/bpfx"
)

// pinned returns the map of a name, which it creates if it does not exist or is another one.
func (p *programs) pinned(name string, want *ebpf.MapSpec) (*ebpf.Map, error) {
	path := p.pin(name)
	if m := compatible(path, want); m != nil {
		return m, nil
	}
	m, err := ebpf.NewMap(want)
	if err != nil {
		return nil, unavailable("create the map "+name, err)
	}
	if err := p.repinMap(m, path); err != nil {
		_ = bpfx.Close(m)
		return nil, err
	}
	return m, nil
}

// pinnedAll returns maps by their names, as pinned does.
func (p *programs) pinnedAll(objects *ebpf.CollectionSpec, names ...string) (all mapSet, err error) {
	all = mapSet{}
	for _, name := range names {
		if all[name], err = p.pinned(name, objects.Maps[name]); err != nil {
			return nil, errors.Join(err, all.close())
		}
	}
	return all, nil
}

// repinMap pins a map, whatever it believes of where it is pinned: folders are renamed, and others remove
// pins.
func (p *programs) repinMap(m *ebpf.Map, path string) error {
	clone, err := m.Clone()
	if err != nil {
		return fmt.Errorf("pin a map: %w", err)
	}
	return errors.Join(p.repin(clone, path), bpfx.Close(clone))
}

// repin replaces what is pinned at a path.
func (p *programs) repin(m interface{ Pin(path string) error }, path string) error {
	if err := p.change(func() error { return os.Remove(path) }); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unpin what was there before: %w", err)
	}
	if err := p.change(func() error { return m.Pin(path) }); err != nil {
		return fmt.Errorf("pin a map or program: %w", err)
	}
	return nil
}

// loadTables returns the pinned maps of the layer. ok is false if they are not all there: then
// nothing is known of what the programs have.
func (p *programs) loadTables() (m *tables, ok bool, err error) {
	objects, err := spec(p.family)
	if err != nil {
		return nil, false, err
	}
	all := mapSet{}
	for _, name := range layerMaps() {
		if all[name] = compatible(p.pin(name), objects.Maps[name]); all[name] == nil {
			return nil, false, all.close()
		}
	}
	m, err = mapped(p.family, all)
	return m, err == nil, err
}

// compatible returns the map that is pinned at a path, of any size; nil if it is missing, or another one.
func compatible(path string, like *ebpf.MapSpec) *ebpf.Map {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return nil
	}
	want := like.Copy()
	if want.MaxEntries == 1 { // chosen when it was created
		want.MaxEntries = m.MaxEntries()
	}
	if want.Compatible(m) != nil {
		_ = bpfx.Close(m)
		return nil
	}
	return m
}

func layerMaps() []string { return []string{mapFrontends, mapServices, mapEndpoints} }

func sharedMaps() []string { return []string{mapPeers, mapDatagrams, mapNamespaces, mapCounts} }

// mapsNew and linksNew are folders that get the names of others when they are complete.
const mapsFolder, mapsNew, linksNew = "maps", "maps-new", "links-new"

// pin is the path of a map.
func (p *programs) pin(name string) string {
	if slices.Contains(layerMaps(), name) {
		return filepath.Join(p.dir, mapsFolder, name)
	}
	return filepath.Join(p.dir, name)
}

// keepTables pins the maps of a layer, all at once: a process that begins finds the maps from before, or
// these, but no mixture.
func (p *programs) keepTables(tables mapSet) error {
	dir, next := filepath.Join(p.dir, mapsFolder), filepath.Join(p.dir, mapsNew)
	complete := true
	for name, one := range tables {
		complete = complete && isPinned(one, p.pin(name))
	}
	if complete {
		return nil
	}
	if err := os.MkdirAll(next, 0o700); err != nil {
		return fmt.Errorf("create a folder of pinned maps: %w", err)
	}
	for name, one := range tables {
		if err := p.repinMap(one, filepath.Join(next, name)); err != nil {
			return err
		}
	}
	return p.change(func() error {
		err := unix.Renameat2(unix.AT_FDCWD, next, unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE)
		if errors.Is(err, unix.ENOENT) { // there was none
			err = os.Rename(next, dir)
		}
		if err != nil {
			return fmt.Errorf("replace the folder of pinned maps: %w", err)
		}
		return nil
	})
}

// removeAll removes those folders that exist.
func (p *programs) removeAll(paths ...string) error {
	for _, path := range paths {
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := p.change(func() error { return os.RemoveAll(path) }); err != nil {
			return fmt.Errorf("remove pinned maps and links: %w", err)
		}
	}
	return nil
}

// keep pins those maps that are not pinned.
func (p *programs) keep(all mapSet) error {
	for name, m := range all {
		if path := p.pin(name); !isPinned(m, path) {
			if err := p.repinMap(m, path); err != nil {
				return err
			}
		}
	}
	return nil
}

// isPinned reports whether a path leads to this map.
func isPinned(m *ebpf.Map, path string) bool {
	id, err := idOf(m)
	return err == nil && id == idOfPinned(path)
}

// idOfPinned returns the number of a pinned map, 0 if there is none.
func idOfPinned(path string) ebpf.MapID {
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return 0
	}
	defer func() { _ = bpfx.Close(m) }()
	id, _ := idOf(m)
	return id
}

// removeLayouts removes what all versions have left but for one folder, into which the links of the
// others were moved.
func (p *programs) removeLayouts(except string) error {
	dirs, err := p.find("")
	if err != nil {
		return err
	}
	return p.removeAll(slices.DeleteFunc(dirs, func(dir string) bool { return dir == except })...)
}

// endLinks detaches the programs, wherever the links of this process are pinned.
func (p *programs) endLinks() (err error) {
	for name, a := range p.attached {
		if failure := p.change(a.link.Detach); failure != nil {
			err = errors.Join(err, fmt.Errorf("detach link %s: %w", name, failure))
		}
	}
	return err
}

// removeEmpty removes a folder, which may be gone, and those above, up to one that the fast path, the other
// family or another instance has.
func (c *Config) removeEmpty(dir string) {
	for ; dir != filepath.Clean(c.Sockets.BPFFS); dir = filepath.Dir(dir) {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return
		}
	}
}
