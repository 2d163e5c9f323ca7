package proxier

import (
	"context"
	"net/netip"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/runner"
)

// Config is what all engines have in common. It is plain data; the zero value
// is a working configuration of an instance of our own name for both families.
type Config struct {
	// Families to serve; empty means IPv4 and IPv6.
	Families []v1.IPFamily
	// Node is what is known about the node at start; OnNodeChange updates it. With
	// NodePorts.Primary or Masquerade.NodePodCIDRs, and neither Addresses nor
	// PodCIDRs, the first sync waits for OnNodeChange, as it always does with
	// Tracker.AwaitNode: without the node it would take away what a proxy before this one
	// has programmed.
	Node changetracker.Node
	// Names of the kernel objects; the zero value means DefaultNames.
	Names Names
	// Tracker carries the trackers' options for embedders: selection, decoration,
	// strictness, external IPs. Its Families, Node and Logger must not be set: the
	// tracker gets Config.Families, Config.Node and Deps.Logger. No external IP may be
	// in a range of pods: Masquerade.PodCIDRs, and Node.PodCIDRs as OnNodeChange
	// reports them.
	Tracker changetracker.Options
	// DenyNodeExternalIPs says that no external IP may be in Node.Addresses either, as
	// OnNodeChange reports them. By default one may, as with kube-proxy: where nobody
	// hands out load balancer addresses, an external IP commonly is an address of a node.
	// Addresses of other nodes are for Tracker.ExternalIPs.Denied.
	DenyNodeExternalIPs bool
	// Kinds are the kinds of frontends to program; empty means all. With neither load
	// balancers nor node ports, Deps.Health hears of no Service.
	Kinds []desired.Kind
	// EditSelection, if set, decides which endpoints a service port has on this node, after
	// traffic policies and topology have: see desired.Resolver. If it panics, they stay as
	// they were. When something else than the service port and its endpoints changes its
	// answer, call Tracker().Refresh and Trigger. Tracker.EditEndpoints is for what does not
	// depend on the node.
	EditSelection func(view changetracker.View, port *changetracker.ServicePort, s changetracker.Selection) changetracker.Selection
	// Runner limits the rate of syncs.
	Runner runner.Options
	// FullSyncPeriod is how often everything is checked against the kernel even if
	// nothing changed; 0 means 1h.
	FullSyncPeriod time.Duration
	Masquerade     Masquerade
	NodePorts      NodePorts
	// NetNS is the network namespace to program: a path such as
	// /run/netns/blue, a bare name in /run/netns, or empty for the namespace of
	// the thread that creates the engine's sockets.
	NetNS string
	// Important are Services to program first at a first sync, after
	// default/kubernetes and kube-system/kube-dns.
	Important []types.NamespacedName
}

// Masquerade says when the source address of a connection is replaced.
type Masquerade struct {
	// Mark is the packet mark that carries the decision within the kernel; it must
	// be a single bit that nobody else on the node uses. 0 means 0x4000.
	Mark uint32
	// All replaces the source of every connection to a ClusterIP.
	All bool
	// The other fields tell the traffic of this node's pods from other traffic, each in
	// its way; one of them may be set. Without any, ClusterIP traffic keeps its source.

	// PodCIDRs holds the pod ranges of the whole cluster, of both families.
	PodCIDRs []netip.Prefix
	// NodePodCIDRs uses Node.PodCIDRs, and follows its changes.
	NodePodCIDRs bool
	// PodInterface is the name of the bridge that pods are on.
	PodInterface string
	// PodInterfacePrefix is what the names of the pods' interfaces begin with.
	PodInterfacePrefix string
}

// NodePorts says which node addresses accept node ports.
type NodePorts struct {
	// Addresses limits node ports to local addresses in these ranges; a family
	// without a range accepts them on all its addresses, as kube-proxy does.
	Addresses []netip.Prefix
	// Primary limits node ports to the first address of each family in
	// Node.Addresses. A family without an address accepts none. Excludes Addresses.
	Primary bool
}

// Deps are behaviours that the embedding program may inject; nil means none.
type Deps struct {
	// Logger gets what an operator should know.
	Logger *zap.Logger
	// Observer hears about every sync.
	Observer Observer
	// Conntrack forgets flows whose endpoint is gone. The engines' own constructors,
	// such as nftables.New, set one if it is nil, and so does nodedeps.Complete; New does
	// without, which Status says.
	Conntrack Conntrack
	// Health answers at the health check node ports of Services. If it is nil, it is as
	// with Conntrack.
	Health Health
	// Announcer tells others which VIPs this node serves.
	Announcer Announcer
	// Settings are kernel settings to apply when Run begins.
	Settings Settings
	// LocalAddresses returns the addresses of the node's interfaces, in the network
	// namespace that is programmed. Only Explain asks for them. If it is nil, the
	// addresses in Config.Node are all there are.
	LocalAddresses func(context.Context) ([]netip.Addr, error)
}

// NoHealth is a Health that listens nowhere, for programs that do not want the
// engines' constructors to set one.
func NoHealth() Health { return noHealth{} }

type noHealth struct{}

func (noHealth) Update(v1.IPFamily, HealthUpdate) {}
func (noHealth) Conditions() []Condition          { return nil }
func (noHealth) Run(ctx context.Context, _ func() Status) error {
	<-ctx.Done()
	return nil
}

// Observer hears about the proxy's work, on the syncing goroutine. It must be
// quick, and safe for calls of both families at once.
type Observer interface {
	ObserveSync(report SyncReport)
}
