package ipvs

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/serviceplane/serviceplane/desired"
)

// serverKey identifies a virtual server of one IP family.
type serverKey struct {
	protocol desired.Protocol
	addr     netip.AddrPort
}

// String is "address:port/PROTOCOL".
func (k serverKey) String() string { return k.addr.String() + "/" + k.protocol.String() }

// frontend is what the virtual server is for, by its address.
func (k serverKey) frontend() desired.Key {
	return desired.Key{VIP: k.addr.Addr(), Protocol: k.protocol, Port: k.addr.Port()}
}

// Flags of a virtual server, IP_VS_SVC_F_* of linux/ip_vs.h.
const (
	flagPersistent   = 0x01
	flagOnePacket    = 0x04
	flagHashFallback = 0x08
	flagHashPort     = 0x10
	// flagHashed is set by the kernel.
	flagHashed = 0x02
)

// maxWeight is what ipvsadm allows, and far from where the schedulers' sums overflow.
const maxWeight = 65535

// settings are those of a virtual server.
type settings struct {
	scheduler string
	flags     uint32
	// timeout is how long a client stays with its real server, with flagPersistent; else
	// 0.
	timeout time.Duration
}

// virtual is a virtual server with the weights of its real servers.
type virtual struct {
	settings

	// nodePort says that it is for a node port, on an address of the node.
	nodePort bool
	reals    map[netip.AddrPort]int
	// serving are all endpoints that serve, sorted: what they have goes on, and they get
	// nothing new.
	serving []netip.AddrPort
}

// serves says whether connections to an endpoint may go on.
func (v *virtual) serves(endpoint netip.AddrPort) bool {
	_, ok := slices.BinarySearchFunc(v.serving, endpoint, netip.AddrPort.Compare)
	return ok
}

// planner turns service ports into virtual servers. It is pure.
type planner struct {
	config *Config
	// nodeAddrs are the node's addresses that accept node ports.
	nodeAddrs []netip.Addr
}

// virtuals are the virtual servers of a service port, one for each VIP and one for
// each node address. What has no endpoint for anybody has none, unless a policy says so
// and there are some that serve: connections go on, new ones are refused before they get
// there.
func (p *planner) virtuals(s *desired.Service) map[serverKey]*virtual {
	all := map[serverKey]*virtual{}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		endpoints := s.Endpoints(f.Scope)
		if len(endpoints) == 0 && f.ShortCircuit { // for pods and the node; others are dropped
			endpoints = s.Cluster
		}
		if len(endpoints) == 0 && len(s.Serving) == 0 {
			continue
		}
		v := p.virtual(s, endpoints)
		v.nodePort = f.Kind == desired.NodePort
		addrs := []netip.Addr{f.VIP}
		if f.Kind == desired.NodePort {
			addrs = p.nodeAddrs
		}
		for _, addr := range addrs {
			key := serverKey{s.Protocol, netip.AddrPortFrom(addr, f.Port)}
			if all[key] == nil || f.Kind != desired.NodePort { // a VIP goes before a node port
				all[key] = v
			}
		}
	}
	return all
}

func (p *planner) virtual(s *desired.Service, endpoints []netip.AddrPort) *virtual {
	var own Tuning
	if p.config.Tune != nil {
		own = p.config.Tune(s)
	}
	v := &virtual{settings: settings{scheduler: p.config.Scheduler}, reals: make(map[netip.AddrPort]int, len(endpoints)), serving: s.Serving}
	if own.Scheduler != "" {
		v.scheduler = own.Scheduler
	}
	if s.Affinity > 0 {
		v.flags |= flagPersistent
		v.timeout = s.Affinity
	}
	if s.Protocol == desired.UDP && p.config.OnePacket {
		v.flags |= flagOnePacket
	}
	if v.scheduler == "sh" || v.scheduler == "mh" {
		if p.config.HashFallback {
			v.flags |= flagHashFallback
		}
		if p.config.HashPort {
			v.flags |= flagHashPort
		}
	}
	for _, endpoint := range endpoints {
		v.reals[endpoint] = 1
		if own.Weight != nil {
			v.reals[endpoint] = min(max(0, own.Weight(endpoint)), maxWeight)
		}
	}
	return v
}

// isUnusable says that an address accepts no node port, wherever node ports are:
// loopback, and link-local IPv6.
func isUnusable(a netip.Addr) bool {
	return a.IsLoopback() || a.Is6() && a.IsLinkLocalUnicast()
}

// nodePortAddrs chooses, among the node's addresses, those that accept node ports.
func nodePortAddrs(local []netip.Addr, accepting []netip.Prefix) []netip.Addr {
	var addrs []netip.Addr
	for _, a := range local {
		if isUnusable(a) {
			continue
		}
		if slices.ContainsFunc(accepting, func(p netip.Prefix) bool { return p.Contains(a) }) {
			addrs = append(addrs, a)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}

// object names a real server in errors.
func object(key serverKey, real netip.AddrPort) string {
	return fmt.Sprintf("real server %v of virtual server %v", real, key)
}
