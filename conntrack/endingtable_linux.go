package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
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
	// firstRegister is the first one of 4 bytes, NFT_REG32_00.
	firstRegister = 8
	original      = 0 // IP_CT_DIR_ORIGINAL
	reply         = 1 // IP_CT_DIR_REPLY
	flagsOffset   = 13
)

func (t *endingTable) table() *nftables.Table {
	family := nftables.TableFamilyIPv4
	if t.family == v1.IPv6Protocol {
		family = nftables.TableFamilyIPv6
	}
	name := t.name
	if name == "" {
		name = defaultTable
	}
	return &nftables.Table{Family: family, Name: name}
}

func (t *endingTable) set() *nftables.Set {
	addr := nftables.TypeIPAddr
	if t.family == v1.IPv6Protocol {
		addr = nftables.TypeIP6Addr
	}
	return &nftables.Set{
		Table: t.table(), Name: "connections", ID: 1, HasTimeout: true, Timeout: patience, Counter: true, Concatenation: true,
		KeyType: nftables.MustConcatSetType(nftables.TypeMark, nftables.TypeMark, addr, nftables.TypeInetService),
	}
}

// change sends one transaction.
func (t *endingTable) change(write func(c *nftables.Conn) error) error {
	return t.visit(func() error {
		c, err := nftables.New()
		if err != nil {
			return unsupported(err)
		}
		if err := write(c); err != nil {
			return unsupported(err)
		}
		return unsupported(c.Flush())
	})
}

func (t *endingTable) visit(f func() error) error { return namespace.Visit(t.netNS, f) }

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
	err := t.change(func(c *nftables.Conn) error { c.DelTable(t.table()); return nil })
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
	err := t.change(func(c *nftables.Conn) error { return c.SetAddElements(t.set(), elements(conns)) })
	t.made = err == nil
	return err
}

// create replaces the table by an empty one.
func (t *endingTable) create() error {
	set, chains := t.set(), []string{"prerouting", "output"}
	hooks := []*nftables.ChainHook{nftables.ChainHookPrerouting, nftables.ChainHookOutput}
	err := t.change(func(c *nftables.Conn) error {
		c.AddTable(set.Table)
		c.DelTable(set.Table)
		c.AddTable(set.Table)
		for i, name := range chains {
			c.AddChain(&nftables.Chain{
				Name: name, Table: set.Table, Type: nftables.ChainTypeFilter, Hooknum: hooks[i],
				Priority: nftables.ChainPriorityRef(endingPriority),
			})
		}
		return c.AddSet(set, nil)
	})
	if err != nil {
		return err
	}
	return t.visit(func() error { return t.addRules(set, chains) })
}

// elements are the keys of both directions.
func elements(conns []*resettingConn) []nftables.SetElement {
	all := make([]nftables.SetElement, 0, 2*len(conns))
	for _, c := range conns {
		for direction := range byte(reply + 1) {
			key := append([]byte{direction, 0, 0, 0}, c.handle.ID[:]...)
			key = append(key, c.server.Addr().AsSlice()...)
			all = append(all, nftables.SetElement{Key: append(key, byte(c.server.Port()>>8), byte(c.server.Port()), 0, 0)})
		}
	}
	return all
}

func (t *endingTable) reset() (reset map[[4]byte]bool, err error) {
	reset = map[[4]byte]bool{}
	return reset, t.visit(func() error {
		c, err := nftables.New()
		if err != nil {
			return unsupported(err)
		}
		all, err := c.GetSetElements(t.set())
		if err != nil {
			t.made = false
			return unsupported(err)
		}
		for i := range all {
			if key := all[i].Key; len(key) >= 8 && key[0] == original && all[i].Counter != nil && all[i].Counter.Packets > 0 {
				reset[[4]byte(key[4:8])] = true
			}
		}
		return nil
	})
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
	err := t.change(func(c *nftables.Conn) error { return c.SetDeleteElements(t.set(), elements(listed)) })
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
	return t.visit(func() error {
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
func (c *Cleaner) EndingStatus(family v1.IPFamily) (open, ended int, cannot proxier.Condition) {
	return c.ending[family].status()
}

// CleanupEnding is for proxier.Conntrack.
func (c *Cleaner) CleanupEnding(_ context.Context, family v1.IPFamily) error {
	t := endingTable{netNS: c.options.NetNS, name: c.options.Table, family: family}
	return t.remove()
}
