package changetracker

import (
	"iter"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ServicePortName identifies one service port: the namespace and name of the Service, the name
// of the port (empty if the Service has one unnamed port) and the protocol. One port name with
// two protocols is two service ports.
type ServicePortName struct {
	types.NamespacedName
	Port     string
	Protocol v1.Protocol
}

// String is "namespace/name", with ":port" appended for a named port. It omits the protocol,
// as kube-proxy's logs and metrics do.
func (n ServicePortName) String() string {
	if n.Port == "" {
		return n.NamespacedName.String()
	}
	return n.NamespacedName.String() + ":" + n.Port
}

// Compare orders names by namespace, name, port name and protocol.
func (n ServicePortName) Compare(o ServicePortName) int {
	if c := strings.Compare(n.Namespace, o.Namespace); c != 0 {
		return c
	}
	if c := strings.Compare(n.Name, o.Name); c != 0 {
		return c
	}
	if c := strings.Compare(n.Port, o.Port); c != 0 {
		return c
	}
	return strings.Compare(string(n.Protocol), string(o.Protocol))
}

// portKey identifies a port within a Service and its slices.
type portKey struct {
	port     string
	protocol v1.Protocol
}

func (k portKey) compare(o portKey) int {
	if c := strings.Compare(k.port, o.port); c != 0 {
		return c
	}
	return strings.Compare(string(k.protocol), string(o.protocol))
}

func (n ServicePortName) key() portKey { return portKey{port: n.Port, protocol: n.Protocol} }

func (p *ServicePort) key() portKey { return p.Name.key() }

// ServicePort is one port of a Service in one IP family. Values are canonical: addresses are
// unmapped and of one family, lists are sorted and have no duplicates, so that two values with
// the same behaviour are Equal. A ServicePort in a State is immutable; copy it before changing
// it.
type ServicePort struct {
	Name ServicePortName
	// Family is the family of all addresses. The trackers set it if there is an address. A
	// service port that has only a NodePort must set it.
	Family v1.IPFamily
	// ClusterIP is the VIP of a Service of the API inside the cluster. Without one it is the
	// zero Addr, and there are external IPs, load balancer IPs or a node port. See
	// ServiceChangeTracker.Set and Options.DecorateService.
	ClusterIP netip.Addr
	Port      uint16
	// NodePort and HealthCheckNodePort are 0 if there is none. HealthCheckNodePort is set only
	// for type LoadBalancer with externalTrafficPolicy Local.
	NodePort            uint16
	HealthCheckNodePort uint16
	ExternalIPs         []netip.Addr
	// LoadBalancerVIPs are the ingress addresses whose ipMode is VIP or unset (KEP-1860). The
	// node does not handle traffic for other ingress addresses.
	LoadBalancerVIPs []netip.Addr
	// LoadBalancerSourceRanges are the sources that may use the LoadBalancerVIPs. Empty means
	// all, unless DenyAllSources is set.
	LoadBalancerSourceRanges []netip.Prefix
	// DeniedSources may not use the LoadBalancerVIPs. The trackers leave it empty, and take what DecorateService or Set
	// gives out of LoadBalancerSourceRanges: that makes a few ranges for each. If more than 32,768 pairs of a load
	// balancer IP and a range would remain of all ports of the Service, DenyAllSources is set.
	DeniedSources []netip.Prefix
	// DenyAllSources closes the LoadBalancerVIPs to all sources. The trackers set it for DeniedSources, and with
	// Options.StrictSourceRanges, if a Service has source ranges but none of this family.
	DenyAllSources bool
	// ClientLimit bounds the connections of one client to the ExternalIPs and LoadBalancerVIPs. The trackers leave it empty:
	// no limit.
	ClientLimit ClientLimit
	// InternalPolicyLocal is false without a ClusterIP.
	InternalPolicyLocal bool
	ExternalPolicyLocal bool
	// ExposeOn selects the nodes that serve the external IPs, the load balancer IPs, the node port and the health check node
	// port. If it does not select the tracker's node, the State has the service port without them: see Elsewhere. Packets to
	// these addresses are then routed as usual. The trackers leave it empty: all nodes.
	ExposeOn NodeSelector
	// SessionAffinity is the timeout of ClientIP affinity; 0 means no affinity. The API allows
	// 1s to 24h.
	SessionAffinity time.Duration
	// Balancing is how an endpoint is chosen. The trackers leave it at Random.
	Balancing Balancing
	// MaxSlots is how many slots an engine gives a frontend at most, if it uses slots for weights or a
	// consistent hash, and has more than endpoints; 0 is no limit. The trackers set it for a Service with
	// more than 8 frontends in an IP family: 524,288 divided by the frontends, rounded down to a power of two.
	MaxSlots uint16
	// EndConnections ends TCP connections to endpoints that no EndpointSlice has any more; their
	// clients would wait, some forever. The trackers leave it at false.
	EndConnections bool
	// KeepFlows lets flows of UDP stay with an endpoint that is only not ready: in a slice, not terminating, and
	// not ejected. The trackers leave it at false: such flows get another endpoint.
	KeepFlows bool
	// Failover is about the groups of Endpoint.Priority.
	Failover Failover
	// FastPath lets the packets of established connections skip the node's rules, those of others
	// too, in an engine that has that: see docs/FASTPATHS.md. The trackers leave it at false.
	FastPath bool
	// CreationTimestamp and UID are those of the Service, the time in UTC. They decide which of
	// several Services gets a VIP. A Service with the zero time counts as the youngest.
	CreationTimestamp time.Time
	UID               types.UID
	// Ext is a payload of the embedding program, which Options.DecorateService sets.
	Ext any
	// elsewhere is what Elsewhere returns.
	elsewhere *ServicePort
}

// vips yields the ClusterIP, if there is one, and all other VIPs.
func (p *ServicePort) vips() iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		if p.ClusterIP.IsValid() && !yield(p.ClusterIP) {
			return
		}
		for _, list := range [...][]netip.Addr{p.LoadBalancerVIPs, p.ExternalIPs} {
			for _, a := range list {
				if !yield(a) {
					return
				}
			}
		}
	}
}

// ExternallyAccessible reports whether the service port is reachable from outside the cluster in
// this family: by node port, external IP or load balancer IP.
func (p *ServicePort) ExternallyAccessible() bool {
	return p.NodePort != 0 || len(p.ExternalIPs) > 0 || len(p.LoadBalancerVIPs) > 0
}

// UsesClusterEndpoints reports whether some frontend may send traffic to endpoints on any node.
// This includes externalTrafficPolicy Local, because it does not bind pods and the node
// itself.
func (p *ServicePort) UsesClusterEndpoints() bool {
	return !p.InternalPolicyLocal || p.ExternallyAccessible()
}

// UsesLocalEndpoints reports whether some frontend may send traffic only to endpoints on this
// node.
func (p *ServicePort) UsesLocalEndpoints() bool {
	return p.InternalPolicyLocal || p.ExternalPolicyLocal && p.ExternallyAccessible()
}

// String is "clusterIP:port/PROTOCOL", with IPv6 addresses in brackets. Without a ClusterIP it
// has the first load balancer IP or external IP, or is "node port N/PROTOCOL".
func (p *ServicePort) String() string {
	for vip := range p.vips() {
		return netip.AddrPortFrom(vip, p.Port).String() + "/" + string(p.Name.Protocol)
	}
	return "node port " + strconv.Itoa(int(p.NodePort)) + "/" + string(p.Name.Protocol)
}

// Equal compares everything but Ext.
func (p *ServicePort) Equal(o *ServicePort) bool {
	return p.Name == o.Name && p.Family == o.Family && p.ClusterIP == o.ClusterIP && p.Port == o.Port &&
		p.NodePort == o.NodePort && p.HealthCheckNodePort == o.HealthCheckNodePort &&
		p.CreationTimestamp.Equal(o.CreationTimestamp) && p.UID == o.UID && p.equalPolicies(o) && p.equalLists(o)
}

func (p *ServicePort) equalPolicies(o *ServicePort) bool {
	return p.DenyAllSources == o.DenyAllSources && p.ExposeOn == o.ExposeOn && p.SessionAffinity == o.SessionAffinity &&
		p.Balancing == o.Balancing && p.MaxSlots == o.MaxSlots && p.EndConnections == o.EndConnections && p.KeepFlows == o.KeepFlows && p.Failover == o.Failover && p.FastPath == o.FastPath && p.ClientLimit == o.ClientLimit &&
		p.InternalPolicyLocal == o.InternalPolicyLocal && p.ExternalPolicyLocal == o.ExternalPolicyLocal
}

func (p *ServicePort) equalLists(o *ServicePort) bool {
	if (p.elsewhere == nil) != (o.elsewhere == nil) || p.elsewhere != nil && !p.elsewhere.Equal(o.elsewhere) {
		return false
	}
	return slices.Equal(p.ExternalIPs, o.ExternalIPs) &&
		slices.Equal(p.LoadBalancerVIPs, o.LoadBalancerVIPs) &&
		slices.Equal(p.LoadBalancerSourceRanges, o.LoadBalancerSourceRanges) && slices.Equal(p.DeniedSources, o.DeniedSources)
}

// Ext returns a payload that a decorate hook stored. ok is false if v holds another type or
// nothing.
func Ext[T any](v any) (value T, ok bool) {
	value, ok = v.(T)
	return value, ok
}

func validProtocol(p v1.Protocol) bool {
	return p == v1.ProtocolTCP || p == v1.ProtocolUDP || p == v1.ProtocolSCTP
}

func (p *ServicePort) clone() *ServicePort {
	c := *p
	c.ExternalIPs = slices.Clone(p.ExternalIPs)
	c.LoadBalancerVIPs = slices.Clone(p.LoadBalancerVIPs)
	c.LoadBalancerSourceRanges = slices.Clone(p.LoadBalancerSourceRanges)
	c.DeniedSources = slices.Clone(p.DeniedSources)
	return &c
}
