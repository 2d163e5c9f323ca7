//go:build vm

package nftables_test

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

const overlay = "overlay0"

// withoutLimit is IP6_TNL_F_IGN_ENCAP_LIMIT of linux/ip6_tunnel.h. Flows take no fast path through a tunnel of
// IPv6 with a limit of encapsulation on Linux 7.
const withoutLimit = 1

// tunnels make one tunnel between two addresses, by kind.
var tunnels = map[string]func(family v1.IPFamily, from, to netip.Addr) netlink.Link{
	"vxlan": func(_ v1.IPFamily, from, to netip.Addr) netlink.Link {
		return &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: overlay}, VxlanId: 7, Port: 8472, SrcAddr: from.AsSlice(), Group: to.AsSlice()}
	},
	"ip": func(family v1.IPFamily, from, to netip.Addr) netlink.Link {
		if family == v1.IPv6Protocol {
			return &netlink.Ip6tnl{LinkAttrs: netlink.LinkAttrs{Name: overlay}, Local: from.AsSlice(), Remote: to.AsSlice(), Ttl: 64, Proto: unix.IPPROTO_IPV6, Flags: withoutLimit}
		}
		return &netlink.Iptun{LinkAttrs: netlink.LinkAttrs{Name: overlay}, Local: from.AsSlice(), Remote: to.AsSlice(), Ttl: 64}
	},
}

// joinByTunnel leads pods of the host, the other one's way to them, through a tunnel.
func (w *fastWorld) joinByTunnel(kind string, host, other *proxiertest.Host, number byte, pods string) {
	w.t.Helper()
	netnstest.Check(w.t, host.Do(func() error {
		link := tunnels[kind](w.family, host.Addr(w.family), other.Addr(w.family))
		if err := netlink.LinkAdd(link); err != nil {
			return err
		}
		link, err := netlink.LinkByName(overlay)
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(w.at("10.243.0."+string('0'+number)+"/24", "fd00:10:243::"+string('0'+number)+"/64"))
		if err != nil {
			return err
		}
		addr.Flags |= unix.IFA_F_NODAD
		if err := netlink.AddrAdd(link, addr); err != nil {
			return err
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return err
		}
		to, err := netlink.ParseIPNet(pods)
		if err != nil {
			return err
		}
		via := netip.MustParseAddr(w.at("10.243.0."+string('0'+3-number), "fd00:10:243::"+string('0'+3-number)))
		return netlink.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: to, Gw: via.AsSlice(), Flags: int(netlink.FLAG_ONLINK)})
	}))
}

// TestTheFastPathThroughTunnels: connections to endpoints on other nodes take the fast path into the tunnel
// of an overlay, and their answers out of it.
func TestTheFastPathThroughTunnels(t *testing.T) {
	for kind := range tunnels {
		t.Run(kind, func(t *testing.T) {
			bothFamilies(t, func(w *fastWorld) {
				vip, remote := netip.MustParseAddr(w.at("10.96.0.1", "fd00:10:96::1")), w.RemotePods[0]
				w.joinByTunnel(kind, w.Node, w.Router, 1, w.at("10.244.2.0/24", "fd00:10:244:2::/64"))
				w.joinByTunnel(kind, w.Router, w.Node, 2, w.at("10.244.1.0/24", "fd00:10:244:1::/64"))
				w.add("fast", vip.String(), 0, nil, remote)
				w.start()
				for _, network := range []string{"tcp", "udp"} {
					flow := w.open(w.LocalPods[0], network, netip.AddrPortFrom(vip, 80))
					w.ask(flow, remote.Name)
					poll.Until(w.t, network+": the flow is fast", func() bool { return w.ask(flow, remote.Name) == 0 })
				}
			})
		})
	}
}
