package proxier

import (
	"net/netip"
	"slices"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/runner"
)

// Config is the configuration that all engines share. It is plain data. The zero value
// is a working configuration for both families, with DefaultNames.
type Config struct {
	// Families are the IP families to serve; empty means IPv4 and IPv6.
	Families []v1.IPFamily
	// Node describes the node at start; OnNodeChange updates it. If NodePorts.Primary or
	// Masquerade.NodePodCIDRs is set, and Node has neither Addresses nor PodCIDRs, the
	// first sync waits for OnNodeChange, as it always does with Tracker.AwaitNode: a sync
	// without the node would remove node ports that the previous proxy has programmed.
	Node changetracker.Node
	// NodeTimeout is how long the first sync waits for the node when everything else has come; then it
	// goes on without, and ConditionNode says what is missing. 0 means 30s, runner.Never waits without limit.
	NodeTimeout time.Duration
	// Names are the names of the kernel objects; the zero value means DefaultNames.
	Names Names
	// Tracker says which objects are tracked and how they are read: selection, decoration, strictness,
	// external IPs. External IPs and load balancer IPs in pod ranges are refused: Masquerade.PodCIDRs, and
	// Node.PodCIDRs as OnNodeChange reports them.
	Tracker changetracker.ObjectOptions
	// DenyNodeExternalIPs refuses external IPs in Node.Addresses too, as OnNodeChange
	// reports them. By default they are allowed, as with kube-proxy: in clusters without
	// load balancers, external IPs are commonly addresses of nodes. To refuse addresses of
	// other nodes, use Tracker.DeniedExternalIPs.
	DenyNodeExternalIPs bool
	// ReservedExternalIPs are addresses and TCP ports that no external IP gets: those of the API server, so
	// that a Service does not lead this process away from it.
	ReservedExternalIPs []netip.AddrPort
	// Kinds are the kinds of frontends to program; empty means all. Without load
	// balancers and node ports, Deps.Health receives no updates.
	Kinds []desired.Kind
	// EditSelection, if set, changes the endpoints of a service port on this node, after
	// traffic policies and topology were applied: see desired.Resolver. If it panics, its
	// input is used unchanged. If its answer depends on anything but the service port and
	// its endpoints, call Tracker().Refresh and Trigger when that changes. For edits that do
	// not depend on the node, use Tracker.EditEndpoints.
	EditSelection func(view changetracker.View, port *changetracker.ServicePort, s changetracker.Selection) changetracker.Selection
	// Runner limits the rate of syncs. Its Retry is for each service port that fails, and for each IP
	// family whose sync does.
	Runner runner.Options
	// FullSyncPeriod is the time between full syncs, which compare everything with the
	// kernel even if nothing changed; 0 means 1h.
	FullSyncPeriod time.Duration
	Masquerade     Masquerade
	NodePorts      NodePorts
	// NetNS is the network namespace to program: a path such as
	// /run/netns/blue, a bare name in /run/netns, or empty for the namespace of
	// the thread that creates the engine's sockets.
	NetNS string
	// CountConnections makes the engine count new connections by service port and endpoint: see
	// Proxier.Counts, and docs/PERFORMANCE.md for what it costs. nftables ignores it on kernels
	// without CONFIG_NFT_COUNTER.
	CountConnections bool
	// CountTraffic makes Proxier.Counts tell packets and bytes by service port and endpoint. For engines
	// in the kernel, Deps.Conntrack counts them: it needs the kernel setting
	// net.netfilter.nf_conntrack_acct, for example by SysctlOptions.Accounting of package conntrack.
	// Connections from before that setting have no traffic, others from when Run began.
	CountTraffic bool
	// LeastConnections says that a Balancer of package leastconnections runs beside this Provider: in an engine that
	// chooses at random, service ports with policy LeastConnections follow it by weights, which is no Problem then.
	LeastConnections bool
	// Important are Services to program first in the first sync, and in each part of a large change, after
	// default/kubernetes and kube-system/kube-dns.
	Important []types.NamespacedName
}

// Masquerade decides when the source address of a connection is replaced.
type Masquerade struct {
	// Mark is the masquerade mark: the packet mark that carries the decision within the
	// kernel. It must be a single bit that no other program on the node uses. 0 means 0x4000.
	Mark uint32
	// All replaces the source of every connection to a ClusterIP.
	All bool
	// The other fields are ways to recognize the traffic of this node's pods; at most one
	// may be set. Without any, ClusterIP traffic keeps its source.

	// PodCIDRs holds the pod ranges of the whole cluster, of both families.
	PodCIDRs []netip.Prefix
	// NodePodCIDRs uses Node.PodCIDRs, also after OnNodeChange.
	NodePodCIDRs bool
	// PodInterface is the name of the bridge that pods are connected to.
	PodInterface string
	// PodInterfacePrefix is the common prefix of the names of the pods' interfaces.
	PodInterfacePrefix string
}

// NodePorts selects the node addresses that accept node ports: those that any of its fields
// names. The zero value selects all addresses but the loopback ones.
type NodePorts struct {
	// Addresses are ranges of local addresses. If nothing else is set, a family without a
	// range accepts node ports on all its addresses, as with kube-proxy. The range /0 does not
	// include loopback addresses; others that contain 127.0.0.1 or ::1 are like Localhost.
	Addresses []netip.Prefix
	// Primary is the first address of each family in Node.Addresses. A family without an
	// address accepts none there.
	Primary bool
	// Localhost is 127.0.0.1 and ::1 (KEP-6032). It is for every engine: see the package's documentation for what
	// serves node ports there. New logs a warning if the engine of a family cannot.
	Localhost bool
}

// trackerOptions returns the options of the change tracker.
func (c *Config) trackerOptions(log *zap.Logger) changetracker.Options {
	o := changetracker.Options{ObjectOptions: c.Tracker, Families: c.Families, Node: c.Node, Logger: log}
	o.AwaitNode = o.AwaitNode || c.lacks(c.Node)
	o.DeniedVIPs = slices.Concat(o.DeniedVIPs, c.Masquerade.PodCIDRs)
	return o
}

// lacks reports whether the configuration depends on the node while nothing but its name is known.
func (c *Config) lacks(node changetracker.Node) bool {
	return (c.NodePorts.Primary || c.Masquerade.NodePodCIDRs) && len(node.Addresses)+len(node.PodCIDRs) == 0
}

// runnerOptions makes the runner sync at least once per full-sync period.
func (c *Config) runnerOptions() runner.Options {
	o := c.Runner
	if o.MaxInterval < 0 || o.MaxInterval > c.FullSyncPeriod {
		o.MaxInterval = c.FullSyncPeriod
	}
	return o
}

// important returns the Services that are programmed before all others.
func (c *Config) important() []types.NamespacedName {
	return append([]types.NamespacedName{
		{Namespace: "default", Name: "kubernetes"},
		{Namespace: "kube-system", Name: "kube-dns"},
	}, c.Important...)
}
