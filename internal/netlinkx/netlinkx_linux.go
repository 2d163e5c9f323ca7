package netlinkx

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

// attempts is how often an interrupted dump is tried.
const attempts = 5

// AnswerTime is how long a call waits for the kernel, which answers while it takes a request. An
// answer that is not there soon never comes.
const AnswerTime = 10 * time.Second

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
	netfilter *nl.SocketHandle
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
	netfilter, err := Limited(nl.GetNetlinkSocketAt(ns, netns.None(), unix.NETLINK_NETFILTER))
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	routing, err := LimitedHandle(netlink.NewHandleAt(ns, unix.NETLINK_ROUTE))
	if err != nil {
		netfilter.Close()
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	return &Socket{routing: routing, netfilter: &nl.SocketHandle{Socket: netfilter}}, nil
}

// Close closes the sockets.
func (s *Socket) Close() {
	s.routing.Close()
	s.netfilter.Close()
}

// request begins a message about connection tracking.
func (s *Socket) request(operation, flags int, family uint8) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|operation, flags)
	r.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: s.netfilter}
	r.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	return r
}

// AddrList lists the addresses of all links of one address family.
func AddrList(s *Socket, family int) (addrs []netlink.Addr, err error) {
	err = retry(func() error {
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

// retry calls f until it is not interrupted, at most attempts times.
func retry(f func() error) error {
	var err error
	for range attempts {
		if err = f(); !interrupted(err) {
			return err
		}
	}
	return err
}

// interrupted reports whether a table changed while it was read, so that the result may be
// incomplete.
func interrupted(err error) bool { return errors.Is(err, netlink.ErrDumpInterrupted) }
