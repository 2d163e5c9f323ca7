package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"os"
	"unsafe"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// fingerprint is a cheap summary of the tables nat and filter, to be compared with
// one of the same prober.
//
// With the legacy variant it has number, size and hooks of all entries of each
// table, those of others too. It misses a rule that was replaced by one of the same
// size, and rules that were moved.
//
// With the nft variant it has the owned chains, and for each how many rules it has
// and how many jump to it, in sum. It misses a rule that was replaced, moved, or
// changed in place, and as many jumps added as rules deleted.
type fingerprint struct {
	nat, filter tableInfo // of the legacy variant
	chains      int       // of the nft variant, with digest
	digest      uint64
}

// prober takes fingerprints. One goroutine at a time may use it.
type prober struct {
	legacy *legacyProber // nil, or
	nft    *nftProber
}

// newProber opens sockets in a network namespace, as in namespace.Visit. owned says
// which chains are ours; the legacy variant does not ask.
func newProber(family v1.IPFamily, v Variant, netNS string, owned func(chain string) bool) (*prober, error) {
	if v == VariantLegacy {
		legacy, err := newLegacyProber(family, netNS)
		return &prober{legacy: legacy}, err
	}
	nft, err := newNFTProber(family, netNS, owned)
	return &prober{nft: nft}, err
}

// probe takes a fingerprint. It changes nothing, and creates no tables.
func (p *prober) probe() (fingerprint, error) {
	if p.legacy != nil {
		return p.legacy.probe()
	}
	return p.nft.probe()
}

func (p *prober) close() error {
	if p.legacy != nil {
		return p.legacy.close()
	}
	return p.nft.close()
}

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

// legacyProber asks ip_tables, or ip6_tables.
type legacyProber struct {
	family v1.IPFamily
	netNS  string
	file   *os.File // a socket
	// exists has the tables that were seen: they never go away.
	exists map[string]bool
}

func newLegacyProber(family v1.IPFamily, netNS string) (*legacyProber, error) {
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
	return &legacyProber{
		family: family, netNS: netNS, file: os.NewFile(uintptr(fd), "ip_tables"), exists: map[string]bool{},
	}, nil
}

func (p *legacyProber) probe() (f fingerprint, err error) {
	if f.nat, err = p.table("nat"); err != nil {
		return fingerprint{}, err
	}
	if f.filter, err = p.table("filter"); err != nil {
		return fingerprint{}, err
	}
	return f, nil
}

// table is the info of a table, and that of none if it does not exist.
func (p *legacyProber) table(name string) (tableInfo, error) {
	if !p.exists[name] {
		exists, err := legacyTableExists(p.family, p.netNS, name)
		if err != nil || !exists {
			return tableInfo{}, err
		}
		p.exists[name] = true
	}
	return p.info(name)
}

// optGetInfo is IPT_SO_GET_INFO and IP6T_SO_GET_INFO.
const optGetInfo = 64

// info asks for a table, which the kernel creates if it does not exist.
func (p *legacyProber) info(name string) (info tableInfo, err error) {
	level := unix.SOL_IP
	if p.family == v1.IPv6Protocol {
		level = unix.SOL_IPV6
	}
	copy(info.Name[:], name)
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, p.file.Fd(), uintptr(level), optGetInfo,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno == 0 {
		return info, nil
	}
	if errno == unix.EPERM {
		return tableInfo{}, fmt.Errorf("%w: ask for legacy table %s: %w: run with CAP_NET_ADMIN in the network namespace",
			proxier.ErrPermission, name, errno)
	}
	if errno == unix.ENOPROTOOPT || errno == unix.ENOENT {
		return tableInfo{}, &proxier.UnsupportedError{
			Feature: "legacy iptables table " + name,
			Hint:    "load module iptable_" + name + " or ip6table_" + name + ", or use the nft variant", Err: errno,
		}
	}
	return tableInfo{}, fmt.Errorf("ask for legacy table %s: %w", name, errno)
}

func (p *legacyProber) close() error { return p.file.Close() }

// chainID names a chain of the tables nat and filter.
type chainID struct{ table, chain string }

// chainState is what nf_tables tells of a chain: a handle for each time that it is
// made, and the number of its rules and of the jumps to it, in sum.
type chainState struct {
	handle uint64
	use    uint32
}

// nftProber asks nf_tables.
type nftProber struct {
	conn   *netlink.Conn
	family uint8
	owned  func(chain string) bool
	seed   maphash.Seed
	// last is of generation, if known, and made of chains.
	last       fingerprint
	chains     map[chainID]chainState
	generation uint32
	known      bool
}

func newNFTProber(family v1.IPFamily, netNS string, owned func(chain string) bool) (*nftProber, error) {
	p := &nftProber{family: unix.NFPROTO_IPV4, owned: owned, seed: maphash.MakeSeed()}
	if family == v1.IPv6Protocol {
		p.family = unix.NFPROTO_IPV6
	}
	err := namespace.Visit(netNS, func() (err error) {
		p.conn, err = netlink.Dial(unix.NETLINK_NETFILTER, nil)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	return p, nil
}

const (
	nfgenHeaderLen = 4 // struct nfgenmsg
	dumpAttempts   = 5
)

var errInterrupted = errors.New("interrupted by changes each time")

// probe reads the chains only if anybody changed anything in nf_tables. As it asks
// for the generation first, it never takes old chains for new ones.
func (p *nftProber) probe() (fingerprint, error) {
	generation, err := p.askGeneration()
	if err != nil {
		return fingerprint{}, err
	}
	if p.known && p.generation == generation {
		return p.last, nil
	}
	for range dumpAttempts {
		chains, interrupted, err := p.dump()
		if err != nil {
			return fingerprint{}, err
		}
		if !interrupted {
			p.last, p.chains, p.generation, p.known = p.fold(chains), chains, generation, true
			return p.last, nil
		}
	}
	return fingerprint{}, &proxier.ApplyError{Op: "list", Object: "chains", Err: errInterrupted}
}

func (p *nftProber) askGeneration() (uint32, error) {
	messages, err := p.execute(unix.NFT_MSG_GETGEN, netlink.Request)
	if err != nil {
		return 0, err
	}
	for _, m := range messages {
		if id := netlinkx.Find(m.Data[min(nfgenHeaderLen, len(m.Data)):], unix.NFTA_GEN_ID); len(id) == 4 {
			return binary.BigEndian.Uint32(id), nil
		}
	}
	return 0, &proxier.ApplyError{Op: "list", Object: "generation of nf_tables", Err: unix.ENODATA}
}

// dump lists all owned chains.
func (p *nftProber) dump() (chains map[chainID]chainState, interrupted bool, err error) {
	messages, err := p.execute(unix.NFT_MSG_GETCHAIN, netlink.Request|netlink.Dump)
	if err != nil {
		return nil, false, err
	}
	chains = make(map[chainID]chainState, len(messages))
	for _, m := range messages {
		interrupted = interrupted || m.Header.Flags&netlink.DumpInterrupted != 0
		id, state := chainOf(m.Data[min(nfgenHeaderLen, len(m.Data)):])
		if id.table != "" && p.owned(id.chain) {
			chains[id] = state
		}
	}
	return chains, interrupted, nil
}

// chainOf reads one chain. Tables other than nat and filter have no name.
func chainOf(attrs []byte) (id chainID, state chainState) {
	for typ, value := range netlinkx.Attributes(attrs) {
		switch {
		case typ == unix.NFTA_CHAIN_TABLE && string(value) == tableNAT+"\x00":
			id.table = tableNAT
		case typ == unix.NFTA_CHAIN_TABLE && string(value) == tableFilter+"\x00":
			id.table = tableFilter
		case typ == unix.NFTA_CHAIN_NAME:
			id.chain = string(bytes.TrimRight(value, "\x00"))
		case typ == unix.NFTA_CHAIN_HANDLE && len(value) == 8:
			state.handle = binary.BigEndian.Uint64(value)
		case typ == unix.NFTA_CHAIN_USE && len(value) == 4:
			state.use = binary.BigEndian.Uint32(value)
		}
	}
	return id, state
}

// fold makes a fingerprint of chains, in any order.
func (p *nftProber) fold(chains map[chainID]chainState) fingerprint {
	f := fingerprint{chains: len(chains)}
	var h maphash.Hash
	h.SetSeed(p.seed)
	var figures []byte
	for id, state := range chains {
		figures = binary.BigEndian.AppendUint64(figures[:0], state.handle)
		figures = binary.BigEndian.AppendUint32(figures, state.use)
		h.Reset()
		_, _ = h.Write(figures) // never fails
		_, _ = h.WriteString(id.table + "\x00" + id.chain)
		f.digest += h.Sum64()
	}
	return f
}

func (p *nftProber) execute(typ uint16, flags netlink.HeaderFlags) ([]netlink.Message, error) {
	messages, err := p.conn.Execute(netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | typ), Flags: flags},
		Data:   []byte{p.family, unix.NFNETLINK_V0, 0, 0},
	})
	if errors.Is(err, unix.EPERM) {
		return nil, fmt.Errorf("%w: list chains of nf_tables: %w: run with CAP_NET_ADMIN in the network namespace",
			proxier.ErrPermission, err)
	}
	if err != nil {
		return nil, fmt.Errorf("list chains of nf_tables: %w", err)
	}
	return messages, nil
}

func (p *nftProber) close() error { return p.conn.Close() }
