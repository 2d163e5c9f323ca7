package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/bpfx"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
)

// Devices come and go with pods, without any update. Nothing waits for them.

// device is a device that should have the program.
type device struct {
	name    string
	flags   uint32
	program ebpf.ProgramID
}

// toPeer is PEER of forward.c.
const toPeer = 1

// wantedDevices are the chosen devices of the node.
func (f *forwarder) wantedDevices() (map[int]device, error) {
	s, err := netlinkx.Open(f.config.NetNS)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	links, err := netlinkx.LinkList(s)
	if err != nil {
		return nil, err
	}
	wanted := map[int]device{}
	for _, l := range links {
		a := l.Attrs()
		// The packets of a port belong to its master: a bridge, for example.
		if a.RawFlags&unix.IFF_LOOPBACK != 0 || a.EncapType != "ether" || a.MasterIndex != 0 || !f.config.forwards(a.Name) {
			continue
		}
		d := device{name: a.Name, program: f.id}
		// Within one namespace there is no such shortcut: the kernel would drop the packet.
		if peer := f.config.FastPathPeer; peer != nil && l.Type() == "veth" && a.NetNsID >= 0 && peer(a.Name) {
			d.flags = toPeer
		}
		wanted[a.Index] = d
	}
	return wanted, nil
}

// followDevices attaches the program to the devices that lack it, and detaches it from others.
func (f *forwarder) followDevices() (writes int, err error) {
	wanted, err := f.wantedDevices()
	if err != nil {
		return 0, err
	}
	attached, err := f.hook.attached()
	if err != nil {
		return 0, err
	}
	flags, err := f.deviceFlags()
	if err != nil {
		return 0, err
	}
	f.has = map[int]device{}
	var errs []error
	for index, d := range wanted {
		n, err := f.addDevice(index, d, attached, flags)
		writes += n
		if err == nil {
			f.has[index] = d
		} else if !isGone(err) {
			errs = append(errs, fmt.Errorf("device %s: %w", d.name, err))
		}
	}
	for index := range attached {
		if _, stays := wanted[index]; !stays {
			errs = append(errs, f.hook.detach(index))
			writes++
		}
	}
	for index := range flags {
		if _, stays := wanted[index]; !stays {
			if err := deleted(f.maps[mapDevices], uint32(index)); err != nil {
				errs = append(errs, fmt.Errorf("remove a device: %w", err))
			}
			writes++
		}
	}
	return writes, errors.Join(errs...)
}

// isGone reports whether the device has been removed meanwhile.
func isGone(err error) bool { return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOLINK) }

func (f *forwarder) addDevice(index int, d device, attached map[int]ebpf.ProgramID, flags map[int]uint32) (writes int, err error) {
	if have, there := flags[index]; !there || have != d.flags {
		if err := f.maps[mapDevices].Put(uint32(index), d.flags); err != nil {
			return 0, fmt.Errorf("add a device: %w", err)
		}
		writes++
	}
	if attached[index] != d.program {
		if err := f.hook.attach(index, f.program); err != nil {
			return writes, err
		}
		writes++
	}
	return writes, nil
}

// deviceFlags reads the devices in the kernel.
func (f *forwarder) deviceFlags() (map[int]uint32, error) {
	all := map[int]uint32{}
	var index, flags uint32
	each := f.maps[mapDevices].Iterate()
	for each.Next(&index, &flags) {
		all[int(index)] = flags
	}
	if err := each.Err(); err != nil {
		return nil, fmt.Errorf("read the devices of the fast path: %w", err)
	}
	return all, nil
}

// damaged returns the name of a device from which somebody has detached the program; "" if there is none.
func (f *forwarder) damaged() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.program == nil || f.has == nil {
		return ""
	}
	wanted, err := f.wantedDevices()
	if err != nil {
		return ""
	}
	attached, err := f.hook.attached()
	if err != nil {
		return ""
	}
	for index, d := range f.has {
		if _, exists := wanted[index]; exists && attached[index] != d.program {
			return "BPF link of the fast path at device " + d.name
		}
	}
	return ""
}

// detachAll detaches the program from all devices, whoever has attached it for this instance.
func (f *forwarder) detachAll() error {
	var errs []error
	for _, hook := range []ingress{&tcx{dir: f.dir(), netNS: f.config.NetNS}, f.newClsact()} {
		attached, err := hook.attached()
		errs = append(errs, err)
		for index := range attached {
			errs = append(errs, hook.detach(index))
		}
	}
	return errors.Join(errs...)
}

// ingress attaches programs to devices, by index. An attached program stays when the process ends.
type ingress interface {
	// attached are the programs of this instance.
	attached() (map[int]ebpf.ProgramID, error)
	// attach replaces the program of this instance.
	attach(device int, program *ebpf.Program) error
	detach(device int) error
}

// chooseHook prefers tcx, where programs of others need not agree on priorities.
func (f *forwarder) chooseHook() ingress {
	const loopback = 1
	missing := namespace.Visit(f.config.NetNS, func() error {
		_, err := link.QueryPrograms(link.QueryOptions{Target: loopback, Attach: ebpf.AttachTCXIngress})
		return err
	})
	if missing != nil || f.clsact {
		return f.newClsact()
	}
	return &tcx{dir: f.dir(), netNS: f.config.NetNS}
}

// tcx attaches by links, which are pinned: Linux 6.6.
type tcx struct{ dir, netNS string }

const linkPrefix = "link-"

func (x *tcx) path(device int) string { return filepath.Join(x.dir, linkPrefix+strconv.Itoa(device)) }

func (x *tcx) attached() (map[int]ebpf.ProgramID, error) {
	entries, err := os.ReadDir(x.dir)
	if err != nil {
		return nil, fmt.Errorf("list the pinned links of the fast path: %w", err)
	}
	all := map[int]ebpf.ProgramID{}
	for _, e := range entries {
		name, is := strings.CutPrefix(e.Name(), linkPrefix)
		device, err := strconv.Atoi(name)
		if !is || err != nil {
			continue
		}
		all[device] = x.programOf(device)
	}
	return all, nil
}

// programOf is 0 if the link is not attached to the device: that may have been removed.
func (x *tcx) programOf(device int) ebpf.ProgramID {
	one, err := link.LoadPinnedLink(x.path(device), nil)
	if err != nil {
		return 0
	}
	defer func() { _ = bpfx.Close(one) }()
	info, err := one.Info()
	if err != nil || info.TCX() == nil || info.TCX().Ifindex != uint32(device) {
		return 0
	}
	return info.Program
}

func (x *tcx) attach(device int, program *ebpf.Program) error {
	if x.programOf(device) != 0 {
		one, err := link.LoadPinnedLink(x.path(device), nil)
		if err == nil {
			err = errors.Join(one.Update(program), bpfx.Close(one))
		}
		if err != nil {
			return fmt.Errorf("update a link: %w", err)
		}
		return nil
	}
	if err := x.detach(device); err != nil {
		return err
	}
	return namespace.Visit(x.netNS, func() error {
		one, err := link.AttachTCX(link.TCXOptions{Interface: device, Program: program, Attach: ebpf.AttachTCXIngress})
		if err != nil {
			return err
		}
		return errors.Join(one.Pin(x.path(device)), bpfx.Close(one))
	})
}

func (x *tcx) detach(device int) error {
	if err := os.Remove(x.path(device)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unpin a link: %w", err)
	}
	return nil
}

// clsact attaches filters with a name of this instance, for kernels without tcx.
type clsact struct {
	netNS, name        string
	protocol, priority uint16
}

// clsactPriority is the filter's; that of IPv6 is the next. The kernel gives those of others numbers
// from 49152 down.
const clsactPriority = 40000

func (f *forwarder) newClsact() *clsact {
	x := &clsact{
		netNS: f.config.NetNS, name: strings.Join([]string{"serviceplane", f.config.Names.Table, filepath.Base(filepath.Dir(f.dir()))}, "-"),
		protocol: unix.ETH_P_IP, priority: clsactPriority,
	}
	if addrLenOf(f.family) == 16 {
		x.protocol, x.priority = unix.ETH_P_IPV6, clsactPriority+1
	}
	return x
}

// visit calls f with a handle in the namespace.
func (x *clsact) visit(f func(s *netlinkx.Socket) error) error {
	s, err := netlinkx.Open(x.netNS)
	if err != nil {
		return err
	}
	defer s.Close()
	return f(s)
}

func (x *clsact) attached() (map[int]ebpf.ProgramID, error) {
	all := map[int]ebpf.ProgramID{}
	return all, x.visit(func(s *netlinkx.Socket) error {
		links, err := netlinkx.LinkList(s)
		if err != nil {
			return err
		}
		for _, l := range links {
			filters, err := netlinkx.FilterList(s, l, netlink.HANDLE_MIN_INGRESS)
			if err != nil && !isGone(err) {
				return err
			}
			for _, one := range filters {
				if b, is := one.(*netlink.BpfFilter); is && b.Name == x.name {
					all[l.Attrs().Index] = ebpf.ProgramID(b.Id)
				}
			}
		}
		return nil
	})
}

func (x *clsact) filter(device int) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: device, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Protocol: x.protocol, Priority: x.priority},
		Name:        x.name, DirectAction: true,
	}
}

func qdiscOf(device int) netlink.Qdisc {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: device, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
}

func (x *clsact) attach(device int, program *ebpf.Program) error {
	return x.visit(func(s *netlinkx.Socket) error {
		if err := s.Routing().QdiscAdd(qdiscOf(device)); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add qdisc clsact, of kernel module sch_ingress: %w", err)
		}
		one := x.filter(device)
		one.Fd = program.FD()
		if err := s.Routing().FilterReplace(one); err != nil {
			return fmt.Errorf("replace a filter, of kernel module cls_bpf: %w", err)
		}
		return nil
	})
}

// detach also removes the qdisc if nobody has a filter there.
func (x *clsact) detach(device int) error {
	return x.visit(func(s *netlinkx.Socket) error {
		if err := s.Routing().FilterDel(x.filter(device)); err != nil && !isGone(err) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("delete a filter: %w", err)
		}
		at := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: device}}
		for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
			if others, err := netlinkx.FilterList(s, at, parent); err != nil || len(others) > 0 {
				return nil //nolint:nilerr // the device is gone, or the qdisc is in use
			}
		}
		if err := s.Routing().QdiscDel(qdiscOf(device)); err != nil && !isGone(err) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("delete qdisc clsact: %w", err)
		}
		return nil
	})
}

func (f *forwarder) follow() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.program == nil {
		return nil
	}
	_, err := f.followDevices()
	return err
}
