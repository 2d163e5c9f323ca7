package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// left is what Leaving has in the kernel for one IP family: a table of nf_tables, and
// routes. The table names the virtual servers, so that a successor recognizes them.
type left struct {
	config *Config
	v6     bool
	record *leftTable
	handle *netlink.Handle
	// lists lists addresses, and deletes conntrack entries.
	lists *netlinkx.Socket
	// servers and vips are the content of the table. vips are local because of the routes.
	servers map[serverKey]bool
	vips    map[netip.Addr]bool
}

func openLeft(e *Engine) (l *left, err error) {
	l = &left{config: &e.config, v6: e.family == v1.IPv6Protocol}
	err = namespace.Visit(e.config.NetNS, func() error {
		var errHandle, errLists, errRecord error
		l.handle, errHandle = netlinkx.LimitedHandle(netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER))
		l.lists, errLists = netlinkx.Open("")
		l.record, errRecord = openLeftTable(e.config.Names.Table, l.v6)
		return errors.Join(errHandle, errLists, errRecord)
	})
	if err == nil {
		l.servers, l.vips, err = l.record.read()
	}
	if err != nil {
		l.close()
		return nil, fmt.Errorf("read what a change of mode has left: %w", denied(err))
	}
	return l, nil
}

func (l *left) close() {
	if l.handle != nil {
		l.handle.Close()
	}
	if l.lists != nil {
		l.lists.Close()
	}
	if l.record != nil {
		l.record.close()
	}
}

// add adds to the table. It does not create it for nothing.
func (l *left) add(servers map[serverKey]bool, vips map[netip.Addr]bool) error {
	if len(servers) == 0 {
		return nil
	}
	if err := l.record.add(servers, vips); err != nil {
		return fmt.Errorf("write table %s: %w", l.record.table.Name, denied(err))
	}
	maps.Copy(l.servers, servers)
	maps.Copy(l.vips, vips)
	return nil
}

// routeProtocol marks the routes of all instances; their metric differs. Linux reserves
// protocols below 5, and routing programs use others (linux/rtnetlink.h).
const routeProtocol = 90

// route returns the route that makes a VIP local.
func (l *left) route(vip netip.Addr, source net.IP) *netlink.Route {
	mark := markOf(l.config.Names)
	return &netlink.Route{
		LinkIndex: 1, // lo, in every network namespace
		Dst:       &net.IPNet{IP: vip.AsSlice(), Mask: net.CIDRMask(vip.BitLen(), vip.BitLen())},
		Src:       source, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: unix.RT_SCOPE_HOST, Protocol: routeProtocol,
		Priority: 1<<24 | int(mark[3])<<16 | int(mark[4])<<8 | int(mark[5]),
	}
}

// addRoutes makes VIPs local without being addresses of the node. Otherwise the node's new
// connections to a VIP would have it as their source, and end with it.
func (l *left) addRoutes(vips map[netip.Addr]bool, local []netip.Addr) error {
	source := l.source(local)
	for vip := range vips {
		err := l.handle.RouteAdd(l.route(vip, source))
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add a route for the connections of VIP %v: %w", vip, denied(err))
		}
	}
	return nil
}

// source returns the address of the node from which it reaches other networks, nil if
// there is none.
func (l *left) source(local []netip.Addr) net.IP {
	elsewhere := net.IPv4(198, 18, 0, 1) // of RFC 2544: no node has it
	if l.v6 {
		elsewhere = net.ParseIP("2001:2::1") // of RFC 5180
	}
	if routes, err := l.handle.RouteGet(elsewhere); err == nil && len(routes) > 0 && slices.Contains(local, addrOf(routes[0].Src)) {
		return routes[0].Src
	}
	for _, addr := range local {
		if addr.Is6() == l.v6 && addr.IsGlobalUnicast() {
			return addr.AsSlice()
		}
	}
	return nil
}

// remove removes virtual servers from the table, VIPs with their routes, and the conntrack
// entries of connections through IPVS: what still comes finds the rules of the new mode.
func (l *left) remove(servers map[serverKey]bool, vips map[netip.Addr]bool) error {
	if err := l.removeRoutes(vips); err != nil {
		return err
	}
	family := uint8(unix.AF_INET)
	if l.v6 {
		family = unix.AF_INET6
	}
	_, err := netlinkx.DeleteFlows(l.lists, family, netlinkx.AllFlows, func(f *netlinkx.Flow) bool {
		return !f.Translated && servers[serverKey{protocolOf(f.Protocol), f.Destination}]
	})
	if err != nil {
		return denied(err)
	}
	if err := l.record.remove(servers, vips); err != nil {
		return fmt.Errorf("write table %s: %w", l.record.table.Name, denied(err))
	}
	maps.DeleteFunc(l.servers, func(key serverKey, _ bool) bool { return servers[key] })
	maps.DeleteFunc(l.vips, func(vip netip.Addr, _ bool) bool { return vips[vip] })
	return nil
}

func (l *left) removeRoutes(vips map[netip.Addr]bool) error {
	for vip := range vips {
		err := l.handle.RouteDel(l.route(vip, nil))
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("delete the route of VIP %v: %w", vip, denied(err))
		}
	}
	return nil
}

// end deletes the routes and the table.
func (l *left) end() error {
	if err := l.removeRoutes(l.vips); err != nil {
		return err
	}
	if err := l.record.delete(); err != nil {
		return fmt.Errorf("delete table %s: %w", l.record.table.Name, denied(err))
	}
	clear(l.servers)
	clear(l.vips)
	return nil
}

// isKubeProxys reports whether the instance has kube-proxy's names.
func (l *left) isKubeProxys() bool { return l.config.Names == proxier.KubeProxyNames() }
