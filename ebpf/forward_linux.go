package ebpf

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/bpfx"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/proxier"
)

// forwarder is the fast path of one IP family. All that it has in the kernel is pinned and outlives
// the process, except filters of kernels without tcx, which need no pin.
//
//	BPFFS/serviceplane/NAME/ip4/forward-v1/flows, ports, devices, forwarded
//	BPFFS/serviceplane/NAME/ip4/forward-v1/program-DIGEST
//	BPFFS/serviceplane/NAME/ip4/forward-v1/link-DEVICE
//
// The digest is of the compiled program, its settings and the maps. Nothing here fails an update: without
// it, the rules do everything.
type forwarder struct {
	config Config
	family v1.IPFamily
	log    *zap.Logger

	mu      sync.Mutex // guards all below: Watch follows the devices
	store   *programs  // the folder with its lock; nil until the first full update
	maps    mapSet
	program *ebpf.Program // nil if there is none
	id      ebpf.ProgramID
	hook    ingress
	clsact  bool // for tests: as on kernels without tcx
	// without is why nothing is forwarded; it is logged once.
	without error
	slowTCP bool // and it is said why

	index  *flowIndex
	held   map[flowKey]bool  // in the kernel
	words  [portWords]uint64 // in the kernel
	missed []flowKey         // what could not be written
	has    map[int]device    // what followDevices has left
}

const (
	forwardDir = "forward-v1" // changes with what the maps mean
	asksFor    = uint32(1)    // the value of each flow
)

func newForwarder(config Config, family v1.IPFamily, log *zap.Logger) *forwarder {
	return &forwarder{config: config, family: family, log: log, index: newFlowIndex()}
}

func (f *forwarder) dir() string {
	return filepath.Join(filepath.Dir(dirOf(&f.config, f.family)), forwardDir)
}

// forwards reports whether service ports can have the fast path, as far as is known.
func (f *forwarder) forwards() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.config.FastPathByBPF && f.without == nil
}

// apply follows an update that the rules have. It returns the number of writes.
func (f *forwarder) apply(update *desired.Update, failed []*proxier.ServiceError) (writes int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if update.Full {
		f.begin()
	}
	if f.program == nil {
		return 0
	}
	keep := map[changetracker.ServicePortName]bool{}
	for _, one := range failed {
		keep[one.Name] = true
	}
	writes, err := f.write(f.updateIndex(update, keep), update.Full)
	if err != nil {
		f.log.Warn("the maps of the fast path are not up to date: trying again", zap.Error(err))
	}
	if update.Full {
		n, err := f.followDevices()
		writes += n
		if err != nil {
			f.log.Warn("devices of the fast path are not up to date: the rules have connections through others", zap.Error(err))
		}
	}
	return writes
}

// begin opens what is pinned, or creates it. Without fast path it removes what an earlier process has left.
func (f *forwarder) begin() {
	if !f.config.FastPathByBPF {
		if err := f.remove(); err != nil {
			f.log.Warn("a fast path that is not configured any more is still there", zap.Error(err))
		}
		return
	}
	err := f.open()
	if err == nil {
		f.without = nil
		return
	}
	message := "no connection takes the fast path: see the error, or do without Forward"
	if left := f.remove(); left != nil { // or what an earlier process has attached would go on, and follow no change
		err, message = errors.Join(err, left), "the fast path is not kept up to date, and cannot be removed: see the error"
	}
	if f.without == nil {
		f.log.Warn(message, zap.Error(err))
	}
	f.without = err
}

// open is idempotent: it finds out what changed.
func (f *forwarder) open() (err error) {
	if err := errors.Join(f.closeProgram(), privileged(unix.CAP_BPF, unix.CAP_PERFMON)); err != nil {
		return err
	}
	objects, err := loadObject("forward", addrLenOf(f.family))
	if err != nil {
		return err
	}
	if err := f.lock(); err != nil {
		return err
	}
	if f.maps == nil {
		f.maps, err = f.store.pinnedAll(objects, mapFlows, mapPorts, mapDevices, mapForwarded)
	} else {
		err = f.store.keep(f.maps) // somebody may have removed some
	}
	if err != nil {
		return err
	}
	settings, err := f.settings()
	if err != nil {
		return err
	}
	if err := f.openProgram(objects, settings); err != nil {
		return err
	}
	f.hook = f.chooseHook()
	return f.read()
}

// The names of maps in forward.c.
const (
	mapFlows     = "flows"
	mapPorts     = "ports"
	mapDevices   = "devices"
	mapForwarded = "forwarded"
)

// lock creates the folder and locks it, unless it is: it may be another process's.
func (f *forwarder) lock() error {
	if f.store != nil {
		return nil
	}
	store := &programs{config: f.config, family: f.family, dir: f.dir()}
	if err := store.open(f.dir()); err != nil {
		return errors.Join(err, store.close())
	}
	f.store = store
	return nil
}

// settings reads how connection tracking is set, with times in milliseconds.
func (f *forwarder) settings() (settings, error) {
	const established, closed, udp, beLiberal = "tcp_timeout_established", "tcp_timeout_close", "udp_timeout_stream", "tcp_be_liberal"
	values := map[string]uint32{}
	err := namespace.Visit(f.config.NetNS, func() error {
		for _, name := range []string{established, closed, udp, beLiberal} {
			text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_" + name)
			if errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("%w: connection tracking has no settings: %w", errUnavailable, err)
			}
			if err != nil {
				return fmt.Errorf("read the settings of connection tracking: %w", err)
			}
			n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
			if err != nil {
				return fmt.Errorf("setting %s of connection tracking: %w", name, err)
			}
			values[name] = uint32(n)
		}
		return nil
	})
	liberal := values[beLiberal] == 1
	if err == nil && !liberal && !f.slowTCP {
		f.log.Warn("no TCP connection takes the fast path: set net.netfilter.nf_conntrack_tcp_be_liberal to 1, so that it can return to the rules")
	}
	f.slowTCP = !liberal
	milliseconds := func(name string) uint32 { return min(values[name], math.MaxInt32/1000) * 1000 } // 24 days
	return settings{
		"tcp_timeout": milliseconds(established), "tcp_close_timeout": milliseconds(closed), "udp_timeout": milliseconds(udp), "with_tcp": liberal,
	}, err
}

// openProgram opens the pinned program, or loads and pins it.
func (f *forwarder) openProgram(objects *ebpf.CollectionSpec, set settings) error {
	name, err := digest("forward", addrLenOf(f.family), set, f.maps)
	if err != nil {
		return err
	}
	path := filepath.Join(f.dir(), "program-"+name)
	program, err := ebpf.LoadPinnedProgram(path, nil)
	if err != nil {
		if program, err = f.load(objects, set); err != nil {
			return err
		}
		_ = os.Remove(path)
		if err = program.Pin(path); err != nil {
			return errors.Join(fmt.Errorf("pin the program of the fast path: %w", err), bpfx.Close(program))
		}
	}
	info, err := program.Info()
	if err != nil {
		return errors.Join(fmt.Errorf("read what the program of the fast path is: %w", err), bpfx.Close(program))
	}
	f.id, _ = info.ID()
	f.program = program
	all, err := filepath.Glob(filepath.Join(f.dir(), "program-*"))
	for _, other := range all { // of other settings: their links go on until followDevices moves them
		if other != path {
			err = errors.Join(err, os.Remove(other))
		}
	}
	return err
}

func (f *forwarder) load(objects *ebpf.CollectionSpec, set settings) (*ebpf.Program, error) {
	options := ebpf.CollectionOptions{MapReplacements: f.maps}
	if module, err := btf.LoadKernelModuleSpec("nf_conntrack"); err == nil { // else it is built in
		options.Programs.ExtraRelocationTargets = []*btf.Spec{module}
	}
	loaded, err := loadPrograms(objects, set, options)
	if err != nil {
		return nil, unavailable("load the program of the fast path, which needs connection tracking with BTF", err)
	}
	defer bpfx.CloseCollection(loaded)
	return loaded.DetachProgram("forward"), nil
}

// read reads what the maps have.
func (f *forwarder) read() error {
	f.held = map[flowKey]bool{}
	key, value := make([]byte, f.maps[mapFlows].KeySize()), uint32(0)
	each := f.maps[mapFlows].Iterate()
	for each.Next(&key, &value) {
		f.held[parseFlowKey(key)] = true
	}
	err := each.Err()
	for i := range f.words {
		if err == nil {
			err = f.maps[mapPorts].Lookup(uint32(i), &f.words[i])
		}
	}
	if err != nil {
		return fmt.Errorf("read the flows of the fast path: %w", err)
	}
	return nil
}

// bytes is the flow_key of forward.c.
func (k flowKey) bytes() []byte {
	b := append(make([]byte, 0, 24), k.to.Addr().AsSlice()...)
	b = binary.BigEndian.AppendUint16(b, k.to.Port())
	b = binary.BigEndian.AppendUint16(b, k.nodePort)
	return append(b, byte(k.protocol), 0, 0, 0)
}

func parseFlowKey(b []byte) (k flowKey) {
	const rest = 8
	addr, _ := netip.AddrFromSlice(b[:len(b)-rest])
	b = b[len(b)-rest:]
	k.to = netip.AddrPortFrom(addr, binary.BigEndian.Uint16(b))
	k.nodePort, k.protocol = binary.BigEndian.Uint16(b[2:]), desired.Protocol(b[4])
	return k
}

// updateIndex gives the index an update, and returns what may differ from the kernel.
func (f *forwarder) updateIndex(update *desired.Update, keep map[changetracker.ServicePortName]bool) (touched []flowKey) {
	if update.Full {
		before := f.index
		f.index = newFlowIndex()
		for name := range keep {
			touched = append(touched, f.index.set(name, before.services[name])...)
		}
	}
	for i := range update.Changes {
		c := &update.Changes[i]
		var need flowNeed
		if c.After != nil && (desired.Traits{FastPath: true}).TakesFastPath(c.After) {
			need = needOf(c.After)
		}
		if !keep[c.Name] {
			touched = append(touched, f.index.set(c.Name, need)...)
		}
	}
	return touched
}

// retry writes again what could not be written. What fails was logged the first time.
func (f *forwarder) retry() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.program != nil && (len(f.missed) > 0 || f.words != f.index.words) {
		_, _ = f.write(nil, false)
	}
}

// write makes the maps what the index says, also where that has failed before. If the update is full, it
// compares all of them. It returns the first error, and writes what it can.
func (f *forwarder) write(touched []flowKey, full bool) (writes int, err error) {
	touched = append(touched, f.missed...)
	if full {
		touched = slices.AppendSeq(touched, maps.Keys(f.held))
	}
	f.missed = nil
	for i, word := range f.index.words[:] {
		if word == f.words[i] {
			continue
		}
		if failed := f.maps[mapPorts].Put(uint32(i), word); failed != nil {
			err = fmt.Errorf("write the ports of the flows: %w", failed)
			break
		}
		f.words[i] = word
		writes++
	}
	for _, k := range touched {
		if wanted := f.index.keys[k] > 0; wanted != f.held[k] {
			if failed := f.writeFlow(k, wanted); failed != nil {
				f.missed = append(f.missed, k)
				err = cmp.Or(err, failed)
				continue
			}
			writes++
		}
	}
	return writes, err
}

func (f *forwarder) writeFlow(k flowKey, wanted bool) error {
	if !wanted {
		if err := deleted(f.maps[mapFlows], k.bytes()); err != nil {
			return fmt.Errorf("remove %v from the flows: %w", k.to, err)
		}
		delete(f.held, k)
		return nil
	}
	if err := f.maps[mapFlows].Put(k.bytes(), asksFor); err != nil {
		return fmt.Errorf("add %v to the flows: %w", k.to, err)
	}
	f.held[k] = true
	return nil
}

// ForwardCounts returns the counts of the fast path. It is an error if there is none, because nothing was
// applied yet, or because the kernel lacks what it needs.
//
// packets are all packets, of both directions, that the program of the IP family has forwarded since it was attached
// for the first time, also for an earlier process. A packet that the kernel has put together from several counts
// once. toPeer are those of them that were given to the other end of a veth: see Config.FastPathPeer.
func (e *Engine) ForwardCounts() (packets, toPeer uint64, err error) {
	f := e.forward
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.maps == nil {
		return 0, 0, errors.Join(errors.New("nothing is forwarded: set FastPathByBPF, and sync"), f.without)
	}
	err = sumCounts(f.maps[mapForwarded], &packets, &toPeer)
	return packets, toPeer, err
}

// dump prints the flows and devices.
func (f *forwarder) dump(w io.Writer) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var lines []string
	for k := range f.held {
		if k.nodePort != 0 {
			lines = append(lines, fmt.Sprintf("forward node port %d/%v to %v\n", k.nodePort, k.protocol, k.to))
		} else {
			lines = append(lines, fmt.Sprintf("forward %v/%v\n", k.to, k.protocol))
		}
	}
	for _, d := range f.has {
		lines = append(lines, fmt.Sprintf("forward from and to device %s\n", d.name))
	}
	slices.Sort(lines)
	if _, err := io.WriteString(w, strings.Join(lines, "")); err != nil {
		return fmt.Errorf("print the fast path: %w", err)
	}
	return nil
}

// cleanup removes everything.
func (f *forwarder) cleanup() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.remove()
}

func (f *forwarder) remove() error {
	if _, err := os.Stat(f.dir()); errors.Is(err, fs.ErrNotExist) && f.store == nil {
		return nil
	}
	err := f.lock()
	if err == nil {
		err = f.detachAll()
	}
	if err == nil {
		err = os.RemoveAll(f.dir())
	}
	if err == nil {
		f.config.removeEmpty(filepath.Dir(f.dir()))
	}
	return errors.Join(err, f.closeAll())
}

// close releases what this process holds.
func (f *forwarder) close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.closeAll()
}

func (f *forwarder) closeProgram() error {
	program := f.program
	f.program = nil
	return bpfx.Close(program)
}

func (f *forwarder) closeAll() error {
	errs := []error{f.closeProgram(), f.maps.close()}
	if f.store != nil {
		errs = append(errs, f.store.close())
	}
	f.maps, f.store, f.has, f.index = nil, nil, nil, newFlowIndex()
	return errors.Join(errs...)
}

// watch follows the devices until ctx ends.
func (f *forwarder) watch(ctx context.Context) {
	if !f.config.FastPathByBPF {
		return
	}
	for {
		err := netlinkx.WatchLinks(ctx, f.config.NetNS, f.follow)
		if ctx.Err() != nil {
			return
		}
		f.log.Warn("devices of the fast path are not followed for a moment: the rules have connections through new ones", zap.Error(err))
		pause.For(ctx, watchPause)
	}
}
