package conntrack

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/proxier"
)

// endingTable is a table of nf_tables of our own, whose rules reset connections. It exists
// while there are such connections. Its chains come right after connection tracking, before
// rules that translate and before routing, which may have no route to a pod that is gone.
//
// A set has two elements for each connection: one for each direction, with the addresses of packets
// as they arrive. The counter of the element says whether a packet has been answered with a RST.
// The conntrack entry of the connection is deleted: with it ends the connection in the flowtables of
// all programs, where packets pass no rule.
type endingTable struct {
	netNS, name string
	family      v1.IPFamily
	made        bool
	resets      map[string]uint64 // by element, when it was read or written last
}

const (
	defaultTable = "serviceplane.ending"
	// endingPriority is after NF_IP_PRI_CONNTRACK (-200), and before all rules that
	// translate, and before IPVS.
	endingPriority = -190
	endingSet      = "connections"
	// dynsetDelete is NFT_DYNSET_OP_DELETE of linux/netfilter/nf_tables.h.
	dynsetDelete = 2
	// maxElements is the size of a set that a rule changes, if no other is given (nft_dynset_init).
	maxElements = 0xffff
	// attempts are how often elements are deleted while others change them.
	attempts = 5
)

// element is the key of packets of one direction, as registers have it.
func element(from, to netip.AddrPort) (key []byte) {
	for _, end := range []netip.AddrPort{from, to} {
		key = append(key, end.Addr().AsSlice()...)
		key = append(key, byte(end.Port()>>8), byte(end.Port()), 0, 0)
	}
	return key
}

// original is the element of what the client sends, reply of what the server sends.
func (c *resettingConn) original() []byte { return element(c.client, c.dialled) }
func (c *resettingConn) reply() []byte    { return element(c.server, c.handle.ReplyTo) }

// change sends one transaction.
func (t *endingTable) change(write func(b *nft.Batch)) error {
	return t.ask(func(c *nft.Conn, b *nft.Batch) error {
		b.Begin()
		write(b)
		b.Finish()
		return c.Commit(context.Background(), b) //nolint:forbidigo // it ends soon
	})
}

// ask opens a socket for messages about the table.
func (t *endingTable) ask(do func(c *nft.Conn, b *nft.Batch) error) error {
	c, err := nft.Dial(t.netNS)
	if err != nil {
		return unsupported(err)
	}
	defer func() { _ = c.Close() }()
	return unsupported(do(c, &nft.Batch{Family: t.number(), Table: cmp.Or(t.name, defaultTable)}))
}

// unsupported explains what the kernel lacks.
func unsupported(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		return &proxier.UnsupportedError{
			Feature: "a table of nf_tables that resets connections", Err: err,
			Hint: "load modules nf_tables, nft_ct and nft_reject, or do not ask for ended connections",
		}
	}
	return classify(fmt.Errorf("table that resets connections: %w", err))
}

func (t *endingTable) remove() (left bool, err error) {
	t.made = false
	if err := t.read(); err == nil && len(t.resets) > 0 {
		return true, nil
	}
	return false, t.delete()
}

func (t *endingTable) delete() error {
	err := t.change((*nft.Batch).DeleteTable)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, proxier.ErrNotSupported) { // nothing can be there
		return nil
	}
	return err
}

// list also makes the table if it is not known to be there, with the elements that it had.
func (t *endingTable) list(conns []*resettingConn) error {
	if !t.made {
		_ = t.read() // there may be no table
	}
	fresh := map[string]uint64{}
	for _, c := range conns {
		fresh[string(c.original())], fresh[string(c.reply())] = 0, 0
	}
	write := func(b *nft.Batch) { writeElements(b, nft.AddElements(), maps.Keys(fresh)) }
	if !t.made {
		for key := range t.resets {
			if len(fresh) == maxElements-2*maxResetting {
				break
			}
			fresh[key] = 0
		}
		var err error
		if write, err = t.creation(write); err != nil {
			return err
		}
	}
	err := t.change(write)
	if t.made = err == nil; t.made {
		maps.Copy(fresh, t.resets)
		t.resets = fresh
	}
	return err
}

// creation replaces the table by one whose elements write adds.
func (t *endingTable) creation(write func(b *nft.Batch)) (func(b *nft.Batch), error) {
	begin, err := nft.Encode(t.number(), t.begin()...)
	if err != nil {
		return nil, err
	}
	reset, err := nft.Encode(t.number(), t.reset()...)
	if err != nil {
		return nil, err
	}
	key := []nft.Field{nft.Addr, nft.Port, nft.Addr, nft.Port}
	flags := nft.SetFlags(key, nil, unix.NFT_SET_TIMEOUT|unix.NFT_SET_EVAL)
	return func(b *nft.Batch) {
		b.ReplaceTable()
		b.NewSet(&nft.Set{Name: endingSet, ID: 1, Key: key, Flags: flags, Timeout: patience, Counter: true})
		for name, hook := range map[string]uint32{"prerouting": unix.NF_INET_PRE_ROUTING, "output": unix.NF_INET_LOCAL_OUT} {
			b.NewChain(name, &nft.Hook{Kind: "filter", Number: hook, Priority: endingPriority}, nil)
			b.NewRule(name, begin, nil)
			b.NewRule(name, reset, nil)
		}
		write(b)
	}, nil
}

// begin is "tcp flags & (syn | rst) != 0 delete @connections { … }": a new connection has these addresses,
// or this end has none any more.
func (t *endingTable) begin() []expr.Any {
	return append(append(flagged(flagSYN|flagRST, expr.CmpOpNeq), t.element()...),
		&expr.Dynset{SrcRegKey: nft.Reg(0), SetName: endingSet, Operation: dynsetDelete})
}

// reset is "tcp flags & (syn | rst) == 0 ct state new,invalid ip saddr . tcp sport . ip daddr . tcp
// dport @connections reject with tcp reset". A packet that provokes has SYN.
func (t *endingTable) reset() []expr.Any {
	const states = expr.CtStateBitNEW | expr.CtStateBitINVALID
	state := nft.Reg(0)
	return slices.Concat(flagged(flagSYN|flagRST, expr.CmpOpEq), []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: state},
		&expr.Bitwise{SourceRegister: state, DestRegister: state, Len: 4, Mask: binary.NativeEndian.AppendUint32(nil, states), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: state, Data: make([]byte, 4)},
	}, t.element(), []expr.Any{
		&expr.Lookup{SourceRegister: nft.Reg(0), SetName: endingSet},
		&expr.Reject{Type: unix.NFT_REJECT_TCP_RST},
	})
}

// flagged is "tcp flags & flags op 0".
func flagged(flags byte, op expr.CmpOp) []expr.Any {
	const offset = 13 // in struct tcphdr
	first := nft.Reg(0)
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: first},
		&expr.Cmp{Op: expr.CmpOpEq, Register: first, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: first, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 1},
		&expr.Bitwise{SourceRegister: first, DestRegister: first, Len: 1, Mask: []byte{flags}, Xor: []byte{0}},
		&expr.Cmp{Op: op, Register: first, Data: []byte{0}},
	}
}

// element loads the element of a packet.
func (t *endingTable) element() []expr.Any {
	size := uint32(nft.AddrLen(t.number()))
	source := uint32(12) // in struct iphdr
	if t.family == v1.IPv6Protocol {
		source = 8 // in struct ipv6hdr
	}
	var load []expr.Any
	for i := range uint32(2) {
		first := int(i * (size/4 + 1))
		load = append(load,
			&expr.Payload{DestRegister: nft.Reg(first), Base: expr.PayloadBaseNetworkHeader, Offset: source + i*size, Len: size},
			&expr.Payload{DestRegister: nft.Reg(first + int(size)/4), Base: expr.PayloadBaseTransportHeader, Offset: 2 * i, Len: 2})
	}
	return load
}

func writeElements(b *nft.Batch, op nft.ElementOp, keys iter.Seq[string]) {
	var all []byte
	size := 0
	for key := range keys {
		before := len(all)
		all = nft.AppendElement(all, []byte(key), nil, nil)
		size = len(all) - before
	}
	b.Elements(op, endingSet, all, size)
}

// read reads how many packets have got a RST.
func (t *endingTable) read() error {
	t.resets = nil
	size := 2 * (nft.AddrLen(t.number()) + 4)
	return t.ask(func(c *nft.Conn, b *nft.Batch) error {
		b.ListElements(endingSet)
		return c.Dump(context.Background(), b, func() { t.resets = map[string]uint64{} }, func(attrs []byte) { //nolint:forbidigo // it ends soon
			for e := range nft.ElementsOf(attrs) {
				if len(e.Key) == size {
					t.resets[string(e.Key)] = e.Packets
				}
			}
		})
	})
}

func (t *endingTable) waiting() (func(*resettingConn) (uint64, bool), error) {
	err := t.read()
	t.made = err == nil
	return func(c *resettingConn) (resets uint64, ok bool) {
		resets, ok = t.resets[string(c.original())]
		return resets, ok
	}, err
}

func (t *endingTable) forget(conns []*resettingConn) (err error) {
	for range attempts {
		if err = t.unlist(conns); !errors.Is(err, unix.ENOENT) {
			return err
		}
		if err := t.read(); err != nil {
			return err
		}
	}
	return err
}

// unlist fails if an element has expired or been deleted by a new connection in the meantime.
func (t *endingTable) unlist(conns []*resettingConn) error {
	old := map[string]uint64{}
	for _, c := range conns {
		for _, key := range [][]byte{c.original(), c.reply()} {
			if resets, ok := t.resets[string(key)]; ok && c.listed {
				old[string(key)] = resets
			}
		}
	}
	if len(old) == 0 || !t.made {
		return nil
	}
	return t.change(func(b *nft.Batch) { writeElements(b, nft.DeleteElements(), maps.Keys(old)) })
}

func (t *endingTable) cut(conns []*resettingConn) (ended []*resettingConn, err error) {
	if len(conns) == 0 {
		return nil, nil
	}
	s, err := netlinkx.Open(t.netNS)
	if err != nil {
		return nil, classify(err)
	}
	defer s.Close()
	for _, c := range conns {
		if c.cut, err = s.Delete(t.number(), &c.handle); err != nil {
			return nil, classify(err)
		}
		if !c.cut {
			ended = append(ended, c)
		}
	}
	return ended, nil
}

func (t *endingTable) number() uint8 { return uint8(number(t.family)) }

// provoke sends a packet of the peer to each end, with SYN and ACK: connection tracking neither
// translates it nor makes an entry. The receiver answers with an acknowledgement (a challenge ACK,
// RFC 5961, section 4), which meets the rule.
func (t *endingTable) provoke(conns []*resettingConn) error {
	return namespace.Visit(t.netNS, func() error {
		fd, err := unix.Socket(number(t.family), unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return classify(fmt.Errorf("open raw socket: %w", err))
		}
		defer func() { _ = unix.Close(fd) }()
		for _, c := range conns {
			send(fd, c.dialled, c.client)
			send(fd, c.handle.ReplyTo, c.server)
		}
		return nil
	})
}

// send sends a packet. It may fail, and is sent again later.
func send(fd int, from, to netip.AddrPort) {
	packet := segment(from, to, flagSYN|flagACK)
	if to.Addr().Is4() {
		_ = unix.Sendto(fd, packet, unix.MSG_DONTWAIT, &unix.SockaddrInet4{Addr: to.Addr().As4()})
		return
	}
	_ = unix.Sendto(fd, packet, unix.MSG_DONTWAIT, &unix.SockaddrInet6{Addr: to.Addr().As16()})
}

// EndingStatus is for proxier.Conntrack.
func (c *cleaner) EndingStatus(family v1.IPFamily) (open, ended int, cannot proxier.Condition) {
	return c.ending[family].status()
}

// CleanupEnding is for proxier.Conntrack.
func (c *cleaner) CleanupEnding(_ context.Context, family v1.IPFamily) error {
	t := endingTable{netNS: c.options.NetNS, name: c.options.Table, family: family}
	return t.delete()
}
