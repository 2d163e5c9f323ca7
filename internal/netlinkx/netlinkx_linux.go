package netlinkx

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/proxier"
)

// attempts is how often an interrupted dump is tried.
const attempts = 20

// ErrInterrupted means that a list changed during each attempt to read it, so that it may have objects twice, or lack
// some (NLM_F_DUMP_INTR).
var ErrInterrupted = fmt.Errorf("changes by other programs interrupt each reading: %w", netlink.ErrDumpInterrupted)

// Denied makes an error about a missing privilege an ErrPermission that says what to do.
func Denied(err error) error {
	if errors.Is(err, fs.ErrPermission) && !errors.Is(err, proxier.ErrPermission) {
		return fmt.Errorf("%w: %w: run with CAP_NET_ADMIN in the network namespace", proxier.ErrPermission, err)
	}
	return err
}

// Limited limits the calls with a socket to AnswerTime.
func Limited(s *nl.NetlinkSocket, err error) (*nl.NetlinkSocket, error) {
	if err == nil {
		limit := unix.NsecToTimeval(AnswerTime.Nanoseconds())
		err = errors.Join(s.SetSendTimeout(&limit), s.SetReceiveTimeout(&limit))
	}
	return s, err
}

// LimitedHandle limits the calls with a handle to AnswerTime.
func LimitedHandle(h *netlink.Handle, err error) (*netlink.Handle, error) {
	if err == nil {
		err = h.SetSocketTimeout(AnswerTime)
	}
	return h, err
}

// Socket is a netlink socket for netfilter, and one for routing, in one network
// namespace.
type Socket struct {
	routing   *netlink.Handle
	netfilter *Conn
}

// Open opens sockets in a network namespace: a path, a name under /run/netns, or
// "" for the current one.
func Open(netNS string) (*Socket, error) {
	ns := netns.None()
	if netNS != "" {
		var err error
		if ns, err = namespace.Open(netNS); err != nil {
			return nil, err
		}
		defer func() { _ = ns.Close() }() // the sockets keep it open
	}
	routing, err := LimitedHandle(netlink.NewHandleAt(ns, unix.NETLINK_ROUTE))
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	netfilter, err := Dial(netNS, unix.NETLINK_NETFILTER, answerRoom)
	if err != nil {
		routing.Close()
		return nil, err
	}
	return &Socket{routing: routing, netfilter: netfilter}, nil
}

// Close closes the sockets.
func (s *Socket) Close() {
	s.routing.Close()
	_ = s.netfilter.Close()
}

// answerRoom holds what the kernel answers at once.
const answerRoom = 1 << 20

// ask sends a message about connection tracking, and calls each for the entries of the answer.
func (s *Socket) ask(operation, flags uint16, family uint8, attrs []byte, each func(*Flow)) error {
	return s.netfilter.ask(Request(unix.NFNL_SUBSYS_CTNETLINK<<8|operation, flags, family, attrs...), entries(each))
}

// entries calls each for the entries in messages.
func entries(each func(*Flow)) func(Message) {
	return func(m Message) {
		_, attrs := m.Netfilter()
		if flow, ok := parseFlow(attrs); ok {
			each(&flow)
		}
	}
}

// AddrList lists the addresses of all links of one address family.
func AddrList(s *Socket, family int) (addrs []netlink.Addr, err error) {
	err = Retry(func() error {
		addrs, err = s.routing.AddrList(nil, family) //nolint:forbidigo // retried here
		return err
	})
	return addrs, err
}

// Addresses lists the addresses of all links of one address family.
func (s *Socket) Addresses(family int) ([]netip.Addr, error) {
	list, err := AddrList(s, family)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	addrs := make([]netip.Addr, 0, len(list))
	for i := range list {
		if addr, ok := netip.AddrFromSlice(list[i].IP); ok {
			addrs = append(addrs, addr.Unmap())
		}
	}
	return addrs, nil
}

// Devices lists the names of all links but loopback ones.
func (s *Socket) Devices() (names []string, err error) {
	links, err := LinkList(s)
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		if a := l.Attrs(); a.RawFlags&unix.IFF_LOOPBACK == 0 {
			names = append(names, a.Name)
		}
	}
	return names, nil
}

// Retry calls f until its error is not that others have interrupted a reading, some times at most.
func Retry(f func() error) (err error) {
	for range attempts {
		if err = f(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return err
}
