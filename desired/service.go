package desired

import (
	"iter"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/enum"
)

// Service is everything that an engine programs for one service port in one IP family. It is
// immutable.
type Service struct {
	Name     changetracker.ServicePortName
	Protocol Protocol
	// Frontends are in order of Key. No two have the same Key.
	Frontends []Frontend
	// Affinity is the timeout of ClientIP session affinity; 0 means none. All frontends of the
	// service port share one record per client.
	Affinity time.Duration
	// Cluster and Local are the endpoints of the two scopes, empty if no frontend has the scope:
	// changetracker.View.Select returns both always.
	Cluster, Local Endpoints
	// ClusterWeights and LocalWeights are the shares of new connections, each at least 1, in
	// the order of Cluster and Local. Nil if all weights of the scope are equal, which is the
	// usual case. Port.Balancing is how an endpoint is chosen.
	ClusterWeights, LocalWeights []uint16
	// Serving are all endpoints that serve: ready or terminating, whatever traffic policy or
	// topology select for new connections. Existing connections to them may continue. With Port.KeepFlows,
	// endpoints that are only not ready belong to them; with Port.Failover.End, only the group that serves does.
	Serving Endpoints
	// Terminating says that Cluster or Local has endpoints that are not ready: they serve while they
	// terminate, and there is no ready one, or an EditSelection has chosen them.
	Terminating bool
	// Listed are all endpoints of the EndpointSlices, whatever their conditions; with Port.Failover.End those of
	// the group that serves. They are set only for a TCP service port with Port.EndConnections: established
	// connections to other endpoints end.
	Listed Endpoints
	// OnNode are the addresses of the endpoints that may be on this node, sorted, without
	// duplicates: an endpoint is left out if a slice places it on another node and its address is
	// not in the PodCIDRs of this node. If such an endpoint is selected for its own connection
	// (hairpin), the source must be masqueraded, or the endpoint would drop its own packet.
	OnNode []netip.Addr
	// Refused are the load balancer IPs and then the external IPs that have no frontend, because they are in
	// the PodCIDRs of the node, or, as external IPs, reserved or with Resolver.DenyNodeExternalIPs
	// addresses of the node (CVE-2020-8554).
	Refused []netip.Addr
	// Lost are the Keys that another service port gets, so that this one has no frontend there;
	// see Resolved. For a node port they may be addresses at which it does not count.
	Lost []Key
	// Port is the service port that was resolved.
	Port *changetracker.ServicePort
}

// Frontend is a VIP, or all node addresses that accept node ports, with the port that clients
// connect to. Its protocol is that of the Service.
type Frontend struct {
	Kind Kind
	// VIP is the address that clients connect to. It is invalid for Kind NodePort, where it is
	// any node address in Globals.NodePortAddresses.
	VIP  netip.Addr
	Port uint16
	// Scope is the set of endpoints of the Service that serve the frontend.
	Scope Scope
	// Action is Forward exactly if the scope has endpoints.
	Action Action
	// Masquerade is whose source address is replaced when forwarding. Hairpin connections are
	// always masqueraded.
	Masquerade Masquerading
	// ShortCircuit sends the traffic of pods (which keeps its source) and of the node itself
	// (which is masqueraded) to the Cluster endpoints, whatever Scope and Action are:
	// externalTrafficPolicy Local binds only traffic from outside. Cluster is not empty if it
	// is set.
	ShortCircuit bool
	// Restricted drops every source outside SourceRanges first, also if there are no endpoints.
	Restricted bool
	// SourceRanges are masked, sorted, and none contains another.
	SourceRanges []netip.Prefix
}

// Equal reports whether two frontends are equal.
func (f Frontend) Equal(o Frontend) bool {
	ranges, others := f.SourceRanges, o.SourceRanges
	f.SourceRanges, o.SourceRanges = nil, nil
	return slices.Equal(ranges, others) && reflect.DeepEqual(f, o)
}

// Key identifies a frontend within one IP family. The zero VIP means a node port.
type Key struct {
	VIP      netip.Addr
	Protocol Protocol
	Port     uint16
}

// String is "address:port/PROTOCOL" or "node port N/PROTOCOL".
func (k Key) String() string {
	if !k.VIP.IsValid() {
		return "node port " + strconv.Itoa(int(k.Port)) + "/" + k.Protocol.String()
	}
	return netip.AddrPortFrom(k.VIP, k.Port).String() + "/" + k.Protocol.String()
}

// Compare orders keys by address, node ports first, then port and protocol.
func (k Key) Compare(o Key) int {
	if c := k.VIP.Compare(o.VIP); c != 0 {
		return c
	}
	if k.Port != o.Port {
		return int(k.Port) - int(o.Port)
	}
	return int(k.Protocol) - int(o.Protocol)
}

// Key returns the Key of a frontend of s.
func (s *Service) Key(f *Frontend) Key {
	return Key{VIP: f.VIP, Protocol: s.Protocol, Port: f.Port}
}

// ClientLimit returns what bounds the connections of a client to a frontend of s; the zero ClientLimit if nothing does.
func (s *Service) ClientLimit(f *Frontend) changetracker.ClientLimit {
	if s.Port == nil || f.Kind != ExternalIP && f.Kind != LoadBalancer {
		return changetracker.ClientLimit{}
	}
	return s.Port.ClientLimit
}

// Endpoints returns the endpoints of a scope.
func (s *Service) Endpoints(scope Scope) Endpoints {
	if scope == ScopeLocal {
		return s.Local
	}
	return s.Cluster
}

// Weights returns the weights of the endpoints of a scope, in the same order, or nil if they
// are all equal.
func (s *Service) Weights(scope Scope) []uint16 {
	if scope == ScopeLocal {
		return s.LocalWeights
	}
	return s.ClusterWeights
}

// Sends returns the Keys of the frontends whose new connections may get an endpoint, in order.
func (s *Service) Sends(endpoint netip.AddrPort) (keys []Key) {
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if f.Action == Forward && s.Endpoints(f.Scope).Has(endpoint) || f.ShortCircuit && s.Cluster.Has(endpoint) {
			keys = append(keys, s.Key(f))
		}
	}
	return keys
}

// balancing is the policy that the service port asks for.
func (s *Service) balancing() changetracker.Balancing {
	if s.Port == nil {
		return changetracker.Random
	}
	return s.Port.Balancing
}

// MaxSlots is how many slots an engine gives a frontend at most, unless it has more endpoints; 0 is no
// limit. See changetracker.ServicePort.MaxSlots.
func (s *Service) MaxSlots() int {
	if s.Port == nil {
		return 0
	}
	return int(s.Port.MaxSlots)
}

// EndsConnections reports whether connections to endpoints end that are gone for good.
func (s *Service) EndsConnections() bool {
	return s.Protocol == TCP && s.Port != nil && s.Port.EndConnections
}

// keys yields the Keys of the frontends; none for nil.
func (s *Service) keys() iter.Seq[Key] {
	return func(yield func(Key) bool) {
		if s == nil {
			return
		}
		for i := range s.Frontends {
			if !yield(s.Key(&s.Frontends[i])) {
				return
			}
		}
	}
}

// find returns the frontend of a Key, or nil if s has none.
func (s *Service) find(key Key) *Frontend {
	i, ok := slices.BinarySearchFunc(s.Frontends, key, func(f Frontend, key Key) int { return s.Key(&f).Compare(key) })
	if !ok {
		return nil
	}
	return &s.Frontends[i]
}

// without returns s without the frontends that other service ports own. The Keys are sorted.
func (s *Service) without(lost []Key) *Service {
	if len(lost) == 0 {
		return s
	}
	rest := *s
	rest.Lost = lost
	rest.Frontends = slices.DeleteFunc(slices.Clone(s.Frontends), func(f Frontend) bool {
		_, isLost := slices.BinarySearchFunc(lost, s.Key(&f), Key.Compare)
		return isLost
	})
	return &rest
}

// withoutAny is without for a set of Keys, of which it may have none.
func (s *Service) withoutAny(lost map[Key]bool) *Service {
	var keys []Key
	for key := range s.keys() {
		if lost[key] {
			keys = append(keys, key)
		}
	}
	if keys == nil {
		return s
	}
	return s.without(keys)
}

// Protocol is an IANA protocol number.
type Protocol uint8

// The protocols that a Service port can have.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// ProtocolOf converts the protocol of the API. ok is false for any other value.
func ProtocolOf(p v1.Protocol) (proto Protocol, ok bool) {
	switch p {
	case v1.ProtocolTCP:
		return TCP, true
	case v1.ProtocolUDP:
		return UDP, true
	case v1.ProtocolSCTP:
		return SCTP, true
	default:
		return 0, false
	}
}

// String is the spelling of the API.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case SCTP:
		return "SCTP"
	default:
		return "protocol " + strconv.Itoa(int(p))
	}
}

// Kind is the source of a frontend in the Service.
type Kind uint8

// The kinds, in the order in which they win if two Services claim one Key: see Resolved.
const (
	ClusterIP Kind = iota + 1
	LoadBalancer
	ExternalIP
	NodePort
)

// String is the usual name of the kind.
func (k Kind) String() string {
	return enum.Name(k, "", "ClusterIP", "LoadBalancer", "ExternalIP", "NodePort")
}

// Scope names one of the two endpoint sets of a Service.
type Scope uint8

// The scopes.
const (
	ScopeCluster Scope = iota + 1
	ScopeLocal
)

// String is the name of the traffic policy in the API.
func (s Scope) String() string { return enum.Name(s, "", "Cluster", "Local") }

// Action is what happens to a new connection.
type Action uint8

// The actions.
const (
	// Forward translates the destination to one of the endpoints.
	Forward Action = iota + 1
	// Reject answers with ICMP port unreachable, for every protocol: no endpoint
	// anywhere can take the connection.
	Reject
	// Drop sends no answer: there are endpoints, but the policy is Local and none
	// of them is on this node.
	Drop
)

// String is the lower-case name of the action.
func (a Action) String() string { return enum.Name(a, "", "forward", "reject", "drop") }

// Masquerading is whose source address a frontend replaces.
type Masquerading uint8

// The masquerade rules.
const (
	// MasqueradeNone keeps every source.
	MasqueradeNone Masquerading = iota + 1
	// MasqueradeNonPod replaces sources that the local detector does not
	// recognise as pods.
	MasqueradeNonPod
	// MasqueradeAll replaces every source.
	MasqueradeAll
)

// String is a short name of the rule.
func (m Masquerading) String() string { return enum.Name(m, "", "keep", "non-pod", "all") }
