package changetracker

import (
	"net/netip"
	"slices"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// LabelServiceProxyName hands a Service to another proxy than the default one
// (service.kubernetes.io/service-proxy-name of the Kubernetes API).
const LabelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// ExternalIPPolicy says which values of spec.externalIPs count. Whoever may write a
// Service can take the traffic to any address with them (CVE-2020-8554). Those that
// do not count are Problems of reason ReasonRefused; the Service's other addresses
// stay. Never accepted are addresses of loopback, link-local and multicast, and the
// unspecified one. The zero value accepts all others, also addresses of nodes, as
// kube-proxy does: external IPs are commonly used for these. What depends on the node
// that it is, its pods' ranges and its own addresses, is for desired.Resolver.
type ExternalIPPolicy struct {
	// Refuse accepts no external IP at all (AllowServiceExternalIPs=false of KEP-5707).
	Refuse bool
	// Denied are ranges that no external IP may be in.
	Denied []netip.Prefix
}

func (p *ExternalIPPolicy) accepts(a netip.Addr) bool {
	return !p.Refuse && !special(a) && !slices.ContainsFunc(p.Denied, func(r netip.Prefix) bool { return canonicalPrefix(r).Contains(a) })
}

// Options configures the trackers. The zero value tracks both families for a
// node without name.
type Options struct {
	// Families to track; empty means IPv4 and IPv6.
	Families []v1.IPFamily
	Node     Node
	// Cluster is what LabelSourceCluster calls the node's own cluster. Where the label names
	// another one, nodes are that one's, as those of a Source with that name. Without
	// Cluster, endpoints that are imported by LabelServiceImport have no Node: a node of
	// another cluster may have the name of one of ours.
	Cluster string
	// AwaitNode makes the first SetNode an Input that Tracker.Ready waits for.
	AwaitNode bool
	// AwaitSources names Sources whose first Replace or Synced Tracker.Ready waits for.
	AwaitSources []string
	// ServiceProxyName is the value of LabelServiceProxyName that Services must
	// carry. Empty means Services without that label.
	ServiceProxyName string
	// Select, if set, says which Services to track, after ServiceProxyName. A
	// Service that it turns away counts as deleted. It must be pure.
	Select func(*v1.Service) bool
	// StrictSourceRanges closes a load balancer VIP whose Service restricts its
	// sources, but with no valid range of the VIP's family. By default, as in
	// kube-proxy, such a VIP is open to everybody. Either is a Problem.
	StrictSourceRanges bool
	// ExternalIPs says which external IPs of Services count.
	ExternalIPs ExternalIPPolicy
	// LoopbackEndpoints accepts endpoints at loopback addresses, which the API server
	// refuses: they open what the node serves to itself. It is for Services of one
	// machine, such as in a test.
	LoopbackEndpoints bool
	// IndexEndpoints makes State.ByEndpoint O(log N). It costs about 10 MB for 100,000
	// endpoints, and some microseconds for each that comes or goes.
	IndexEndpoints bool
	// DecorateService and DecorateEndpoint, if set, may fill Ext and change any
	// other field but the identity (Name, Family, Addr), also take away the ClusterIP of a
	// service port that has other addresses or a node port. They must be pure and must not
	// keep or change the API objects. DecorateEndpoint sees an endpoint once for all
	// ports of its slice, so that Addr's port is 0.
	DecorateService  func(*ServicePort, *v1.Service)
	DecorateEndpoint func(*Endpoint, *discovery.Endpoint, *discovery.EndpointSlice)
	// EditEndpoints, if set, decides about all endpoints of a service port at once:
	// which there are, and all their fields. It gets what slices and Endpoints.Set say,
	// with Overrides, sorted by address, and returns what the State is to have, in any
	// order; none, too. Endpoints without a valid address of the family are left out.
	// If it panics, the endpoints stay as they were given.
	//
	// It must be pure, and runs again only when the service port or what it is given
	// changes: call Tracker.Refresh when something else changes its answer. An Apply
	// runs it, once for each such service port, and those of two families may do so at
	// the same time. No lock of the tracker is held, but it must not call Apply. The
	// list is the hook's own; the service port and the hint lists of endpoints are not
	// to be written to. A tracker without Services does not run it. While it is set,
	// changed of other calls may be true for a difference that it hides.
	EditEndpoints func(port *ServicePort, endpoints []Endpoint) []Endpoint
	// EqualExt compares two Ext payloads; nil compares with ==, and payloads
	// that cannot be compared so count as different.
	EqualExt func(a, b any) bool
	// Logger gets one line for each value that is set aside; nil is silent.
	Logger *zap.Logger
	// Now is the clock for trigger times; nil means time.Now.
	Now func() time.Time
}

// mayServe says that an endpoint may have the address. The API server refuses
// special ones (ValidateEndpointIP): they would open what the node serves to itself.
func (o *Options) mayServe(a netip.Addr) bool {
	return dialable(a) && (!special(a) || o.LoopbackEndpoints && a.IsLoopback())
}

// clusterOf says whose nodes a slice of a Source names; empty for the tracker's own. known
// is false for an imported slice where nobody has said which cluster is whose.
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

// config is what all parts of a tracker share. It does not change after New, but for the
// channel's content.
type config struct {
	options Options
	logger  *zap.Logger
	now     func() time.Time
	created time.Time
	tracked perFamily[bool]
	// endpointsOnly is set where there are no Services, so that all endpoints matter.
	endpointsOnly bool
	// changed has a value after a change.
	changed chan struct{}
	// warn logs when the store's lock, which must be held, is released.
	warn func(message string, fields ...zap.Field)
}

// newConfig fills in the defaults of options that are valid.
func newConfig(o Options) *config {
	c := &config{options: o, logger: o.Logger, now: o.Now, changed: make(chan struct{}, 1)}
	if c.logger == nil {
		c.logger = zap.NewNop()
	}
	if c.now == nil {
		c.now = time.Now
	}
	c.created = c.now()
	for family := range c.tracked {
		c.tracked[family] = len(o.Families) == 0 || slices.Contains(o.Families, familyName(family))
	}
	return c
}
