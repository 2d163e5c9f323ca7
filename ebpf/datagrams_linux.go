package ebpf

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/bpfx"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/pause"
)

// datagrams ends connected UDP sockets of one IP family when their endpoint does not serve any more: their
// datagrams pass no program again. Sockets that are not connected get another endpoint with their next
// datagram. One program lists the sockets of all network namespaces, and another one ends some of them, in
// the namespace of who calls it.
type datagrams struct {
	log     *zap.Logger
	addrLen int
	netNSs  func() ([]string, error)
	// wake asks Watch to look for sockets.
	wake  chan struct{}
	ended atomic.Uint64

	looking sync.Mutex       // guards the next ones
	loaded  *ebpf.Collection // nil while closed
	peers   *ebpf.Map        // what sockets are connected to: that of the programs of sockets

	mu sync.Mutex // guards all below
	// serving are the endpoints that may have sockets, of every frontend with UDP, by sockets or not.
	serving map[desired.Key]desired.Endpoints
	// lingering are endpoints that serve no more, until so many looks have found no socket that is connected
	// to them.
	lingering map[netip.AddrPort]int
	unseen    int // looks that are needed since load
	problem   string
}

func newDatagrams(config *Config, family v1.IPFamily, log *zap.Logger) *datagrams {
	d := &datagrams{log: log, addrLen: addrLenOf(family), netNSs: config.Sockets.NetNSs, wake: make(chan struct{}, 1), lingering: map[netip.AddrPort]int{}}
	if d.netNSs == nil {
		d.netNSs = func() ([]string, error) { return networkNamespaces(config.NetNS) }
	}
	return d
}

// canDestroy reports whether the kernel lets programs find sockets and end them. It looks for the name of the function
// first: to parse all types takes a tenth of a second. A kernel that has it may still forbid the programs.
func canDestroy(family v1.IPFamily) error {
	const types, function = "/sys/kernel/btf/vmlinux", "\x00bpf_sock_destroy\x00"
	text, err := os.ReadFile(types)
	switch {
	case err == nil && bytes.Contains(text, []byte(function)):
		return canLoad(family)
	case err == nil:
		err = fmt.Errorf("%s has no bpf_sock_destroy: %w", types, errors.ErrUnsupported)
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("find out whether the kernel can end UDP sockets: %w", err)
	}
	return fmt.Errorf("%w: UDP: the kernel cannot end sockets: it needs Linux 6.5 or newer, with BTF; or leave UDP to the rules: %w", errUnavailable, err)
}

// canLoad tries the programs. If the process lacks privileges, the first Apply says so, for all programs.
func canLoad(family v1.IPFamily) (err error) {
	if privileged(unix.CAP_SYS_ADMIN) == nil {
		var loaded *ebpf.Collection
		if loaded, err = loadStale(addrLenOf(family)); err == nil {
			bpfx.CloseCollection(loaded)
		}
	}
	switch {
	case err == nil:
		return nil
	case forbidden(err):
		return fmt.Errorf("%w: UDP: the kernel forbids the programs that find and end sockets: it must allow BPF iterators to processes of the initial user namespace; or leave UDP to the rules: %w", errUnavailable, err)
	default:
		return unavailable("load the programs that end UDP sockets", err)
	}
}

// load loads the programs. The map must stay open until close.
func (d *datagrams) load(peers *ebpf.Map) error {
	if d == nil {
		return nil
	}
	d.looking.Lock()
	defer d.looking.Unlock()
	loaded, err := loadStale(d.addrLen)
	if err != nil {
		return unavailable("load the programs that end UDP sockets", err)
	}
	d.loaded, d.peers = loaded, peers
	d.expect(looks)
	return nil
}

// The names in stale.c.
const (
	programFind    = "find"
	programDestroy = "destroy"
	mapStale       = "stale"
)

func loadStale(addrLen int) (*ebpf.Collection, error) {
	objects, err := loadObject("stale", addrLen)
	if err != nil {
		return nil, err
	}
	return ebpf.NewCollection(objects)
}

func (d *datagrams) close() {
	if d == nil {
		return
	}
	d.looking.Lock()
	defer d.looking.Unlock()
	if d.loaded != nil {
		bpfx.CloseCollection(d.loaded)
	}
	d.loaded, d.peers = nil, nil
	d.expect(0)
}

// expect begins anew: all sockets are unseen until so many looks.
func (d *datagrams) expect(looks int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.unseen = looks
	clear(d.lingering)
}

// follow takes over which endpoints serve, after they were published.
func (d *datagrams) follow(update *desired.Update) {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	before := d.serving
	lost := update.Full
	if update.Full {
		d.serving = map[desired.Key]desired.Endpoints{}
	}
	for s := range update.Services() {
		if s.Protocol != desired.UDP {
			continue
		}
		for i := range s.Frontends {
			if key := s.Key(&s.Frontends[i]); key.VIP.IsValid() {
				added, removed := s.Serving.Changes(before[key])
				lost = lost || len(added)+len(removed) > 0
				d.linger(slices.Values(removed))
				d.serving[key] = s.Serving
			}
		}
	}
	for _, key := range update.Gone {
		lost = lost || key.Protocol == desired.UDP
		d.linger(before[key].All())
		delete(d.serving, key)
	}
	if lost {
		select {
		case d.wake <- struct{}{}:
		default: // it is awake already
		}
	}
}

// looks is how many are needed after a change: see secondLook.
const looks = 2

// linger remembers endpoints that serve no more, under d.mu.
func (d *datagrams) linger(endpoints iter.Seq[netip.AddrPort]) {
	for e := range endpoints {
		d.lingering[e] = looks
	}
}

// lingers is for Abilities.
func (d *datagrams) lingers(endpoint netip.AddrPort) (why string) {
	if d == nil {
		return ""
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.unseen > 0 {
		return "connected UDP sockets were not looked at yet since the start"
	}
	for e := range d.lingering {
		if e == endpoint || endpoint.Port() == 0 && e.Addr() == endpoint.Addr() {
			return cmp.Or(d.problem, "connected UDP sockets may still send to it, until they are ended")
		}
	}
	return ""
}

// looked takes over that a look which began with these endpoints has left some sockets.
func (d *datagrams) looked(began []netip.AddrPort, left []connected) {
	d.unseen = max(d.unseen-1, 0)
	stuck := make(map[netip.AddrPort]bool, len(left))
	for _, c := range left {
		stuck[c.endpoint] = true
	}
	for _, e := range began {
		if stuck[e] {
			continue
		}
		if d.lingering[e]--; d.lingering[e] <= 0 {
			delete(d.lingering, e)
		}
	}
}

// secondLook is when Watch looks again: a socket may have been in the middle of connect(2), with an endpoint
// that it got before. lookShare is the part of its time that it looks at most.
const (
	secondLook = time.Second
	lookShare  = 10
)

// watch looks for sockets to end after each change, until ctx ends.
func (d *datagrams) watch(ctx context.Context) {
	if d == nil {
		return
	}
	todo := 0
	var due <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.wake:
			todo = looks
		case <-due:
		}
		began, next := time.Now(), secondLook
		if d.look(ctx) {
			todo--
		} else {
			next = watchPause
		}
		if due = nil; todo > 0 {
			due = time.After(next)
		}
		pause.For(ctx, lookShare*time.Since(began))
	}
}

// look ends stale sockets. It reports whether none is left.
func (d *datagrams) look(ctx context.Context) bool {
	d.looking.Lock()
	defer d.looking.Unlock()
	if d.loaded == nil {
		return true
	}
	d.mu.Lock()
	began := slices.Collect(maps.Keys(d.lingering))
	d.mu.Unlock()
	stale, err := d.stale()
	var left []connected
	if err == nil && len(stale) > 0 {
		left, err = d.endSockets(ctx, stale, "UDP sockets ended: their endpoint is gone")
	}
	var problem string
	switch {
	case ctx.Err() != nil:
		return true
	case err != nil:
		problem = fmt.Sprintf("UDP sockets whose endpoint is gone are not ended: %v: trying again", err)
	case len(left) > 0:
		problem = fmt.Sprintf("%d UDP sockets are connected to endpoints that are gone, in network namespaces that were not found: let this process see all processes (hostPID), or set Sockets.NetNSs", len(left))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if problem != "" && d.problem == "" {
		d.log.Warn(problem)
	}
	if d.problem = problem; err == nil {
		d.looked(began, left)
	}
	return problem == ""
}

// endAll ends all connected sockets, when the programs are detached: nobody would end them when their
// endpoint goes. A kernel that cannot has none.
func (d *datagrams) endAll(peers *ebpf.Map) error {
	if err := d.load(peers); errors.Is(err, errUnavailable) {
		return nil
	} else if err != nil {
		return err
	}
	defer d.close()
	d.looking.Lock()
	defer d.looking.Unlock()
	all, err := d.stale() // as nothing serves
	if err == nil && len(all) > 0 {
		var left []connected
		left, err = d.endSockets(context.Background(), all, "UDP sockets ended: they would keep their endpoint for ever") //nolint:forbidigo // it is soon done
		if len(left) > 0 {
			d.log.Warn("connected UDP sockets keep their endpoints, even if those go: their network namespaces were not found, restart their programs", zap.Int("sockets", len(left)))
		}
	}
	return err
}

// fault is what look could not do; "" if nothing.
func (d *datagrams) fault() string {
	if d == nil {
		return ""
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.problem
}

// connected is a UDP socket that is connected to an endpoint: the struct found of stale.c.
type connected struct {
	cookie   uint64
	netNS    uint64 // its inode
	vip      netip.AddrPort
	endpoint netip.AddrPort
}

// parseConnected reads what the program find has written.
func parseConnected(b []byte, addrLen int) (all []connected, err error) {
	const ports = 12
	size := ports + 4 + 2*addrLen
	if len(b)%size != 0 {
		return nil, fmt.Errorf("list UDP sockets: %d bytes, want a multiple of %d", len(b), size)
	}
	for ; len(b) > 0; b = b[size:] {
		vip, _ := netip.AddrFromSlice(b[ports+4 : ports+4+addrLen])
		endpoint, _ := netip.AddrFromSlice(b[ports+4+addrLen : size])
		all = append(all, connected{
			cookie: binary.NativeEndian.Uint64(b), netNS: uint64(binary.NativeEndian.Uint32(b[8:])),
			vip: netip.AddrPortFrom(vip, binary.BigEndian.Uint16(b[ports:])), endpoint: netip.AddrPortFrom(endpoint, binary.BigEndian.Uint16(b[ports+2:])),
		})
	}
	return all, nil
}

// stale returns the sockets to end.
func (d *datagrams) stale() ([]connected, error) {
	raw, err := iterate(d.loaded.Programs[programFind], d.peers)
	if err != nil {
		return nil, fmt.Errorf("list UDP sockets: %w", err)
	}
	all, err := parseConnected(raw, d.addrLen)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.DeleteFunc(all, func(c connected) bool {
		return d.serving[desired.Key{VIP: c.vip.Addr(), Port: c.vip.Port(), Protocol: desired.UDP}].Has(c.endpoint)
	}), nil
}

// iterate runs an iterator, over the elements of a map if there is one, and returns what it writes.
func iterate(program *ebpf.Program, over *ebpf.Map) (written []byte, err error) {
	iterator, err := link.AttachIter(link.IterOptions{Program: program, Map: over})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, bpfx.Close(iterator)) }()
	all, err := iterator.Open()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, all.Close()) }()
	return io.ReadAll(all)
}

// endSockets ends sockets, and returns those that could not be reached.
func (d *datagrams) endSockets(ctx context.Context, stale []connected, message string) (left []connected, err error) {
	byNS := map[uint64][]connected{}
	for _, c := range stale {
		byNS[c.netNS] = append(byNS[c.netNS], c)
	}
	paths, err := d.pathsOf(byNS)
	if err != nil {
		return nil, err
	}
	ended := 0
	for ns, sockets := range byNS {
		path, known := paths[ns]
		if !known {
			left = append(left, sockets...)
			continue
		}
		for part := range slices.Chunk(sockets, int(d.loaded.Maps[mapStale].MaxEntries())) {
			if err := ctx.Err(); err != nil {
				return left, err
			}
			n, err := d.endIn(path, part)
			ended += n
			if err != nil {
				return left, fmt.Errorf("end %d UDP sockets in network namespace %s: %w", len(part), path, err)
			}
		}
	}
	if ended > 0 {
		d.ended.Add(uint64(ended))
		d.log.Info(message, zap.Int("sockets", ended))
	}
	return left, nil
}

// pathsOf returns paths of these network namespaces, by inode.
func (d *datagrams) pathsOf(wanted map[uint64][]connected) (map[uint64]string, error) {
	all, err := d.netNSs()
	if err != nil {
		return nil, fmt.Errorf("find network namespaces: %w", err)
	}
	found := map[uint64]string{}
	for _, path := range all {
		if len(found) == len(wanted) {
			break
		}
		if inode, ok := inodeOf(path); ok && wanted[inode] != nil {
			found[inode] = path
		}
	}
	return found, nil
}

// endIn ends sockets of one network namespace.
func (d *datagrams) endIn(path string, sockets []connected) (ended int, err error) {
	stale := d.loaded.Maps[mapStale]
	for _, c := range sockets {
		value := binary.BigEndian.AppendUint16(c.endpoint.Addr().AsSlice(), c.endpoint.Port()) // and whether it has ended
		err = errors.Join(err, stale.Put(c.cookie, append(value, 0, 0)))
	}
	err = errors.Join(err, namespace.Visit(path, func() error {
		_, err := iterate(d.loaded.Programs[programDestroy], nil)
		return err
	}))
	for _, c := range sockets {
		var value []byte
		if stale.LookupAndDelete(c.cookie, &value) == nil && value[len(value)-2] != 0 { // else it is still connected, and found again
			ended++
		}
	}
	return ended, err
}

// networkNamespaces returns the node's namespace, all that have a name, and the namespaces of processes.
func networkNamespaces(node string) ([]string, error) {
	if node == "" {
		node = "/proc/self/ns/net"
	}
	all := []string{node}
	for _, pattern := range []string{"/run/netns/*", "/proc/[0-9]*/ns/net"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		all = append(all, paths...)
	}
	return all, nil
}

// inodeOf is the number of a network namespace or cgroup, which may be gone.
func inodeOf(path string) (inode uint64, ok bool) {
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		return 0, false
	}
	return stat.Ino, true
}
