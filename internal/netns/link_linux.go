package netns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Plug is one end of a cable: its namespace, the name of its link there and the link's
// addresses.
type Plug struct {
	NS    *NS
	Link  string
	Addrs []netip.Prefix
}

// A link comes up within milliseconds, except on a very busy machine.
const (
	readyTimeout = 5 * time.Second
	readyPoll    = time.Millisecond
)

// loopbackIndex is LOOPBACK_IFINDEX of net/flow.h: lo is the first link of every
// namespace.
const loopbackIndex = 1

// Connect creates a cable, a veth pair, between two namespaces or within one. It returns
// when both ends are up and their addresses can be used.
func Connect(a, b Plug) error {
	err := a.NS.doing(fmt.Sprintf("connect link %s with %s", a.Link, b.Link), func() error {
		pair := netlink.NewVeth(netlink.LinkAttrs{Name: a.Link})
		pair.PeerName, pair.PeerNamespace = b.Link, netlink.NsFd(b.NS.file.Fd())
		return privilege(netlink.LinkAdd(pair))
	})
	if err != nil {
		return err
	}
	for _, plug := range []Plug{a, b} {
		if err := plug.NS.addressAndRaise(plug.Link, plug.Addrs); err != nil {
			return err
		}
	}
	for _, plug := range []Plug{a, b} {
		if err := plug.NS.Do(func() error { return errors.Join(awaitUp(plug.Link), awaitLocal(plug.Addrs)) }); err != nil {
			return err
		}
	}
	return errors.Join(a.learn(b), b.learn(a))
}

// learn makes the addresses of the other end permanent neighbors. On a busy machine an
// answer to neighbor discovery can come too late, and the kernel then answers a first
// packet with "no route to host".
func (p Plug) learn(other Plug) error {
	var mac net.HardwareAddr
	err := other.NS.doing("read link "+other.Link, func() error {
		link, err := net.InterfaceByName(other.Link)
		if err == nil {
			mac = link.HardwareAddr
		}
		return err
	})
	if err != nil {
		return err
	}
	return p.NS.Do(func() error {
		link, err := net.InterfaceByName(p.Link)
		if err != nil {
			return fmt.Errorf("read link %s: %w", p.Link, err)
		}
		for _, addr := range other.Addrs {
			neighbor := &netlink.Neigh{LinkIndex: link.Index, State: netlink.NUD_PERMANENT, IP: addr.Addr().AsSlice(), HardwareAddr: mac}
			if err := netlink.NeighSet(neighbor); err != nil {
				return fmt.Errorf("add neighbor %s to link %s: %w", addr.Addr(), p.Link, err)
			}
		}
		return nil
	})
}

// AddBridge creates a bridge with addresses.
func (n *NS) AddBridge(name string, addrs ...netip.Prefix) error {
	err := n.doing("add bridge "+name, func() error {
		return privilege(netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}))
	})
	if err != nil {
		return err
	}
	return n.addressAndRaise(name, addrs)
}

// Enslave makes a link a port of a bridge, in hairpin mode: the bridge sends packets back
// through the port they came from, as pods that connect to themselves need.
func (n *NS) Enslave(link, bridge string) error {
	return n.doing(fmt.Sprintf("enslave link %s to bridge %s", link, bridge), func() error {
		if err := netlink.LinkSetMaster(device(link), device(bridge)); err != nil {
			return err
		}
		return netlink.LinkSetHairpin(device(link), true)
	})
}

// AddAddrs adds addresses to a link that is up. They can be used at once.
func (n *NS) AddAddrs(link string, addrs ...netip.Prefix) error {
	return n.Do(func() error { return errors.Join(addAddrs(link, addrs), awaitLocal(addrs)) })
}

// RemoveAddr removes an address from a link.
func (n *NS) RemoveAddr(link string, addr netip.Prefix) error {
	return n.doing(fmt.Sprintf("remove address %s from link %s", addr, link), func() error {
		return netlink.AddrDel(device(link), &netlink.Addr{IPNet: ipNet(addr)})
	})
}

// AddRoute adds a route to dst via a neighbor.
func (n *NS) AddRoute(dst netip.Prefix, via netip.Addr) error {
	return n.doing(fmt.Sprintf("add route to %s via %s", dst, via), func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: ipNet(dst), Gw: via.AsSlice()})
	})
}

// AddRange makes every address of a prefix local to the namespace: packets to them are
// delivered.
func (n *NS) AddRange(prefix netip.Prefix) error {
	if prefix.Addr().Is6() { // otherwise UDP over IPv6 cannot answer from such an address
		if err := n.SetSysctl("net/ipv6/ip_nonlocal_bind", "1"); err != nil {
			return err
		}
	}
	return n.doing("add address range "+prefix.String(), func() error {
		return netlink.RouteAdd(&netlink.Route{
			Dst: ipNet(prefix), Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL,
			LinkIndex: loopbackIndex, Scope: netlink.SCOPE_HOST,
		})
	})
}

// doing is Do with a description in the error.
func (n *NS) doing(what string, f func() error) error {
	if err := n.Do(f); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

func (n *NS) addressAndRaise(link string, addrs []netip.Prefix) error {
	return n.Do(func() error {
		if err := addAddrs(link, addrs); err != nil {
			return err
		}
		if err := setLinkUp(device(link)); err != nil {
			return err
		}
		return awaitLocal(addrs)
	})
}

func setLinkUp(link *netlink.Device) error {
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set link %s up: %w", link.Name, err)
	}
	return nil
}

func addAddrs(link string, addrs []netip.Prefix) (err error) {
	for _, addr := range addrs {
		err = errors.Join(err, addAddr(link, addr))
	}
	return err
}

func addAddr(link string, prefix netip.Prefix) error {
	addr := &netlink.Addr{IPNet: ipNet(prefix)}
	if prefix.Addr().Is6() {
		addr.Flags = unix.IFA_F_NODAD
	}
	if err := netlink.AddrAdd(device(link), addr); err != nil {
		return fmt.Errorf("add address %s to link %s: %w", prefix, link, err)
	}
	return nil
}

// awaitUp polls, since a notification could arrive before the subscription.
func awaitUp(name string) error {
	link := device(name)
	if err := setLinkUp(link); err != nil { // also looks up the index
		return err
	}
	return untilNil(func() error {
		now, err := netlink.LinkByIndex(link.Attrs().Index)
		if err == nil && now.Attrs().OperState != netlink.OperUp {
			err = fmt.Errorf("it is %s", now.Attrs().OperState)
		}
		if err != nil {
			return fmt.Errorf("link %s: %w", name, err)
		}
		return nil
	})
}

// awaitLocal waits until IPv6 addresses are local. The kernel adds the route that says so in the background:
// until then, packets of the node to itself leave by a link.
func awaitLocal(addrs []netip.Prefix) error {
	for _, addr := range addrs {
		if addr.Addr().Is4() {
			continue
		}
		err := untilNil(func() error {
			routes, err := netlink.RouteGet(addr.Addr().AsSlice())
			if err == nil && (len(routes) != 1 || routes[0].Type != unix.RTN_LOCAL) {
				err = errors.New("it is not local")
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("address %s: %w", addr, err)
		}
	}
	return nil
}

// untilNil waits until a function returns nil.
func untilNil(sure func() error) error {
	poll := time.NewTicker(readyPoll)
	defer poll.Stop()
	for deadline := time.Now().Add(readyTimeout); ; <-poll.C {
		err := sure()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("still so after %v: %w", readyTimeout, err)
		}
	}
}

// device refers to a link by its name; package netlink looks up the index.
func device(name string) *netlink.Device {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: name}}
}

// ipNet keeps the host bits, which addresses need.
func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
