package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/bpfx"
)

// pinned returns the map of a name, which it creates if it does not exist or is another one.
func (p *programs) pinned(name string, want *ebpf.MapSpec) (*ebpf.Map, error) {
	path := filepath.Join(p.dir, name)
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
	var all []*ebpf.Map
	for _, name := range layerMaps() {
		one := compatible(filepath.Join(p.dir, mapsFolder, name), objects.Maps[name])
		if one == nil {
			closeMaps(all)
			return nil, false, nil
		}
		all = append(all, one)
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

// keepTables pins the maps of a layer, all at once: a process that begins finds the maps from before, or
// these, but no mixture.
func (p *programs) keepTables(tables map[string]*ebpf.Map) error {
	dir, next := filepath.Join(p.dir, mapsFolder), filepath.Join(p.dir, mapsNew)
	p.layer = map[string]*ebpf.Map{}
	complete := true
	for name, one := range tables {
		path := filepath.Join(dir, name)
		p.layer[path] = one
		complete = complete && isPinned(one, path)
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

// removeUnfinished removes what keepTables has replaced, and what a process has begun that died meanwhile: nothing
// there is in use once all maps and links are in their places.
func (p *programs) removeUnfinished() error {
	for _, name := range []string{mapsNew, linksNew} {
		path := filepath.Join(p.dir, name)
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := p.change(func() error { return os.RemoveAll(path) }); err != nil {
			return fmt.Errorf("remove an unfinished folder: %w", err)
		}
	}
	return nil
}

// keep pins a map of a name, unless it is.
func (p *programs) keep(name string, m *ebpf.Map) error {
	path := filepath.Join(p.dir, name)
	if isPinned(m, path) {
		return nil
	}
	return p.repinMap(m, path)
}

// isPinned reports whether a path leads to this map.
func isPinned(m *ebpf.Map, path string) bool {
	is, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return false
	}
	defer func() { _ = bpfx.Close(is) }()
	return sameMap(is, m)
}

// removeLayouts removes what all versions have left but for one folder, into which the links of the
// others were moved.
func (p *programs) removeLayouts(except string) error {
	dirs, err := filepath.Glob(filepath.Join(filepath.Dir(p.dir), "v*"))
	if err != nil {
		return fmt.Errorf("list layouts: %w", err)
	}
	for _, dir := range dirs {
		if dir == except {
			continue
		}
		if err := p.change(func() error { return os.RemoveAll(dir) }); err != nil {
			return fmt.Errorf("remove pinned maps and links: %w", err)
		}
	}
	return nil
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

func sameMap(a, b *ebpf.Map) bool {
	left, err := a.Info()
	if err != nil {
		return false
	}
	right, err := b.Info()
	if err != nil {
		return false
	}
	x, _ := left.ID()
	y, _ := right.ID()
	return x == y
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
