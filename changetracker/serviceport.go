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

// ServicePortName identifies one service port: the Service's namespace and
// name, the port's name (empty when the Service has one unnamed port) and the
// protocol. The same port name under two protocols is two service ports.
type ServicePortName struct {
	types.NamespacedName
	Port     string
	Protocol v1.Protocol
}

// String is "namespace/name", with ":port" appended for a named port. It leaves
// the protocol out, as kube-proxy's logs and metrics do.
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

// portKey is what a Service and its slices know a port by.
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

// ServicePort is what a proxy needs to know of one port of a Service, for one
// IP family. Values are canonical: addresses are unmapped and of one family,
// lists are sorted and hold no duplicates, so that two values that behave alike
// are Equal. A ServicePort in a State is immutable; copy it before changing it.
type ServicePort struct {
	Name ServicePortName
	// Family is that of all addresses. The trackers fill it in where there is an
	// address. A service port with no more than a NodePort has to say it.
	Family v1.IPFamily
	// ClusterIP is what a Service of the API is dialled at from inside of the cluster.
	// A service port without has the zero Addr, and external IPs, load balancer VIPs or
	// a node port. See ServiceChangeTracker.Set and Options.DecorateService.
	ClusterIP netip.Addr
	Port      uint16
	// NodePort and HealthCheckNodePort are 0 when there is none. The latter is
	// set only for type LoadBalancer with externalTrafficPolicy Local.
	NodePort            uint16
	HealthCheckNodePort uint16
	ExternalIPs         []netip.Addr
	// LoadBalancerVIPs are the ingress addresses whose ipMode is VIP or unset
	// (KEP-1860); traffic for other ingress addresses is not the node's.
	LoadBalancerVIPs []netip.Addr
	// LoadBalancerSourceRanges lists who may use the LoadBalancerVIPs. Empty
	// means everybody, unless DenyAllSources is set.
	LoadBalancerSourceRanges []netip.Prefix
	// DenyAllSources closes the LoadBalancerVIPs altogether. The trackers set it
	// only under Options.StrictSourceRanges, when a Service restricts its sources
	// but names none of this family.
	DenyAllSources bool
	// InternalPolicyLocal is false without a ClusterIP.
	InternalPolicyLocal bool
	ExternalPolicyLocal bool
	// SessionAffinity is the ClientIP affinity timeout; 0 means no affinity. The
	// API allows 1s to 24h.
	SessionAffinity time.Duration
	// CreationTimestamp and UID are those of the Service. They decide who gets a VIP
	// that several Services ask for: one whose age is not known, which has the zero
	// time, counts as younger than all others. In UTC.
	CreationTimestamp time.Time
	UID               types.UID
	// Ext is the embedder's own payload, set by Options.DecorateService.
	Ext any
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

// ExternallyAccessible says whether traffic from outside the cluster can reach
// the service port in this family: by node port, external IP or load balancer.
func (p *ServicePort) ExternallyAccessible() bool {
	return p.NodePort != 0 || len(p.ExternalIPs) > 0 || len(p.LoadBalancerVIPs) > 0
}

// UsesClusterEndpoints says whether some frontend may send traffic to endpoints
// on any node. With externalTrafficPolicy Local that is still so, because pods
// and the node itself are short-circuited past the policy.
func (p *ServicePort) UsesClusterEndpoints() bool {
	return !p.InternalPolicyLocal || p.ExternallyAccessible()
}

// UsesLocalEndpoints says whether some frontend is confined to this node's
// endpoints.
func (p *ServicePort) UsesLocalEndpoints() bool {
	return p.InternalPolicyLocal || p.ExternalPolicyLocal && p.ExternallyAccessible()
}

// String is "clusterIP:port/PROTOCOL", with IPv6 addresses in brackets. Without a
// ClusterIP it is the first load balancer VIP, or external IP, or "node port N/PROTOCOL".
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
		p.DenyAllSources == o.DenyAllSources && p.SessionAffinity == o.SessionAffinity &&
		p.InternalPolicyLocal == o.InternalPolicyLocal && p.ExternalPolicyLocal == o.ExternalPolicyLocal &&
		p.CreationTimestamp.Equal(o.CreationTimestamp) && p.UID == o.UID &&
		slices.Equal(p.ExternalIPs, o.ExternalIPs) &&
		slices.Equal(p.LoadBalancerVIPs, o.LoadBalancerVIPs) &&
		slices.Equal(p.LoadBalancerSourceRanges, o.LoadBalancerSourceRanges)
}

// Ext reads a payload that a decorate hook stored; ok is false when v holds
// another type or nothing.
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
	return &c
}
