package iptables

import (
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

// legacyTableExists reports whether a network namespace has a table of the legacy variant.
// It reads a file, because any other request would make the kernel create the table.
func legacyTableExists(family v1.IPFamily, netNS, table string) (exists bool, err error) {
	file := "/proc/thread-self/net/ip_tables_names"
	if family == v1.IPv6Protocol {
		file = "/proc/thread-self/net/ip6_tables_names"
	}
	err = namespace.Visit(netNS, func() error {
		names, err := os.ReadFile(file)
		switch {
		case errors.Is(err, fs.ErrNotExist): // ip_tables is not loaded
			return nil
		case errors.Is(err, fs.ErrPermission):
			return fmt.Errorf("%w: list tables: %w", proxier.ErrPermission, err)
		case err != nil:
			return fmt.Errorf("list tables: %w", err)
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
	level := unix.SOL_IP
	if t.family == v1.IPv6Protocol {
		level = unix.SOL_IPV6
	}
	size := uint32(length)
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, t.file.Fd(), uintptr(level), option,
		uintptr(value), uintptr(unsafe.Pointer(&size)), 0)
	switch errno {
	case 0:
		return nil
	case unix.EPERM:
		return fmt.Errorf("%w: read legacy table %s: %w: run with CAP_NET_ADMIN in the network namespace",
			proxier.ErrPermission, table, errno)
	case unix.ENOPROTOOPT, unix.ENOENT:
		return &proxier.UnsupportedError{
			Feature: "legacy iptables table " + table,
			Hint:    "load module iptable_" + table + " or ip6table_" + table + ", or use the nft variant", Err: errno,
		}
	default:
		return fmt.Errorf("read legacy table %s: %w", table, errno)
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
