package ebpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/bpfx"
)

// The names of maps in sockets.c.
const (
	mapFrontends  = "frontends"
	mapServices   = "services"
	mapEndpoints  = "endpoints"
	mapPeers      = "peers"
	mapDatagrams  = "datagrams"
	mapNamespaces = "namespaces"
	mapCounts     = "counts"
)

// tables are the maps of one IP family that a layer fills. The arrays are mapped into this process: a
// write there is no system call.
type tables struct {
	addrLen             int
	maps                mapSet
	size                capacity
	services, endpoints []byte
	inGracePeriod       *ebpf.Map // private; see awaitGracePeriod
}

// spec is the compiled object of a family.
func spec(family v1.IPFamily) (*ebpf.CollectionSpec, error) {
	return loadObject("sockets", addrLenOf(family))
}

func addrLenOf(family v1.IPFamily) int {
	if family == v1.IPv6Protocol {
		return 16
	}
	return 4
}

// newTables returns empty maps.
func newTables(family v1.IPFamily, size capacity) (*tables, error) {
	objects, err := spec(family)
	if err != nil {
		return nil, err
	}
	all := mapSet{}
	for name, entries := range map[string]uint32{mapFrontends: size.frontends, mapServices: size.services, mapEndpoints: size.endpoints} {
		objects.Maps[name].MaxEntries = entries
		if all[name], err = ebpf.NewMap(objects.Maps[name]); err != nil {
			return nil, errors.Join(unavailable("create the map "+name, err), all.close())
		}
	}
	return mapped(family, all)
}

// mapped maps the arrays into memory. It owns the maps.
func mapped(family v1.IPFamily, all mapSet) (_ *tables, err error) {
	m := &tables{addrLen: addrLenOf(family), maps: all}
	m.size = capacity{all[mapFrontends].MaxEntries(), all[mapServices].MaxEntries(), all[mapEndpoints].MaxEntries()}
	defer func() {
		if err != nil {
			_ = m.close()
		}
	}()
	if m.services, err = mapMemory(all[mapServices]); err == nil {
		m.endpoints, err = mapMemory(all[mapEndpoints])
	}
	if err != nil {
		return nil, unavailable("map an array into memory", err)
	}
	inner := &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	m.inGracePeriod, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: inner})
	if err != nil {
		return nil, unavailable("create a map of maps", err)
	}
	return m, nil
}

// mapMemory maps an array; the kernel rounds the size of each value up to 8 bytes.
func mapMemory(m *ebpf.Map) ([]byte, error) {
	size := (int(m.ValueSize()) + 7) &^ 7 * int(m.MaxEntries())
	page := os.Getpagesize()
	return unix.Mmap(m.FD(), 0, (size+page-1)/page*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

func (m *tables) close() error {
	errs := []error{m.maps.close(), bpfx.Close(m.inGracePeriod)}
	for _, memory := range [][]byte{m.services, m.endpoints} {
		if memory != nil {
			errs = append(errs, unix.Munmap(memory))
		}
	}
	return errors.Join(errs...)
}

func (m *tables) self() *tables { return m }

// tablesOf returns the maps of a kernel that Engine.wrap has made.
func tablesOf(k kernel) *tables {
	return k.(interface{ self() *tables }).self() //nolint:forcetypeassert // see above
}

func (m *tables) capacity() capacity { return m.size }

// key is the frontend_key of sockets.c.
func (m *tables) key(at desired.Key) []byte {
	b := append(make([]byte, 0, 20), at.VIP.AsSlice()...)
	b = binary.BigEndian.AppendUint16(b, at.Port)
	return append(b, byte(at.Protocol), 0)
}

// parseKey is the reverse of key.
func (m *tables) parseKey(b []byte) desired.Key {
	addr, _ := netip.AddrFromSlice(b[:m.addrLen])
	return desired.Key{VIP: addr, Port: binary.BigEndian.Uint16(b[m.addrLen:]), Protocol: desired.Protocol(b[m.addrLen+2])}
}

func (m *tables) putFrontends(frontends map[desired.Key]place) error {
	if m.addrLen == 4 {
		return writeFrontends[[8]byte](m, frontends)
	}
	return writeFrontends[[20]byte](m, frontends)
}

// writeFrontends is an all-in-one system call; after an error some may have been written.
func writeFrontends[K [8]byte | [20]byte](m *tables, frontends map[desired.Key]place) error {
	keys, values := make([]K, 0, len(frontends)), make([][2]uint32, 0, len(frontends))
	for at, to := range frontends {
		var key K
		copy(bytesOf(&key), m.key(at))
		keys, values = append(keys, key), append(values, [2]uint32{to.service, to.scope})
	}
	n, err := m.maps[mapFrontends].BatchUpdate(keys, values, nil)
	if err != nil && n < len(keys) {
		return fmt.Errorf("frontend %v, after %d of %d: %w", m.parseKey(bytesOf(&keys[n])), n, len(keys), err)
	}
	return err
}

func (m *tables) removeFrontends(keys []desired.Key) error {
	for _, at := range keys {
		if err := deleted(m.maps[mapFrontends], m.key(at)); err != nil {
			return fmt.Errorf("frontend %v: %w", at, err)
		}
	}
	return nil
}

// readAtOnce is how many frontends a system call reads, if their hash table has no longer chains.
const readAtOnce = 4096

func (m *tables) frontends() (map[desired.Key]place, error) {
	if m.addrLen == 4 {
		return readFrontends[[8]byte](m)
	}
	return readFrontends[[20]byte](m)
}

// bytesOf is the memory of an array.
func bytesOf[K [8]byte | [20]byte](key *K) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(key)), len(*key))
}

func readFrontends[K [8]byte | [20]byte](m *tables) (map[desired.Key]place, error) {
	all := map[desired.Key]place{}
	keys, values := make([]K, readAtOnce), make([][2]uint32, readAtOnce)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.maps[mapFrontends].BatchLookup(&cursor, keys, values, nil)
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return nil, fmt.Errorf("read the frontends of sockets: %w", err)
		}
		for i := range n {
			all[m.parseKey(bytesOf(&keys[i]))] = place{values[i][0], values[i][1]}
		}
		if last {
			return all, nil
		}
	}
}

// word is where a range is. The caller has checked that it exists; the slice does again.
func (m *tables) word(at place) *uint64 {
	const size = 8 * scopes
	ranges := m.services[size*int(at.service) : size*int(at.service)+size]
	return (*uint64)(unsafe.Pointer(&ranges[8*at.scope])) // aligned: the memory is that of a page
}

func (m *tables) rangeAt(at place) endpointRange { return endpointRange(atomic.LoadUint64(m.word(at))) }

func (m *tables) setRange(at place, p endpointRange) { atomic.StoreUint64(m.word(at), uint64(p)) }

// endpoint is the place of an endpoint in the array.
func (m *tables) endpoint(i uint32) []byte {
	size := m.addrLen + 4
	if m.addrLen == 16 {
		size += 4
	}
	return m.endpoints[size*int(i) : size*int(i)+size]
}

func (m *tables) setEndpoints(first uint32, endpoints desired.Endpoints) {
	at := first
	for e := range endpoints.All() {
		is := m.encode(e)
		copy(m.endpoint(at), is[:])
		at++
	}
}

func (m *tables) hasEndpoints(first uint32, endpoints desired.Endpoints) bool {
	at := first
	for e := range endpoints.All() {
		want, is := m.encode(e), m.endpoint(at)
		if !bytes.Equal(is, want[:len(is)]) {
			return false
		}
		at++
	}
	return true
}

// encode returns the endpoint of sockets.c, and zeros.
func (m *tables) encode(e netip.AddrPort) (is [24]byte) {
	if m.addrLen == 4 {
		*(*[4]byte)(is[:]) = e.Addr().As4()
	} else {
		*(*[16]byte)(is[:]) = e.Addr().As16()
	}
	binary.BigEndian.PutUint16(is[m.addrLen:], e.Port())
	return is
}

// awaitGracePeriod changes a map of maps: then the kernel waits for an RCU grace period, in which each
// program that is running ends. There is no call that does only that.
func (m *tables) awaitGracePeriod() error {
	inner, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err == nil {
		err = errors.Join(m.inGracePeriod.Put(uint32(0), inner), bpfx.Close(inner))
	}
	if err != nil {
		return fmt.Errorf("wait until no program uses removed endpoints: %w", err)
	}
	return nil
}

// unavailable wraps errUnavailable if the machine lacks something or forbids it. A process that lacks
// descriptors or memory may have more later.
func unavailable(what string, err error) error {
	if errors.Is(err, ebpf.ErrNotSupported) {
		err = whyUnsupported(err)
	}
	switch {
	case forbidden(err):
		return fmt.Errorf("%w: %s: %w: the process needs CAP_BPF and CAP_NET_ADMIN, and kernel lockdown must not forbid BPF", errUnavailable, what, err)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, ebpf.ErrNotSupported):
		return fmt.Errorf("%w: %s: %w: it needs Linux 6.1 or newer, with BPF and cgroups", errUnavailable, what, err)
	default:
		return fmt.Errorf("%s: %w", what, err)
	}
}

func forbidden(err error) bool { return errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) }

// whyUnsupported asks the kernel again about what the library says that it does not support: the library
// takes any refusal of a map for an unknown flag, and does not ask twice.
func whyUnsupported(err error) error {
	for _, flag := range []features.MapFlags{features.BPF_F_NO_PREALLOC, features.BPF_F_MMAPABLE, features.BPF_F_RDONLY_PROG} {
		if found := features.HaveMapFlag(flag); found != nil {
			return found
		}
	}
	if strings.Contains(err.Error(), "map create: ") {
		return fmt.Errorf("no descriptor or memory was left for a map, which the library reports as: %s", err.Error()) // not wrapped: it is supported
	}
	return err
}
