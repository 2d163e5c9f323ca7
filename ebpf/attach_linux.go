package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/bpfx"
	"github.com/serviceplane/serviceplane/proxier"
)

// programs holds what one IP family of an instance has in the kernel: pinned maps, programs that use
// them, and links that attach the programs to cgroups. All of it outlives the process.
//
//	BPFFS/serviceplane/NAME/ip4/v1/peers, datagrams, namespaces, counts
//	BPFFS/serviceplane/NAME/ip4/v1/maps/frontends, services, endpoints
//	BPFFS/serviceplane/NAME/ip4/v1/links-DIGEST/PROGRAM-CGROUP, program-PROGRAM
//
// The digest is of the compiled programs, their settings and the maps. Links in a folder of that name
// that have the programs beside them need no change. A folder of maps is replaced as a whole. Where
// another version has left v0 or v2, its links get the programs of this one, and the rest is removed.
type programs struct {
	config   Config
	family   v1.IPFamily
	dir      string
	lock     *os.File
	settings settings
	shared   mapSet // peers, datagrams, namespaces, counts
	used     mapSet // by the attached programs: shared, and those of the layer
	// attached are the links by name, with the program that each should have.
	attached map[string]attachment
	around   func(change func() error) error // see Engine
}

type attachment struct {
	link    link.Link
	program ebpf.ProgramID
}

// layoutVersion changes with what the pinned maps mean.
const layoutVersion = "v1"

// hooks are where the programs of a family are attached.
func hooks(family v1.IPFamily, udp bool) map[string]ebpf.AttachType {
	all := map[string]ebpf.AttachType{
		"connect4": ebpf.AttachCGroupInet4Connect, "getpeername4": ebpf.AttachCgroupInet4GetPeername,
		"connect_mapped": ebpf.AttachCGroupInet6Connect, "getpeername_mapped": ebpf.AttachCgroupInet6GetPeername,
		"sendmsg4": ebpf.AttachCGroupUDP4Sendmsg, "recvmsg4": ebpf.AttachCGroupUDP4Recvmsg, "recvmsg_mapped": ebpf.AttachCGroupUDP6Recvmsg,

		"connect6": ebpf.AttachCGroupInet6Connect, "getpeername6": ebpf.AttachCgroupInet6GetPeername,
		"sendmsg6": ebpf.AttachCGroupUDP6Sendmsg, "recvmsg6": ebpf.AttachCGroupUDP6Recvmsg,
	}
	maps.DeleteFunc(all, func(name string, _ ebpf.AttachType) bool {
		ofUDP := strings.HasPrefix(name, "sendmsg") || strings.HasPrefix(name, "recvmsg")
		return strings.HasSuffix(name, "6") != (family == v1.IPv6Protocol) || ofUDP && !udp
	})
	return all
}

func (p *programs) hooks() map[string]ebpf.AttachType {
	return hooks(p.family, p.config.Sockets.UDP)
}

// dirOf is the folder of one IP family of an instance.
func dirOf(config *Config, family v1.IPFamily) string {
	name := map[v1.IPFamily]string{v1.IPv4Protocol: "ip4", v1.IPv6Protocol: "ip6"}[family]
	return filepath.Join(config.Sockets.BPFFS, "serviceplane", config.Names.Table, name, layoutVersion)
}

// closedPrograms only knows where everything is.
func (e *Engine) closedPrograms() *programs {
	return &programs{config: e.config, family: e.family, dir: dirOf(&e.config, e.family), around: e.around}
}

// openPrograms locks the folder of the instance, and opens or creates what the maps of a layer do not
// hold. It attaches nothing.
func (e *Engine) openPrograms() (_ *programs, err error) {
	p, list := e.closedPrograms(), e.config.Sockets.Namespaces
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if err := p.open(filepath.Dir(p.dir)); err != nil {
		return nil, err
	}
	cookie, err := cookieOf(e.config.NetNS)
	if err != nil {
		return nil, err
	}
	p.settings = settings{
		"node_cookie": cookie, "real_peer": e.config.Sockets.RealPeer, "translate_udp": e.config.Sockets.UDP,
		"use_namespaces": list != nil, "only_listed": list != nil && list.Only,
	}
	objects, err := spec(e.family)
	if err != nil {
		return nil, err
	}
	if p.shared, err = p.pinnedAll(objects, sharedMaps()...); err != nil {
		return nil, err
	}
	return p, list.use(p.shared[mapNamespaces])
}

// check says what the machine or the process lacks. Without privileges, the kernel would only say that it does not
// know some kind of map.
func (p *programs) check() error {
	if err := privileged(p.config.Sockets.capability()); err != nil {
		return err
	}
	var stat unix.Statfs_t
	if err := unix.Statfs(p.config.Sockets.BPFFS, &stat); err != nil || stat.Type != unix.BPF_FS_MAGIC {
		return fmt.Errorf("%w: %s is not a BPF file system: mount one there (mount -t bpf bpf %[2]s), or set Sockets.BPFFS", errUnavailable, p.config.Sockets.BPFFS)
	}
	dirs, missing := p.config.Sockets.findCgroups()
	if len(dirs) == 0 {
		return noCgroup(missing)
	}
	for _, dir := range dirs {
		if err := unix.Statfs(dir, &stat); err != nil || stat.Type != unix.CGROUP2_SUPER_MAGIC {
			return fmt.Errorf("%w: %s is not a directory of cgroup v2: %s", errUnavailable, dir, nameOthers)
		}
	}
	return nil
}

const nameOthers = "name others, with nodeproxy --ebpf-cgroups, with the library Sockets.Cgroups"

func noCgroup(missing []string) error {
	return fmt.Errorf("%w: no cgroup matches %s: %s", errUnavailable, strings.Join(missing, " or "), nameOthers)
}

// findCgroups returns the directories that exist, and what matches none.
func (s *Sockets) findCgroups() (dirs, missing []string) {
	for _, pattern := range s.Cgroups {
		found, _ := filepath.Glob(pattern) // validated
		found = slices.DeleteFunc(found, func(path string) bool {
			info, err := os.Stat(path)
			return err != nil || !info.IsDir()
		})
		if len(found) == 0 {
			missing = append(missing, pattern)
		}
		dirs = append(dirs, found...)
	}
	return dirs, missing
}

// open creates the folder, and locks it or one above, which all versions of the layout share.
func (p *programs) open(locked string) (err error) {
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return unavailable("create the folder of pinned maps", err)
	}
	if p.lock, err = os.Open(locked); err != nil {
		return fmt.Errorf("open the folder of pinned maps: %w", err)
	}
	if err := unix.Flock(int(p.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("%w: %s is locked: stop the other process, or use other Names or another BPFFS: %w", proxier.ErrInUse, locked, err)
	}
	return nil
}

// change changes a link or a pin, which a test may prevent.
func (p *programs) change(do func() error) error {
	if p.around == nil {
		return do()
	}
	return p.around(do)
}

// activate attaches programs that use the maps, or moves the attached ones to them, and pins
// everything. It changes nothing if all of it is as it should be.
func (p *programs) activate(m *tables) error {
	used := maps.Clone(m.maps)
	maps.Copy(used, p.shared)
	name, err := digest("sockets", addrLenOf(p.family), p.settings, used)
	if err != nil {
		return err
	}
	dir := filepath.Join(p.dir, "links-"+name)
	wanted, err := p.wantedLinks()
	if err != nil {
		return err
	}
	if !p.areAttached(dir, wanted) {
		if err := p.load(dir, wanted, used); err != nil {
			return err
		}
	}
	if err := p.keep(p.shared); err != nil {
		return err
	}
	if err := p.keepTables(m.maps); err != nil {
		return err
	}
	// What keepTables has replaced, and what a process has begun that died meanwhile: now nothing there is in use.
	if err := p.removeAll(filepath.Join(p.dir, mapsNew), filepath.Join(p.dir, linksNew)); err != nil {
		return err
	}
	if err := p.removeLayouts(p.dir); err != nil {
		return err
	}
	p.used = used
	return nil
}

// load loads programs that use the maps, and attaches them.
func (p *programs) load(dir string, wanted map[string]wantedLink, used mapSet) error {
	objects, err := spec(p.family)
	if err != nil {
		return err
	}
	for name, one := range used {
		objects.Maps[name].MaxEntries = one.MaxEntries()
	}
	attached := p.hooks()
	maps.DeleteFunc(objects.Programs, func(name string, _ *ebpf.ProgramSpec) bool {
		_, is := attached[name]
		return !is
	})
	loaded, err := loadPrograms(objects, p.settings, ebpf.CollectionOptions{MapReplacements: used})
	if err != nil {
		return unavailable("load the programs", err)
	}
	defer bpfx.CloseCollection(loaded)
	return p.attach(dir, wanted, loaded)
}

// wantedLink is a link that should exist.
type wantedLink struct {
	program, cgroup string
	at              ebpf.AttachType
}

// wantedLinks are the links by their names, which have the inode of the cgroup.
func (p *programs) wantedLinks() (map[string]wantedLink, error) {
	wanted := map[string]wantedLink{}
	cgroups, missing := p.config.Sockets.findCgroups()
	for _, cgroup := range cgroups {
		inode, exists := inodeOf(cgroup)
		for program, at := range p.hooks() {
			if exists {
				wanted[program+"-"+strconv.FormatUint(inode, 10)] = wantedLink{program, cgroup, at}
			}
		}
	}
	if len(wanted) == 0 {
		return nil, noCgroup(missing)
	}
	return wanted, nil
}

// areAttached opens the links in a folder, and reports whether they are those that are wanted, with the
// programs that are pinned beside them.
func (p *programs) areAttached(dir string, wanted map[string]wantedLink) bool {
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != len(wanted)+len(p.hooks()) {
		return false
	}
	opened := map[string]attachment{}
	for name := range wanted {
		one, program, err := openLink(filepath.Join(dir, name))
		if err == nil {
			opened[name] = attachment{one, program}
		}
		if err != nil || program != besides(filepath.Join(dir, name)) {
			closeLinks(opened)
			return false
		}
	}
	closeLinks(p.attached)
	p.attached = opened
	return true
}

func programPin(program string) string { return "program-" + program }

// besides returns the number of the program that is pinned beside a link, 0 if there is none.
func besides(link string) ebpf.ProgramID {
	dir, name := filepath.Split(link)
	program, err := ebpf.LoadPinnedProgram(filepath.Join(dir, programPin(name[:max(0, strings.LastIndex(name, "-"))])), nil)
	if err != nil {
		return 0
	}
	defer func() { _ = bpfx.Close(program) }()
	info, err := program.Info()
	if err != nil {
		return 0
	}
	id, _ := info.ID()
	return id
}

// openLink opens a pinned link that is attached.
func openLink(path string) (link.Link, ebpf.ProgramID, error) {
	one, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return nil, 0, err
	}
	program, attached := programOf(one)
	if !attached {
		_ = bpfx.Close(one)
		return nil, 0, fs.ErrNotExist
	}
	return one, program, nil
}

// programOf returns the program of a link. attached is false if somebody has detached it.
func programOf(one link.Link) (program ebpf.ProgramID, attached bool) {
	info, err := one.Info()
	if err != nil || info.Cgroup() == nil || info.Cgroup().CgroupId == 0 {
		return 0, false
	}
	return info.Program, true
}

func closeLinks(links map[string]attachment) {
	for _, a := range links {
		_ = bpfx.Close(a.link)
	}
}

// attach gives each link its new program, and pins both. Each step leaves a state in which sockets get
// what the old or the new maps say; if this process dies, the next one completes it.
func (p *programs) attach(dir string, wanted map[string]wantedLink, loaded *ebpf.Collection) (err error) {
	old, err := p.find("links-*")
	if err != nil {
		return err
	}
	links := map[string]attachment{}
	defer func() {
		if err != nil {
			closeLinks(links)
			return
		}
		closeLinks(p.attached)
		p.attached = links
	}()
	work := filepath.Join(p.dir, linksNew)
	if err := os.MkdirAll(work, 0o700); err != nil {
		return unavailable("create the folder of links", err)
	}
	for name, w := range wanted {
		one, err := p.attachOne(append(old, work), work, name, w, loaded.Programs[w.program])
		if err != nil {
			return unavailable("attach program "+w.program+" to cgroup "+w.cgroup, err)
		}
		id, _ := programOf(one)
		links[name] = attachment{one, id}
	}
	for name, program := range loaded.Programs {
		if err := p.repin(program, filepath.Join(work, programPin(name))); err != nil {
			return err
		}
	}
	old = slices.DeleteFunc(append(old, dir), func(one string) bool { return one == work })
	if err := p.removeAll(old...); err != nil { // of cgroups that are not wanted any more, or have gone
		return err
	}
	if err := p.change(func() error { return os.Rename(work, dir) }); err != nil {
		return fmt.Errorf("name the folder of links: %w", err)
	}
	return nil
}

// attachOne moves a link that exists to the folder and to the program, or creates it.
func (p *programs) attachOne(from []string, work, name string, w wantedLink, program *ebpf.Program) (one link.Link, err error) {
	defer func() {
		if err != nil && one != nil {
			err = errors.Join(err, bpfx.Close(one))
		}
	}()
	if one, err = p.movePinned(from, work, name); err == nil {
		return one, p.change(func() error { return one.Update(program) })
	}
	err = p.change(func() (err error) {
		one, err = link.AttachCgroup(link.CgroupOptions{Path: w.cgroup, Attach: w.at, Program: program})
		return err
	})
	if err != nil {
		return one, err
	}
	return one, p.repin(one, filepath.Join(work, name)) // one that somebody has detached may be there
}

// movePinned opens a link that is pinned in one of the folders, and moves it to another one.
func (p *programs) movePinned(from []string, to, name string) (one link.Link, err error) {
	for _, dir := range from {
		path := filepath.Join(dir, name)
		if one, _, err = openLink(path); err != nil {
			continue
		}
		if dir != to {
			if err := p.change(func() error { return os.Rename(path, filepath.Join(to, name)) }); err != nil {
				_ = bpfx.Close(one)
				return nil, fmt.Errorf("move a link: %w", err)
			}
		}
		return one, nil
	}
	return nil, fs.ErrNotExist
}

// find returns the paths of a pattern in the folders of all layouts.
func (p *programs) find(pattern string) ([]string, error) {
	paths, err := filepath.Glob(filepath.Join(filepath.Dir(p.dir), "v*", pattern))
	if err != nil {
		return nil, fmt.Errorf("list pinned maps and links: %w", err)
	}
	return paths, nil
}

// haveUDP is whether programs of UDP are attached, perhaps by an earlier process.
func (p *programs) haveUDP() bool {
	found, _ := p.find("links-*/sendmsg*") // the pattern is right
	return len(found) > 0
}

// damaged names a link that somebody has detached, given another program, or unpinned with or without its program,
// or a map that is not pinned; "" if there is none.
func (p *programs) damaged() string {
	dirs, _ := p.find("links-*")
	for name, a := range p.attached {
		program, attached := programOf(a.link)
		pinned := slices.ContainsFunc(dirs, func(dir string) bool {
			_, err := os.Stat(filepath.Join(dir, name))
			return err == nil && besides(filepath.Join(dir, name)) == a.program
		})
		if !attached || program != a.program || !pinned {
			return "BPF link " + name
		}
	}
	for name, m := range p.used {
		if path := p.pin(name); !isPinned(m, path) {
			return "pinned BPF map " + path
		}
	}
	return ""
}

// close releases what this process holds.
func (p *programs) close() error {
	if list := p.config.Sockets.Namespaces; list != nil {
		list.removeUser(p.shared[mapNamespaces])
	}
	closeLinks(p.attached)
	errs := []error{p.shared.close()}
	if p.lock != nil {
		// A child between fork and exec has the file too: only unlocking does not wait for it.
		_ = unix.Flock(int(p.lock.Fd()), unix.LOCK_UN) // it is not locked if open has failed
		errs = append(errs, p.lock.Close())
	}
	return errors.Join(errs...)
}

// remove removes everything, and the folders above that are empty then.
func (p *programs) remove() error {
	if err := p.removeLayouts(""); err != nil {
		return err
	}
	p.config.removeEmpty(filepath.Dir(p.dir))
	return nil
}
