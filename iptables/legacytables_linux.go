package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/proxier"
)

// tableInfo is struct ipt_getinfo of linux/netfilter_ipv4/ip_tables.h, which is the
// same for IPv6. It has no padding.
type tableInfo struct {
	Name       [32]byte
	ValidHooks uint32
	HookEntry  [5]uint32
	Underflow  [5]uint32
	Entries    uint32 // rules, and an end for each chain
	Size       uint32 // in bytes
}

// entriesHeader is struct ipt_get_entries, which the entries follow.
type entriesHeader struct {
	_    [0]uint64 // aligns the entries
	Name [32]byte
	Size uint32
}

// Options of the socket: IPT_SO_GET_INFO and IPT_SO_GET_ENTRIES, and the same of IPv6.
const (
	optGetInfo    = 64
	optGetEntries = 65
)

// entryLayout is where the parts of struct ipt_entry are, or of struct ip6t_entry: what
// addresses, interfaces and protocol match ends first; then come, at offsets, where the
// target and the next entry are; then the matches begin, after the counters.
type entryLayout struct{ match, offsets, matches int }

// legacyTables asks ip_tables, or ip6_tables.
type legacyTables struct {
	family v1.IPFamily
	netNS  string
	file   *os.File // a socket
	// exists has the tables that were seen: they never go away.
	exists map[string]bool
	buffer []byte
	hash   maphash.Hash
}

// openLegacyTables opens a socket in a network namespace, as in namespace.Visit.
func openLegacyTables(family v1.IPFamily, netNS string) (*legacyTables, error) {
	domain := unix.AF_INET
	if family == v1.IPv6Protocol {
		domain = unix.AF_INET6
	}
	fd := -1
	err := namespace.Visit(netNS, func() (err error) {
		fd, err = unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
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

// table is the info of a table, and that of none if it does not exist.
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

// info asks for a table, which the kernel creates if it does not exist.
func (t *legacyTables) info(name string) (info tableInfo, err error) {
	copy(info.Name[:], name)
	err = t.ask(name, optGetInfo, unsafe.Pointer(&info), unsafe.Sizeof(info))
	return info, err
}

func (t *legacyTables) ask(table string, option uintptr, answer unsafe.Pointer, length uintptr) error {
	level := unix.SOL_IP
	if t.family == v1.IPv6Protocol {
		level = unix.SOL_IPV6
	}
	size := uint32(length)
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, t.file.Fd(), uintptr(level), option,
		uintptr(answer), uintptr(unsafe.Pointer(&size)), 0)
	if errno == 0 {
		return nil
	}
	if errno == unix.EPERM {
		return fmt.Errorf("%w: ask for legacy table %s: %w: run with CAP_NET_ADMIN in the network namespace",
			proxier.ErrPermission, table, errno)
	}
	if errno == unix.ENOPROTOOPT || errno == unix.ENOENT {
		return &proxier.UnsupportedError{
			Feature: "legacy iptables table " + table,
			Hint:    "load module iptable_" + table + " or ip6table_" + table + ", or use the nft variant", Err: errno,
		}
	}
	return fmt.Errorf("ask for legacy table %s: %w", table, errno)
}

const readAttempts = 5

// read returns the entries of a table, and how they are arranged. They are valid until
// the next call.
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
			clear(t.buffer[:need]) // the kernel leaves gaps behind names
		}
		*(*entriesHeader)(unsafe.Pointer(unsafe.SliceData(t.buffer))) = header
		err = t.ask(table, optGetEntries, unsafe.Pointer(unsafe.SliceData(t.buffer)), uintptr(begin)+uintptr(info.Size))
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
	return info, nil, fmt.Errorf("list entries of legacy table %s: %w", table, errInterrupted)
}

var errInterrupted = errors.New("interrupted by changes each time")

// digests are hashes of rules without their counters, in their order, of the chains of an
// instance; and of the kernel's chains, of the rules that jump to those.
type digests map[chainID][]uint64

// digest adds the chains of a table.
func (t *legacyTables) digest(table string, owned func(chain string) bool, into digests) (tableInfo, error) {
	info, blob, err := t.read(table)
	if err != nil || blob == nil {
		return info, err
	}
	layout := entryLayout{84, 88, 112}
	if t.family == v1.IPv6Protocol {
		layout = entryLayout{136, 140, 168}
	}
	rules, begins, err := layout.rules(&info, blob)
	if err != nil {
		return info, fmt.Errorf("read legacy table %s: %w", table, err)
	}
	var id chainID
	var isOurs, isBuiltIn bool
	for i := range rules {
		r := &rules[i]
		if chain, ok := begins[r.at]; ok {
			id, isOurs, isBuiltIn = chainID{table, chain}, owned(chain), slices.Contains(builtIn(), chain)
		}
		to := begins[r.to]
		isJump := isBuiltIn && owned(to)
		if !isOurs && !isJump {
			continue
		}
		t.hash.Reset()
		_, _ = t.hash.Write(blob[r.at:][:layout.match]) // never fails
		_, _ = t.hash.Write(blob[r.at+layout.matches : r.target])
		_, _ = t.hash.Write(r.action)
		_, _ = t.hash.WriteString(to)
		into[id] = append(into[id], t.hash.Sum64())
	}
	for _, chain := range begins { // a chain of ours has its end as its last entry
		if id := (chainID{table, chain}); owned(chain) && len(into[id]) > 0 {
			into[id] = into[id][:len(into[id])-1]
		}
	}
	return info, nil
}

// entry is a rule, or the end of a chain: where it begins, and its target. The target is
// what it does, or the place that it jumps to, which moves with every change.
type entry struct {
	at, target int
	action     []byte
	to         int // nowhere, or where a chain begins
}

const nowhere = -1

// Parts of struct xt_entry_target of linux/netfilter/x_tables.h, and of what follows it.
const (
	targetName    = 2
	targetData    = 32
	maxTargetName = 29 // XT_EXTENSION_MAXNAMELEN
	maxErrorName  = 30 // XT_FUNCTION_MAXNAMELEN
	minEntryLen   = targetData + 4
)

var errMalformed = errors.New("malformed entry")

// rules takes a table apart, and says where which chain begins: those of the kernel at
// their hooks, others behind an entry with an "ERROR" target that holds the name.
func (l entryLayout) rules(info *tableInfo, blob []byte) (rules []entry, begins map[int]string, err error) {
	begins = map[int]string{}
	for hook, name := range builtIn() {
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
		if target < at+l.matches || target+minEntryLen > end || end > len(blob) {
			return nil, nil, errMalformed
		}
		data := blob[target+targetData : end]
		switch r := (entry{at, target, blob[target:end], nowhere}); text(blob[target+targetName:][:maxTargetName]) {
		case "ERROR":
			begins[end] = text(data[:min(maxErrorName, len(data))])
		case "": // the standard target
			if verdict := int(int32(binary.NativeEndian.Uint32(data))); verdict >= 0 {
				r.action = nil
				if verdict != end { // the rule does nothing
					r.to = verdict
				}
			}
			fallthrough
		default:
			rules = append(rules, r)
		}
		at = end
	}
	return rules, begins, nil
}

// text is a string in a field that zeros fill.
func text(b []byte) string {
	before, _, _ := bytes.Cut(b, []byte{0})
	return string(before)
}
