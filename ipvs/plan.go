package ipvs

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// serverKey identifies a virtual server of one IP family, as a frontend with its address.
type serverKey = desired.Key

func keyOf(protocol desired.Protocol, at netip.AddrPort) serverKey {
	return serverKey{VIP: at.Addr(), Protocol: protocol, Port: at.Port()}
}

// Flags of a virtual server, IP_VS_SVC_F_* of linux/ip_vs.h. No package exports them.
const (
	flagPersistent   = 0x01
	flagOnePacket    = 0x04
	flagHashFallback = 0x08
	flagHashPort     = 0x10
	// flagHashed is set by the kernel.
	flagHashed = 0x02
)

// settings are those of a virtual server.
type settings struct {
	scheduler string
	flags     uint32
	// timeout is how long a client stays with its real server; 0 without flagPersistent.
	timeout time.Duration
	// forward is that of all its real servers.
	forward ForwardingMethod
}

// satisfy reports whether a virtual server with these settings does what is wanted. One with
// the weighted form of the scheduler does, as the weights are equal then: it stays, because a
// kernel that changes the scheduler refuses new connections meanwhile.
func (s settings) satisfy(want settings) bool {
	if s == want {
		return true
	}
	want.scheduler = weighted(want.scheduler)
	return s == want
}

// virtual is a virtual server with the weights of its real servers.
type virtual struct {
	settings

	// instead are the settings for a kernel without the scheduler.
	instead settings
	// nodePort means that it is for a node port, on an address of the node.
	nodePort bool
	reals    map[netip.AddrPort]int
	// unfit are endpoints with another port than the frontend, which only masquerading can reach.
	unfit []netip.AddrPort
	// serving are all serving endpoints. Their connections continue; those that are
	// not in reals get no new ones.
	serving desired.Endpoints
	// loads are the connections of the real servers; nil in a plan.
	loads loads
}

// planner turns service ports into virtual servers. It is pure.
type planner struct {
	config *Config
	// nodeAddrs are the node's addresses that accept node ports.
	nodeAddrs []netip.Addr
}

// virtuals returns the virtual servers of a service port, one for each VIP and, for a node
// port, one for each node address. A frontend without endpoints has none, unless there are
// serving endpoints, which a traffic policy excludes: their connections continue, and the
// rules refuse new ones.
func (p *planner) virtuals(s *desired.Service) map[serverKey]*virtual {
	all := map[serverKey]*virtual{}
	own := p.tuning(s)
	for i := range s.Frontends {
		f := &s.Frontends[i]
		scope := f.Scope
		if s.Endpoints(scope).Len() == 0 && f.ShortCircuit { // for pods and the node; the rules drop other packets
			scope = desired.ScopeCluster
		}
		if s.Endpoints(scope).Len() == 0 && s.Serving.Len() == 0 {
			continue
		}
		v := p.virtual(s, scope, own)
		if v.nodePort = f.Kind == desired.NodePort; !v.nodePort {
			v.forwarded(p.forward(s, own), f.Port)
		}
		addrs := []netip.Addr{f.VIP}
		if f.Kind == desired.NodePort {
			addrs = p.nodeAddrs
		}
		for _, addr := range addrs {
			key := serverKey{VIP: addr, Protocol: s.Protocol, Port: f.Port}
			if all[key] == nil || f.Kind != desired.NodePort { // a VIP has precedence over a node port
				all[key] = v
			}
		}
	}
	return all
}

func (p *planner) tuning(s *desired.Service) (own Tuning) {
	if p.config.Choose != nil {
		own = p.config.Choose(s)
	}
	return own
}

// forward is how packets to the VIPs of a service port are forwarded. Without its answers, connection tracking
// takes what follows the first packet of SCTP for invalid.
func (p *planner) forward(s *desired.Service, own Tuning) ForwardingMethod {
	if s.Protocol == desired.SCTP {
		return ForwardMasquerade
	}
	return cmp.Or(own.Forward, p.config.Forward)
}

// forwarded sets how packets to a port are forwarded. Only masquerading changes the port.
func (v *virtual) forwarded(how ForwardingMethod, port uint16) {
	v.forward, v.instead.forward = how, how
	if how == ForwardMasquerade {
		return
	}
	for real := range v.reals {
		if real.Port() != port {
			v.unfit = append(v.unfit, real)
			delete(v.reals, real)
		}
	}
	slices.SortFunc(v.unfit, netip.AddrPort.Compare)
}

// unfitError says which endpoints get nothing.
func (v *virtual) unfitError(key serverKey) error {
	return fmt.Errorf("forward packets to %v by method %v, which does not change the port: %d endpoints have another one, such as %v; set targetPort to %d",
		key, v.forward, len(v.unfit), v.unfit[0], key.Port)
}

// method is what the kernel has for a ForwardingMethod: a flag IP_VS_CONN_F_* of linux/ip_vs.h, and the name in
// /proc/net/ip_vs.
type method struct {
	flag uint32
	name string
}

var methods = []method{ForwardMasquerade: {0, "Masq"}, ForwardDirect: {3, "Route"}, ForwardTunnel: {2, "Tunnel"}} // read-only

// methodOf returns the ForwardingMethod of a method. The others of the kernel count as ForwardMasquerade.
func methodOf(is func(method) bool) ForwardingMethod {
	return ForwardingMethod(max(0, slices.IndexFunc(methods, is)))
}

// String is the name in /proc/net/ip_vs.
func (f ForwardingMethod) String() string { return methods[f].name }

func (p *planner) virtual(s *desired.Service, scope desired.Scope, own Tuning) *virtual {
	endpoints, weights := s.Endpoints(scope).Slice(), s.Weights(scope)
	v := &virtual{reals: make(map[netip.AddrPort]int, len(endpoints)), serving: s.Serving}
	for i, endpoint := range endpoints {
		v.reals[endpoint] = 1
		if weights != nil {
			v.reals[endpoint] = int(weights[i])
		}
	}
	v.settings = p.settings(s, own)
	if weights != nil {
		v.scheduler = weighted(v.scheduler)
	}
	v.instead = p.common(s, p.config.Scheduler, Tuning{OnePacket: own.OnePacket})
	return v
}

// settings returns the settings of a service port with equal weights.
func (p *planner) settings(s *desired.Service, own Tuning) settings {
	policy := traits().Balancing(s)
	switch {
	case own.Scheduler != "":
		return p.common(s, own.Scheduler, own)
	case policy.Hashes():
		// A real server that drains keeps its part of the table: its clients need the fallback.
		v := p.common(s, "", own)
		v.scheduler = schedulerMaglev
		v.flags |= flagHashFallback
		if policy == changetracker.SourcePortHash || own.HashPort {
			v.flags |= flagHashPort
		}
		return v
	case policy == changetracker.LeastConnections:
		return p.common(s, "lc", own)
	default:
		return p.common(s, p.config.Scheduler, own)
	}
}

// common returns settings with a scheduler, and with the flags that do not depend on the
// policy.
func (p *planner) common(s *desired.Service, scheduler string, own Tuning) settings {
	v := settings{scheduler: scheduler}
	if s.Affinity > 0 {
		v.flags |= flagPersistent
		v.timeout = s.Affinity
	}
	if s.Protocol == desired.UDP && (p.config.OnePacket || own.OnePacket) {
		v.flags |= flagOnePacket
	}
	if scheduler == "sh" || scheduler == schedulerMaglev {
		if p.config.HashFallback || own.HashFallback {
			v.flags |= flagHashFallback
		}
		if p.config.HashPort || own.HashPort {
			v.flags |= flagHashPort
		}
	}
	return v
}

// schedulerMaglev chooses by a consistent hash.
const schedulerMaglev = "mh"

// weighted returns the scheduler that does what another one does, in proportion to weights.
// The others respect them by themselves.
func weighted(scheduler string) string {
	switch scheduler {
	case "rr":
		return "wrr"
	case "lc":
		return "wlc"
	default:
		return scheduler
	}
}

// traits are those of the engine.
func traits() desired.Traits {
	return desired.Traits{LocalPolicyBindsAll: true, VIPsAreLocal: true, LeastConnections: true}
}

// traits are those of the engine for a service port, which may be nil.
func (p *planner) traits(s *desired.Service) desired.Traits {
	t := traits()
	if s == nil {
		return t
	}
	own := p.tuning(s)
	v := p.settings(s, own)
	t.DirectReturn = p.forward(s, own) != ForwardMasquerade
	if s.Weights(desired.ScopeCluster) != nil || s.Weights(desired.ScopeLocal) != nil {
		v.scheduler = weighted(v.scheduler)
	}
	t.Scheduler, t.SchedulesLike = v.scheduler, v.balancing()
	return t
}

// balancing is the policy that is most like the scheduler.
func (s settings) balancing() changetracker.Balancing {
	switch s.scheduler {
	case "sh", schedulerMaglev:
		if s.flags&flagHashPort != 0 {
			return changetracker.SourcePortHash
		}
		return changetracker.SourceHash
	case "lc", "wlc", "sed", "nq":
		return changetracker.LeastConnections
	default:
		return changetracker.Random
	}
}

// isLocalOnly reports whether an address can never accept node ports: loopback, and
// link-local IPv6.
func isLocalOnly(a netip.Addr) bool {
	return a.IsLoopback() || a.Is6() && a.IsLinkLocalUnicast()
}

// nodePortAddrs returns those of the node's addresses that accept node ports.
func nodePortAddrs(local []netip.Addr, accepting []netip.Prefix) []netip.Addr {
	return slices.DeleteFunc(relevant(local), func(a netip.Addr) bool {
		return !slices.ContainsFunc(accepting, func(p netip.Prefix) bool { return p.Contains(a) })
	})
}

// relevant returns the addresses that may accept node ports, sorted.
func relevant(addrs []netip.Addr) []netip.Addr {
	kept := slices.DeleteFunc(slices.Clone(addrs), isLocalOnly)
	slices.SortFunc(kept, netip.Addr.Compare)
	return slices.Compact(kept)
}

// object names a real server in errors.
func object(key serverKey, real netip.AddrPort) string {
	return fmt.Sprintf("real server %v of virtual server %v", real, key)
}

// text prints virtual servers in a format like that of ipvsadm.
func text(all map[serverKey]*virtual) string {
	var b strings.Builder
	for _, key := range slices.SortedFunc(maps.Keys(all), desired.Key.Compare) {
		v := all[key]
		fmt.Fprintf(&b, "%v %s", key, v.scheduler)
		if v.flags&flagPersistent != 0 {
			fmt.Fprintf(&b, " persistent %v", v.timeout)
		}
		for _, f := range v.flagNames() {
			b.WriteString(" " + f)
		}
		b.WriteByte('\n')
		how := ""
		if v.forward != ForwardMasquerade {
			how = " forwarding " + v.forward.String()
		}
		for _, addr := range slices.SortedFunc(maps.Keys(v.reals), netip.AddrPort.Compare) {
			fmt.Fprintf(&b, "  -> %v weight %d%s\n", addr, v.reals[addr], how)
		}
	}
	return b.String()
}

// flagNames returns the names that ipvsadm has for the flags, except persistence.
func (s settings) flagNames() (names []string) {
	for _, f := range []struct {
		flag uint32
		name string
	}{{flagOnePacket, "ops"}, {flagHashFallback, s.scheduler + "-fallback"}, {flagHashPort, s.scheduler + "-port"}} {
		if s.flags&f.flag != 0 {
			names = append(names, f.name)
		}
	}
	const named = flagPersistent | flagOnePacket | flagHashFallback | flagHashPort
	if rest := s.flags &^ named; rest != 0 {
		names = append(names, fmt.Sprintf("flags %#x", rest))
	}
	return names
}
