package nodeproxy

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

// The values of --detect-local-mode: how traffic of this node's pods is detected.
const (
	byClusterCIDR = "ClusterCIDR"
	byNodeCIDR    = "NodeCIDR"
	byBridge      = "BridgeInterface"
	byPrefix      = "InterfaceNamePrefix"
)

// Words in --nodeport-addresses, beside ranges.
const (
	primary    = "primary"   // the node's primary addresses
	loopback   = "localhost" // 127.0.0.1 and ::1
	everywhere = "all"       // all addresses but the loopback ones
)

// nodeAddresses is the value of --denied-external-ips for the node's addresses.
const nodeAddresses = "node-addresses"

// config returns the configuration of the engine. The error names all invalid flags.
func (o *options) config(node string) (proxier.Config, error) {
	var f faults
	c := proxier.Config{
		Node:       changetracker.Node{Name: node},
		Names:      o.names(&f),
		Runner:     o.tuned().rate(),
		Masquerade: o.masquerade(&f),
		NodePorts:  o.nodePorts(&f),
		Tracker: changetracker.ObjectOptions{
			StrictSourceRanges: o.strictSourceRanges, Cluster: o.clusterID,
			RefuseExternalIPs: o.refuseExternalIPs || !o.kubeProxy.gates.enabled(gateExternalIPs), DeniedExternalIPs: o.deniedRanges(&f),
		},

		CountConnections:    o.countConnections,
		CountTraffic:        o.countTraffic,
		LeastConnections:    o.weighsConnections(),
		DenyNodeExternalIPs: slices.Contains(o.deniedExternalIPs, nodeAddresses),
	}
	if bit := o.tuned().masqueradeBit; bit >= 0 { // Validate reports others
		c.Masquerade.Mark = 1 << bit
	}
	return c, errors.Join(f...)
}

// configOfNode returns the configuration on this node.
func (o *options) configOfNode(ctx context.Context, log *zap.Logger) (proxier.Config, error) {
	node, err := o.nodeName()
	if err != nil {
		return proxier.Config{}, err
	}
	c, err := o.config(node)
	if err != nil {
		return c, err
	}
	c.ReservedExternalIPs = o.apiServer(ctx, log)
	return c, nil
}

// deniedRanges are those of --denied-external-ips.
func (o *options) deniedRanges(f *faults) []netip.Prefix {
	ranges := slices.DeleteFunc(slices.Clone(o.deniedExternalIPs), func(text string) bool { return text == nodeAddresses })
	denied, ok := parsePrefixes(ranges)
	f.check(ok, "denied-external-ips", strings.Join(o.deniedExternalIPs, ","), "ranges such as 10.0.0.0/8, or node-addresses")
	return denied
}

func (o *options) names(f *faults) proxier.Names {
	if o.instance == "" {
		return proxier.KubeProxyNames()
	}
	names, err := proxier.NamesFor(o.instance)
	f.check(err == nil, "instance", o.instance, "1 to 7 lower-case letters, digits or inner hyphens")
	return names
}

// rate returns the limit of syncs and the backoff of retries.
func (t *tuning) rate() runner.Options {
	rate := runner.Options{MinInterval: t.minSyncPeriod, Retry: runner.Backoff{Max: t.syncPeriod}}
	if rate.MinInterval == 0 {
		rate.MinInterval = runner.Unlimited
	}
	if first := rate.WithDefaults().Retry.Initial; t.syncPeriod < first {
		rate.Retry.Initial = max(t.syncPeriod, time.Millisecond)
	}
	return rate
}

func (o *options) masquerade(f *faults) proxier.Masquerade {
	m := proxier.Masquerade{All: o.masqueradeAll}
	switch o.detectLocalMode {
	case "", byClusterCIDR:
		m.PodCIDRs = o.clusterCIDRs(f)
	case byNodeCIDR:
		m.NodePodCIDRs = true
	case byBridge:
		m.PodInterface = o.podBridge
		checkInterface(f, "pod-bridge-interface", o.podBridge)
	case byPrefix:
		m.PodInterfacePrefix = o.podPrefix
		checkInterface(f, "pod-interface-name-prefix", o.podPrefix)
	default:
		f.check(false, "detect-local-mode", o.detectLocalMode, "ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix")
	}
	return m
}

// logDetection warns of flags that recognize no pods: kube-proxy's default, with which it warns too. Sockets of mode userspace
// do not ask who the client is.
func (o *options) logDetection(log *zap.Logger) {
	m := o.masquerade(new(faults)) // checked before
	if m.All || m.NodePodCIDRs || len(m.PodCIDRs) > 0 || m.PodInterface != "" || m.PodInterfacePrefix != "" || o.mode() == modeUserspace {
		return
	}
	log.Warn("pods are not recognized: connections to ClusterIPs keep their source, and clients that are no pods may get no answer; set --cluster-cidr, or another --detect-local-mode",
		zap.String("why", "--detect-local-mode is "+byClusterCIDR+", and --cluster-cidr is empty"))
}

func checkInterface(f *faults, flag, name string) {
	f.check(proxier.ValidInterfaceName(name), flag, name, proxier.InterfaceNames+", because --detect-local-mode uses it")
}

func (o *options) clusterCIDRs(f *faults) []netip.Prefix {
	var texts []string
	for text := range strings.SplitSeq(o.clusterCIDR, ",") {
		if text = strings.TrimSpace(text); text != "" {
			texts = append(texts, text)
		}
	}
	cidrs, ok := parsePrefixes(texts)
	twice := len(cidrs) == 2 && cidrs[0].Addr().Is4() == cidrs[1].Addr().Is4()
	f.check(ok && len(cidrs) <= 2 && !twice, "cluster-cidr", o.clusterCIDR,
		"a range such as 10.244.0.0/16, or one of each IP family separated by a comma")
	return cidrs
}

func (o *options) nodePorts(f *faults) proxier.NodePorts {
	if len(o.nodePortAddresses) == 0 { // kube-proxy's defaults
		return proxier.NodePorts{Primary: o.mode() == modeNFTables || o.mode() == modeEBPF}
	}
	var n proxier.NodePorts
	ranges := slices.DeleteFunc(slices.Clone(o.nodePortAddresses), func(text string) bool {
		switch text {
		case primary:
			n.Primary = true
		case loopback:
			n.Localhost = true
		case everywhere:
			n.Addresses = []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
		default:
			return false
		}
		return true
	})
	addresses, ok := parsePrefixes(ranges)
	f.check(ok, "nodeport-addresses", strings.Join(o.nodePortAddresses, ","), "ranges such as 192.0.2.0/24, primary, localhost or all")
	n.Addresses = append(n.Addresses, addresses...)
	return n
}

// socketsAtLocalhost reports whether sockets serve node ports at localhost if
// --nodeport-addresses has it. Without --iptables-localhost-nodeports, which forbids what a
// range would allow, the word localhost asks for them.
func (o *options) socketsAtLocalhost() bool {
	return o.kernelMode() != modeIPTables || o.localhostNodePorts || slices.Contains(o.nodePortAddresses, loopback)
}

// parsePrefixes parses CIDRs as those of API objects. Host bits are ignored.
func parsePrefixes(texts []string) ([]netip.Prefix, bool) {
	return parseAll(texts, changetracker.ParsePrefix)
}

// parseAll parses texts. It returns nothing if one is wrong.
func parseAll[T any](texts []string, parse func(string) (T, bool)) (all []T, ok bool) {
	for _, text := range texts {
		value, ok := parse(text)
		if !ok {
			return nil, false
		}
		all = append(all, value)
	}
	return all, true
}
