package changetracker

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// LabelServiceProxyName assigns a Service to another proxy than the default one
// (service.kubernetes.io/service-proxy-name of the Kubernetes API).
const LabelServiceProxyName = "service.kubernetes.io/service-proxy-name"

func (o *ObjectOptions) acceptsExternalIP(a netip.Addr) bool {
	return !o.RefuseExternalIPs && !within(o.DeniedExternalIPs, a)
}

func within(ranges []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return canonicalPrefix(r).Contains(a) })
}

// Options configures the trackers. The zero value tracks both families for a node without a
// name.
type Options struct {
	ObjectOptions

	// Families are the IP families to track; empty means IPv4 and IPv6.
	Families []v1.IPFamily
	Node     Node
	// Logger receives one line for each value that is set aside. Nil logs nothing.
	Logger *zap.Logger
	// Now is the clock for trigger times; nil means time.Now.
	Now func() time.Time
}

// ObjectOptions say which objects are tracked, and how they are read. The zero value does what
// kube-proxy does.
type ObjectOptions struct {
	// Cluster is the value of LabelSourceCluster for the node's own cluster. If the label names
	// another cluster, nodes are that cluster's, like those of a Source with that name. If
	// Cluster is empty, endpoints that LabelServiceImport imports have no Node, because a node
	// of another cluster may have the name of one of ours.
	Cluster string
	// AwaitNode makes the first SetNode an Input that Tracker.Ready waits for.
	AwaitNode bool
	// AwaitSources names Sources. Tracker.Ready waits for the first Replace or Synced of each.
	AwaitSources []string
	// ServiceProxyName is the required value of LabelServiceProxyName. Empty means Services
	// without that label.
	ServiceProxyName string
	// Select, if set, decides which Services to track, after ServiceProxyName. A Service that
	// it rejects counts as deleted. It must be pure.
	Select func(*v1.Service) bool
	// StrictSourceRanges closes a load balancer IP if its Service has source ranges, but no
	// valid one of the IP's family. The default is that of kube-proxy: such an IP is open to
	// everyone. Both are a Problem.
	StrictSourceRanges bool
	// RefuseExternalIPs accepts no value of spec.externalIPs (AllowServiceExternalIPs=false of KEP-5707), and
	// DeniedExternalIPs are ranges in which none is accepted. Whoever may write a Service can take over the traffic
	// to any address with them (CVE-2020-8554). Values that are not accepted are Problems with ReasonRefused; the
	// other addresses of the Service are still used. Addresses that no VIP may have (TRK-18) are refused in any case.
	// The default accepts all others, including addresses of nodes, as kube-proxy does: external IPs are commonly
	// used for these. desired.Resolver decides about addresses of the node itself and of its pods.
	RefuseExternalIPs bool
	DeniedExternalIPs []netip.Prefix
	// DeniedVIPs are ranges in which neither external IPs nor load balancer IPs are accepted, such as
	// those of pods: a Service would take over their traffic. Such values are Problems with ReasonRefused.
	DeniedVIPs []netip.Prefix
	// LoopbackEndpoints accepts endpoints at loopback addresses. The API server refuses them,
	// because they expose services that the node offers only to itself. It is for Services on
	// one machine, as in tests.
	LoopbackEndpoints bool
	// IndexEndpoints makes State.ByEndpoint O(log N). It costs about 10 MB for 100,000
	// endpoints, and some microseconds for each endpoint that is added or removed.
	IndexEndpoints bool
	// DecorateService and DecorateEndpoint, if set, may set Ext and change every field except
	// the identity (Name, Family, Addr). They may remove the ClusterIP of a service port that
	// has other addresses or a node port. They must be pure, and must not keep or change the
	// API objects. DecorateEndpoint runs once for an endpoint and all ports of its slice, so
	// the port of Addr is 0.
	DecorateService  func(*ServicePort, *v1.Service)
	DecorateEndpoint func(*Endpoint, *discovery.Endpoint, *discovery.EndpointSlice)
	// EditEndpoints, if set, decides about all endpoints of a service port together: which
	// exist, and all their fields. It receives the endpoints of slices and Endpoints.Set, with
	// Overrides, sorted by address. It returns the endpoints for the State in any order, or
	// none. Endpoints without a valid address of the family are ignored. If it panics, the
	// endpoints stay as they were.
	//
	// It must be pure. It runs again only if the service port or its input changes: call
	// Tracker.Refresh if something else changes its result. Apply runs it, once for each such
	// service port, and concurrently for two families. No lock of the tracker is held, but it
	// must not call Apply. The hook owns the list, but must not write to the service port and
	// the hint lists. A tracker without Services does not run it. While it is set, other calls
	// may report changed for a difference that it hides.
	EditEndpoints func(port *ServicePort, endpoints []Endpoint) []Endpoint
	// EqualExt compares two Ext payloads. Nil compares with ==; payloads that are not
	// comparable are different.
	EqualExt func(a, b any) bool
}

// mayServe reports whether an endpoint may have the address. The API server refuses special
// addresses (ValidateEndpointIP), because they expose services that the node offers only to
// itself.
func (o *Options) mayServe(a netip.Addr) bool {
	return dialable(a) && (!special(a) || o.LoopbackEndpoints && a.IsLoopback())
}

// clusterOf returns the cluster whose nodes a slice of a Source names; empty for the tracker's
// own. known is false for an imported slice if its cluster is not known.
func (o *Options) clusterOf(from string, slice *discovery.EndpointSlice) (cluster string, known bool) {
	of := slice.Labels[LabelSourceCluster]
	switch {
	case o.Cluster != "" && of == o.Cluster:
		return "", true
	case o.Cluster != "" && of != "":
		return of, true
	default:
		return from, from != "" || slice.Labels[discovery.LabelServiceName] != ""
	}
}

// config is what all parts of a tracker share. It does not change after New.
type config struct {
	options Options
	logger  *zap.Logger
	now     func() time.Time
	created time.Time
	tracked perFamily[bool]
	// endpointsOnly is set if there are no Services: all endpoints matter then.
	endpointsOnly bool
	// changed holds a value after a change.
	changed chan struct{}
	// warn logs when the store's lock, which the caller holds, is released.
	warn func(message string, fields ...zap.Field)
}

// newConfig sets the defaults of valid options.
func newConfig(o Options) *config {
	c := &config{options: o, logger: o.Logger, now: o.Now, changed: make(chan struct{}, 1)}
	c.logger = cmp.Or(c.logger, zap.NewNop())
	if c.now == nil {
		c.now = time.Now
	}
	c.created = c.now()
	for family := range c.tracked {
		c.tracked[family] = len(o.Families) == 0 || slices.Contains(o.Families, familyName(family))
	}
	return c
}
