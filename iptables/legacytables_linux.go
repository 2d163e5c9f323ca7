package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"io/fs"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// Socket options of linux/netfilter_ipv4/ip_tables.h, which have the same values for IPv6
// (IPT_SO_GET_INFO and IPT_SO_GET_ENTRIES), and a limit of linux/netfilter/x_tables.h.
// Package unix has none of them.
const (
	iptSoGetInfo      = 64
	iptSoGetEntries   = 65
	xtTableMaxNameLen = 32
)

// tableInfo is struct ipt_getinfo, and struct ip6t_getinfo. It has no padding.
type tableInfo struct {
	Name       [xtTableMaxNameLen]byte
	ValidHooks uint32
	HookEntry  [unix.NF_INET_NUMHOOKS]uint32
	Underflow  [unix.NF_INET_NUMHOOKS]uint32
	Entries    uint32 // the rules, and one entry at the end of each chain
	Size       uint32 // in bytes
}

// entriesHeader is struct ipt_get_entries without the entries that follow it.
type entriesHeader struct {
	_    [0]uint64 // aligns the entries
	Name [xtTableMaxNameLen]byte
	Size uint32
}

// legacyFamily is what differs between ip_tables and ip6_tables.
type legacyFamily struct {
	domain, level int
	names         string // a file that lists the tables
	layout        entryLayout
}

func legacyOf(family v1.IPFamily) legacyFamily {
	if family == v1.IPv6Protocol {
		return legacyFamily{unix.AF_INET6, unix.SOL_IPV6, "/proc/thread-self/net/ip6_tables_names", layoutIPv6}
	}
	return legacyFamily{unix.AF_INET, unix.SOL_IP, "/proc/thread-self/net/ip_tables_names", layoutIPv4}
}

// legacyTables reads the tables of ip_tables or ip6_tables.
type legacyTables struct {
	family v1.IPFamily
	netNS  string
	file   *os.File // a socket
	// exists holds the tables that were found. Tables are never deleted.
	exists map[string]bool
	buffer []byte
	hash   maphash.Hash
}

// openLegacyTables opens a socket in a network namespace, as in namespace.Visit.
func openLegacyTables(family v1.IPFamily, netNS string) (*legacyTables, error) {
	fd := -1
	err := namespace.Visit(netNS, func() (err error) {
		fd, err = unix.Socket(legacyOf(family).domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open socket: %w", err)
	}
	return &legacyTables{
		family: family, netNS: netNS, file: os.NewFile(uintptr(fd), "ip_tables"), exists: map[string]bool{},
	}, nil
}

func (t *legacyTables) close() error { return t.file.Close() }

// legacyTableExists reports whether a network namespace has a table of the legacy variant.
// It reads a file, because any other request would make the kernel create the table.
func legacyTableExists(family v1.IPFamily, netNS, table string) (exists bool, err error) {
	err = namespace.Visit(netNS, func() error {
		names, err := os.ReadFile(legacyOf(family).names)
		if errors.Is(err, fs.ErrNotExist) { // ip_tables is not loaded
			return nil
		}
		if err != nil {
			return fmt.Errorf("list tables: %w", netlinkx.Denied(err))
		}
		exists = slices.Contains(strings.Fields(string(names)), table)
		return nil
	})
	return exists, err
}

// table returns the info of a table, zero if the table does not exist.
func (t *legacyTables) table(name string) (tableInfo, error) {
	if !t.exists[name] {
		exists, err := legacyTableExists(t.family, t.netNS, name)
		if err != nil || !exists {
			return tableInfo{}, err
		}
		t.exists[name] = true
	}
	return t.info(name)
}

// info returns the info of a table. The kernel creates the table if it does not exist.
func (t *legacyTables) info(name string) (info tableInfo, err error) {
	copy(info.Name[:], name)
	err = t.getsockopt(name, iptSoGetInfo, unsafe.Pointer(&info), unsafe.Sizeof(info))
	return info, err
}

func (t *legacyTables) getsockopt(table string, option uintptr, value unsafe.Pointer, length uintptr) error {
	size := uint32(length)
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, t.file.Fd(), uintptr(legacyOf(t.family).level), option,
		uintptr(value), uintptr(unsafe.Pointer(&size)), 0)
	switch errno {
	case 0:
		return nil
	case unix.ENOPROTOOPT, unix.ENOENT:
		return &proxier.UnsupportedError{
			Feature: "legacy iptables table " + table,
			Hint:    "load module iptable_" + table + " or ip6table_" + table + ", or use the nft variant", Err: errno,
		}
	default:
		return fmt.Errorf("read legacy table %s: %w", table, netlinkx.Denied(errno))
	}
}

// readAttempts is how often a table is read that changes meanwhile.
const readAttempts = 5

var errInterrupted = errors.New("the table changed during each attempt: the next sync tries again")

// read returns the entries of a table, valid until the next call.
func (t *legacyTables) read(table string) (info tableInfo, entries []byte, err error) {
	for range readAttempts {
		if info, err = t.table(table); err != nil || info.Size == 0 {
			return info, nil, err
		}
		header := entriesHeader{Name: info.Name, Size: info.Size}
		begin := int(unsafe.Sizeof(header))
		if need := begin + int(info.Size); cap(t.buffer) < need {
			t.buffer = make([]byte, need+need/4)
		} else {
			clear(t.buffer[:need]) // the kernel does not write the gaps after names
		}
		*(*entriesHeader)(unsafe.Pointer(unsafe.SliceData(t.buffer))) = header
		err = t.getsockopt(table, iptSoGetEntries, unsafe.Pointer(unsafe.SliceData(t.buffer)), uintptr(begin)+uintptr(info.Size))
		if errors.Is(err, unix.EAGAIN) {
			continue // the size has changed
		}
		if err != nil {
			return info, nil, err
		}
		again, err := t.table(table)
		if err != nil || again == info {
			return info, t.buffer[begin:][:info.Size], err
		}
	}
	return info, nil, fmt.Errorf("read legacy table %s: %w", table, errInterrupted)
}

// digests holds, for each chain of an instance, a hash of each rule without its counters;
// for a built-in chain, of the rules that jump to those chains.
type digests map[chainID][]uint64

// digest adds the chains of a table.
func (t *legacyTables) digest(table string, owned func(chain string) bool, into digests) (tableInfo, error) {
	info, blob, err := t.read(table)
	if err != nil || blob == nil {
		return info, err
	}
	layout := legacyOf(t.family).layout
	entries, begins, err := layout.parse(&info, blob)
	if err != nil {
		return info, fmt.Errorf("parse legacy table %s: %w", table, err)
	}
	var id chainID
	var isOurs, isBuiltIn bool
	for i := range entries {
		e := &entries[i]
		if chain, ok := begins[e.at]; ok {
			id, isOurs, isBuiltIn = chainID{table, chain}, owned(chain), slices.Contains(builtInChains, chain)
		}
		to := begins[e.to]
		isJump := isBuiltIn && owned(to)
		if !isOurs && !isJump {
			continue
		}
		t.hash.Reset()
		_, _ = t.hash.Write(blob[e.at:][:layout.match]) // never fails
		_, _ = t.hash.Write(blob[e.at+layout.matches : e.target])
		_, _ = t.hash.Write(e.action)
		_, _ = t.hash.WriteString(to)
		into[id] = append(into[id], t.hash.Sum64())
	}
	for _, chain := range begins { // the last entry of a chain is its end
		if id := (chainID{table, chain}); owned(chain) && len(into[id]) > 0 {
			into[id] = into[id][:len(into[id])-1]
		}
	}
	return info, nil
}

// entryLayout holds offsets in struct ipt_entry or ip6t_entry: of the end of the fields
// that match addresses, interfaces and protocol; of target_offset, which next_offset
// follows; and of the matches, after the counters.
type entryLayout struct{ match, offsets, matches int }

var (
	layoutIPv4 = entryLayout{84, 88, 112}   // read-only
	layoutIPv6 = entryLayout{136, 140, 168} // read-only
)

// entry is a rule, or the end of a chain.
type entry struct {
	at, target int
	// action is the target, except for a jump: it contains an offset, which changes with
	// every rule before it.
	action []byte
	to     int // where the chain begins that it jumps to, or nowhere
}

const nowhere = -1

// targetName is the name of the target, "" for a verdict or a jump.
func (e *entry) targetName() string {
	if e.action == nil {
		return ""
	}
	return unix.ByteSliceToString(e.action[targetName:][:xtExtensionMaxNameLen])
}

// Offsets in struct xt_entry_target, sizes of its name and of the name in an ERROR target
// (linux/netfilter/x_tables.h).
const (
	targetName            = 2
	targetRevision        = 31
	targetData            = 32
	xtExtensionMaxNameLen = 29
	xtFunctionMaxNameLen  = 30
	minTargetLen          = targetData + 4
)

var errMalformed = errors.New("malformed entry")

// parse returns the entries of a table, and the chain that begins at each offset. The
// offsets of built-in chains are in info; other chains follow an entry with the target
// ERROR, which holds the name.
func (l entryLayout) parse(info *tableInfo, blob []byte) (entries []entry, begins map[int]string, err error) {
	begins = map[int]string{}
	for hook, name := range builtInChains {
		if info.ValidHooks&(1<<hook) != 0 {
			begins[int(info.HookEntry[hook])] = name
		}
	}
	for at := 0; at < len(blob); {
		if at+l.matches > len(blob) {
			return nil, nil, errMalformed
		}
		target := at + int(binary.NativeEndian.Uint16(blob[at+l.offsets:]))
		end := at + int(binary.NativeEndian.Uint16(blob[at+l.offsets+2:]))
		if target < at+l.matches || target+minTargetLen > end || end > len(blob) {
			return nil, nil, errMalformed
		}
		data := blob[target+targetData : end]
		e := entry{at, target, blob[target:end], nowhere}
		name, _, _ := bytes.Cut(blob[target+targetName:][:xtExtensionMaxNameLen], []byte{0})
		switch string(name) { // which allocates nothing
		case "ERROR":
			begins[end] = unix.ByteSliceToString(data[:min(xtFunctionMaxNameLen, len(data))])
		case "": // the standard target: a verdict, or the offset to jump to
			if verdict := int(int32(binary.NativeEndian.Uint32(data))); verdict >= 0 {
				e.action = nil
				if verdict != end { // otherwise the rule only counts
					e.to = verdict
				}
			}
			fallthrough
		default:
			entries = append(entries, e)
		}
		at = end
	}
	return entries, begins, nil
}
