package ipvs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nft"
)

// left is what Leaving has in the kernel for one IP family: routes, which make VIPs local, and a
// table of nf_tables. The table names the virtual servers, so that a successor recognizes them. Its
// chain refuses new connections to the VIPs: those that no rule of the new mode translates must not
// reach programs of the node.
//
//	set virtual-servers { VIP . protocol . port }
//	set vips            { VIP }
//	chain input (filter, -1) { ct state new ip daddr @vips reject }
type left struct {
	config *Config
	v6     bool
	handle *netlink.Handle
	// flows deletes conntrack entries.
	flows  *netlinkx.Socket
	conn   *nft.Conn
	table  string
	exists bool // the table
	// servers are those that still have connections; vips are local because of the routes.
	servers leftSet[serverKey]
	vips    leftSet[netip.Addr]
}

// leftSet is a set of the table, and its content.
type leftSet[K comparable] struct {
	set    nft.Set
	keys   map[K]bool
	encode func(K) []byte
	decode func([]byte) (K, bool)
}

// refusalPriority is just before NF_IP_PRI_FILTER (0): a client is refused, whatever others drop there.
const refusalPriority = -1

// openLeft opens what Leaving has in the kernel, perhaps nothing.
func openLeft(config *Config, family v1.IPFamily) (l *left, err error) {
	l = &left{config: config, v6: family == v1.IPv6Protocol}
	l.table = config.Names.Table + ".ipvs-leaving"
	server, vip := []nft.Field{nft.Addr, nft.Proto, nft.Port}, []nft.Field{nft.Addr}
	l.servers = leftSet[serverKey]{
		nft.Set{Name: "virtual-servers", ID: 1, Key: server, Flags: nft.SetFlags(server, nil, 0)}, map[serverKey]bool{}, encodeServer, decodeServer,
	}
	l.vips = leftSet[netip.Addr]{nft.Set{Name: "vips", ID: 2, Key: vip}, map[netip.Addr]bool{}, netip.Addr.AsSlice, netip.AddrFromSlice}
	err = namespace.Visit(config.NetNS, func() error {
		var errHandle, errFlows, errConn error
		l.handle, errHandle = netlinkx.LimitedHandle(netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER))
		l.flows, errFlows = netlinkx.Open("")
		l.conn, errConn = nft.Dial("")
		return errors.Join(errHandle, errFlows, errConn)
	})
	if err == nil {
		err = l.read()
	}
	if err != nil {
		l.close()
		return nil, fmt.Errorf("read what a change of mode has left: %w", netlinkx.Denied(err))
	}
	return l, nil
}

func (l *left) close() {
	if l.handle != nil {
		l.handle.Close()
	}
	if l.flows != nil {
		l.flows.Close()
	}
	if l.conn != nil {
		_ = l.conn.Close()
	}
}

// batch is empty.
func (l *left) batch() *nft.Batch { return &nft.Batch{Family: l.family(), Table: l.table} }

// family is the number of the IP family, in netfilter too.
func (l *left) family() uint8 {
	if l.v6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// commit sends a transaction.
func (l *left) commit(write func(b *nft.Batch)) error {
	b := l.batch()
	b.Begin()
	write(b)
	b.Finish()
	return l.conn.Commit(context.Background(), b) //nolint:forbidigo // it ends soon
}

// dump calls each with the attributes of the answers to a question.
func (l *left) dump(ask func(b *nft.Batch), reset func(), each func(attrs []byte)) error {
	b := l.batch()
	ask(b)
	return l.conn.Dump(context.Background(), b, reset, each) //nolint:forbidigo // it ends soon
}

// read reads the table, if there is one.
func (l *left) read() error {
	tables := func(b *nft.Batch) { b.List(unix.NFT_MSG_GETTABLE, "tables") }
	err := l.dump(tables, func() { l.exists = false }, func(attrs []byte) {
		l.exists = l.exists || netlinkx.String(netlinkx.Find(attrs, unix.NFTA_TABLE_NAME)) == l.table
	})
	if err != nil || !l.exists {
		return err
	}
	return errors.Join(l.servers.read(l), l.vips.read(l))
}

func (s *leftSet[K]) read(l *left) error {
	elements := func(b *nft.Batch) { b.ListElements(s.set.Name) }
	return l.dump(elements, func() { clear(s.keys) }, func(attrs []byte) {
		for e := range nft.ElementsOf(attrs) {
			if key, ok := s.decode(e.Key); ok {
				s.keys[key] = true
			}
		}
	})
}

// write adds or deletes elements.
func (s *leftSet[K]) write(b *nft.Batch, op nft.ElementOp, keys map[K]bool) {
	var all []byte
	for key := range keys {
		all = nft.AppendElement(all, s.encode(key), nil, nil)
	}
	if len(keys) > 0 {
		b.Elements(op, s.set.Name, all, len(all)/len(keys))
	}
}

// encodeServer returns the element of a virtual server; each part fills registers of 4 bytes.
func encodeServer(key serverKey) []byte {
	b := append(key.VIP.AsSlice(), uint8(key.Protocol), 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, key.Port)
	return append(b, 0, 0)
}

// decodeServer is the inverse of encodeServer. Somebody else may have made a set of this
// name with other keys.
func decodeServer(b []byte) (key serverKey, ok bool) {
	n := max(len(b)-len("p000PP00"), 0)
	addr, ok := netip.AddrFromSlice(b[:n])
	if !ok {
		return serverKey{}, false
	}
	return serverKey{VIP: addr, Protocol: desired.Protocol(b[n]), Port: binary.BigEndian.Uint16(b[n+4:])}, true
}

// add adds to the table, which it does not create for nothing. Other servers there are gone.
func (l *left) add(servers map[serverKey]bool, vips map[netip.Addr]bool) error {
	if l.servers.keys = servers; len(servers) == 0 {
		return nil
	}
	if err := l.create(); err != nil {
		return l.failed("write", err)
	}
	if err := l.change(nft.AddElements(), servers, vips); err != nil {
		return err
	}
	maps.Copy(l.vips.keys, vips)
	return nil
}

// change adds or deletes elements of both sets.
func (l *left) change(op nft.ElementOp, servers map[serverKey]bool, vips map[netip.Addr]bool) error {
	return l.failed("write", l.commit(func(b *nft.Batch) {
		l.servers.write(b, op, servers)
		l.vips.write(b, op, vips)
	}))
}

func (l *left) failed(to string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s table %s: %w", to, l.table, netlinkx.Denied(err))
}

// create creates the table, unless it exists.
func (l *left) create() error {
	if l.exists {
		return nil
	}
	rule, err := nft.Encode(l.family(), l.refusal()...)
	if err != nil {
		return err
	}
	err = l.commit(func(b *nft.Batch) {
		b.NewTable(0, nil)
		b.NewSet(&l.servers.set)
		b.NewSet(&l.vips.set)
		b.NewChain("input", &nft.Hook{Kind: "filter", Number: unix.NF_INET_LOCAL_IN, Priority: refusalPriority}, nil)
		b.NewRule("input", rule, nil)
	})
	l.exists = err == nil
	return err
}

// refusal answers the first packet of a connection to a VIP with port unreachable.
func (l *left) refusal() []expr.Any {
	const (
		icmpPort, icmp6Port = 3, 4 // ICMP_PORT_UNREACH, ICMPV6_PORT_UNREACH of the kernel's headers
		offset4, offset6    = 16, 24
	)
	daddr := &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset4, Len: 4}
	reject := &expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: icmpPort}
	if l.v6 {
		daddr.Offset, daddr.Len, reject.Code = offset6, 16, icmp6Port
	}
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binary.NativeEndian.AppendUint32(nil, expr.CtStateBitNEW), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
		daddr,
		&expr.Lookup{SourceRegister: 1, SetName: l.vips.set.Name},
		reject,
	}
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
			return fmt.Errorf("add a route for the connections of VIP %v: %w", vip, netlinkx.Denied(err))
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
	_, err := netlinkx.DeleteFlows(l.flows, l.family(), netlinkx.Which{}, func(f *netlinkx.Flow) bool {
		return !f.Translated && servers[keyOf(protocolOf(f.Protocol), f.Destination)]
	})
	if err != nil {
		return netlinkx.Denied(err)
	}
	if err := l.change(nft.DeleteElements(), servers, vips); err != nil {
		return err
	}
	maps.DeleteFunc(l.servers.keys, func(key serverKey, _ bool) bool { return servers[key] })
	maps.DeleteFunc(l.vips.keys, func(vip netip.Addr, _ bool) bool { return vips[vip] })
	return nil
}

func (l *left) removeRoutes(vips map[netip.Addr]bool) error {
	for vip := range vips {
		err := l.handle.RouteDel(l.route(vip, nil))
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("delete the route of VIP %v: %w", vip, netlinkx.Denied(err))
		}
	}
	return nil
}

// deleteRoutes deletes the routes, and the table if it exists.
func (l *left) deleteRoutes() error {
	if err := l.removeRoutes(l.vips.keys); err != nil {
		return err
	}
	if l.exists {
		if err := l.commit((*nft.Batch).DeleteTable); err != nil && !errors.Is(err, unix.ENOENT) {
			return l.failed("delete", err)
		}
	}
	l.exists = false
	clear(l.servers.keys)
	clear(l.vips.keys)
	return nil
}

// findLeft looks for what Leaving has in the kernel.
func (e *engine) findLeft() (err error) {
	if e.left == nil {
		e.left, err = e.system.left()
	}
	return err
}

// takeBack makes the VIPs of a change of mode addresses of the device again, beside their
// routes.
func (e *engine) takeBack() error {
	if e.left == nil {
		return nil
	}
	var vips []netip.Addr
	for vip := range e.left.vips.keys {
		if !e.boundVIPs[vip] && !slices.Contains(e.local, vip) {
			vips = append(vips, vip)
		}
	}
	if err := e.device.add(vips); err != nil {
		return err
	}
	for _, vip := range vips {
		e.boundVIPs[vip], e.table.idle[vip] = true, true
	}
	return nil
}

// endLeft ends a change of mode: its table would refuse new connections.
func (e *engine) endLeft() error {
	if e.left == nil {
		return nil
	}
	if err := e.left.deleteRoutes(); err != nil {
		return err
	}
	e.left.close()
	e.left = nil
	return nil
}
