package conntrack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
// A set has two elements for each connection: one for each direction. The counter of the
// element says whether a packet of that direction has been answered with a RST.
type endingTable struct {
	netNS, name string
	family      v1.IPFamily
	made        bool
}

const (
	defaultTable = "serviceplane.ending"
	// endingPriority is after NF_IP_PRI_CONNTRACK (-200), and before all rules that
	// translate, and before IPVS.
	endingPriority = -190
	endingSet      = "connections"
	original       = 0 // IP_CT_DIR_ORIGINAL
	reply          = 1 // IP_CT_DIR_REPLY
)

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

func (t *endingTable) remove() error {
	t.made = false
	err := t.change((*nft.Batch).DeleteTable)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, proxier.ErrNotSupported) { // nothing can be there
		return nil
	}
	return err
}

func (t *endingTable) list(conns []*resettingConn) error {
	if !t.made {
		if err := t.create(); err != nil {
			return err
		}
	}
	err := t.change(func(b *nft.Batch) { writeElements(b, nft.AddElements(), conns) })
	t.made = err == nil
	return err
}

// create replaces the table by an empty one.
func (t *endingTable) create() error {
	rule, err := nft.Encode(t.number(), t.rule()...)
	if err != nil {
		return err
	}
	key := []nft.Field{nft.Mark, nft.Mark, nft.Addr, nft.Port}
	return t.change(func(b *nft.Batch) {
		b.ReplaceTable()
		b.NewSet(&nft.Set{Name: endingSet, ID: 1, Key: key, Flags: nft.SetFlags(key, nil, unix.NFT_SET_TIMEOUT), Timeout: patience, Counter: true})
		for name, hook := range map[string]uint32{"prerouting": unix.NF_INET_PRE_ROUTING, "output": unix.NF_INET_LOCAL_OUT} {
			b.NewChain(name, &nft.Hook{Kind: "filter", Number: hook, Priority: endingPriority}, nil)
			b.NewRule(name, rule, nil)
		}
	})
}

// rule is "tcp flags & (syn | rst) == 0 ct direction . ct id . ct reply saddr . ct reply
// proto-src @connections reject with tcp reset". A packet with SYN provokes, or begins a new connection.
func (t *endingTable) rule() []expr.Any {
	const flags = 13 // of struct tcphdr
	addr, port := nft.SourceIPv4, nft.Reg(3)
	if t.family == v1.IPv6Protocol {
		addr, port = nft.SourceIPv6, nft.Reg(6)
	}
	first := nft.Reg(0)
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: first},
		&expr.Cmp{Op: expr.CmpOpEq, Register: first, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: first, Base: expr.PayloadBaseTransportHeader, Offset: flags, Len: 1},
		&expr.Bitwise{SourceRegister: first, DestRegister: first, Len: 1, Mask: []byte{flagSYN | flagRST}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: first, Data: []byte{0}},
		&expr.Ct{Key: expr.CtKeyDIRECTION, Register: first},
		&expr.Ct{Key: nft.ConnectionID, Register: nft.Reg(1)},
		nft.Tracked{Ct: &expr.Ct{Key: addr, Register: nft.Reg(2), Direction: reply}},
		nft.Tracked{Ct: &expr.Ct{Key: expr.CtKeyPROTOSRC, Register: port, Direction: reply}},
		&expr.Lookup{SourceRegister: first, SetName: endingSet},
		&expr.Reject{Type: unix.NFT_REJECT_TCP_RST},
	}
}

// writeElements writes the elements of connections, for both directions.
func writeElements(b *nft.Batch, op nft.ElementOp, conns []*resettingConn) {
	var all []byte
	before := 0
	for _, c := range conns {
		for direction := range byte(reply + 1) {
			key := append([]byte{direction, 0, 0, 0}, c.handle.ID[:]...)
			key = append(key, c.server.Addr().AsSlice()...)
			key = append(key, byte(c.server.Port()>>8), byte(c.server.Port()), 0, 0)
			before = len(all)
			all = nft.AppendElement(all, key, nil, nil)
		}
	}
	b.Elements(op, endingSet, all, len(all)-before)
}

func (t *endingTable) reset() (reset map[[4]byte]bool, err error) {
	err = t.ask(func(c *nft.Conn, b *nft.Batch) error {
		b.ListElements(endingSet)
		return c.Dump(context.Background(), b, func() { reset = map[[4]byte]bool{} }, func(attrs []byte) { //nolint:forbidigo // it ends soon
			for e := range nft.ElementsOf(attrs) {
				if len(e.Key) >= 8 && e.Key[0] == original && e.Packets > 0 {
					reset[[4]byte(e.Key[4:8])] = true
				}
			}
		})
	})
	t.made = t.made && err == nil
	return reset, err
}

func (t *endingTable) forget(conns []*resettingConn, reset bool) error {
	if reset {
		err := t.eachFlow(conns, func(s *netlinkx.Socket, c *resettingConn) error { return s.Delete(t.number(), &c.handle) })
		if err != nil {
			return err
		}
	}
	listed := slices.DeleteFunc(slices.Clone(conns), func(c *resettingConn) bool { return !c.listed })
	if len(listed) == 0 || !t.made {
		return nil
	}
	err := t.change(func(b *nft.Batch) { writeElements(b, nft.DeleteElements(), listed) })
	if err != nil { // an element expired, or another program deleted the table: it is made again
		t.made = false
	}
	return err
}

func (t *endingTable) existing(conns []*resettingConn) (exist []*resettingConn, err error) {
	err = t.eachFlow(conns, func(s *netlinkx.Socket, c *resettingConn) error {
		found, err := s.Exists(t.number(), &c.handle)
		if found {
			exist = append(exist, c)
		}
		return err
	})
	return exist, err
}

func (t *endingTable) eachFlow(conns []*resettingConn, do func(*netlinkx.Socket, *resettingConn) error) error {
	s, err := netlinkx.Open(t.netNS)
	if err != nil {
		return classify(err)
	}
	defer s.Close()
	for _, c := range conns {
		if err := do(s, c); err != nil {
			return classify(err)
		}
	}
	return nil
}

func (t *endingTable) number() uint8 { return uint8(number(t.family)) }

// provoke sends a packet of the peer to each end. Connection tracking takes a SYN and ACK of
// the server in an open connection for a delayed one: it translates it, and changes no state.
// The same holds for a SYN of the client. The receiver answers with an acknowledgement (a
// challenge ACK, RFC 5961, section 4), which meets the rule.
func (t *endingTable) provoke(conns []*resettingConn) error {
	return namespace.Visit(t.netNS, func() error {
		fd, err := unix.Socket(number(t.family), unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return classify(fmt.Errorf("open raw socket: %w", err))
		}
		defer func() { _ = unix.Close(fd) }()
		for _, c := range conns {
			send(fd, c.server, c.handle.ReplyTo, flagSYN|flagACK, c.client.Addr())
			if c.byRule { // IPVS would take a SYN for a new connection
				send(fd, c.client, c.dialled, flagSYN, c.server.Addr())
			}
		}
		return nil
	})
}

// send sends a packet, which is routed as if to via. It may fail, and is sent again later.
func send(fd int, from, to netip.AddrPort, flags byte, via netip.Addr) {
	packet := segment(from, to, flags)
	if via.Is4() {
		_ = unix.Sendto(fd, packet, unix.MSG_DONTWAIT, &unix.SockaddrInet4{Addr: via.As4()})
		return
	}
	_ = unix.Sendto(fd, packet, unix.MSG_DONTWAIT, &unix.SockaddrInet6{Addr: via.As16()})
}

// EndingStatus is for proxier.Conntrack.
func (c *cleaner) EndingStatus(family v1.IPFamily) (open, ended int, cannot proxier.Condition) {
	return c.ending[family].status()
}

// CleanupEnding is for proxier.Conntrack.
func (c *cleaner) CleanupEnding(_ context.Context, family v1.IPFamily) error {
	t := endingTable{netNS: c.options.NetNS, name: c.options.Table, family: family}
	return t.remove()
}
