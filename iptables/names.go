package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"net/netip"
	"strings"

	"github.com/serviceplane/serviceplane/changetracker"
)

// maxChainName is XT_EXTENSION_MAXNAMELEN (29) of linux/netfilter/x_tables.h, less
// the terminating NUL.
const maxChainName = 28

// kubePrefix is that of kube-proxy's chains.
const kubePrefix = "KUBE"

// chainNames are the names of one instance's chains. Those that kube-proxy has too
// are spelled as it does.
type chainNames struct{ prefix string }

// The fixed chains.
func (n chainNames) services() string    { return n.prefix + "-SERVICES" }
func (n chainNames) nodePorts() string   { return n.prefix + "-NODEPORTS" }
func (n chainNames) postrouting() string { return n.prefix + "-POSTROUTING" }
func (n chainNames) mark() string        { return n.prefix + "-MARK-MASQ" }
func (n chainNames) markNonPod() string  { return n.prefix + "-MARK-NON-POD" }
func (n chainNames) hairpin() string     { return n.prefix + "-HAIRPIN" }
func (n chainNames) forward() string     { return n.prefix + "-FORWARD" }
func (n chainNames) localnet() string    { return n.prefix + "-LOCALNET" }
func (n chainNames) health() string      { return n.prefix + "-HEALTH" }

// The chains of kube-proxy's userspace mode, for pods and other hosts, and for the
// node itself.
func (n chainNames) portalsContainer() string { return n.prefix + "-PORTALS-CONTAINER" }
func (n chainNames) portalsHost() string      { return n.prefix + "-PORTALS-HOST" }

// The trees behind the fixed chains.
func (n chainNames) vipTree() string      { return n.prefix + "-VIP-" }
func (n chainNames) nodePortTree() string { return n.prefix + "-NP-" }
func (n chainNames) hairpinTree() string  { return n.prefix + "-HP-" }
func (n chainNames) healthTree() string   { return n.prefix + "-HC-" }

// The chains of a service port: its endpoints under policy Cluster and Local, what
// comes from outside, what passes source ranges, and a single endpoint.
func (n chainNames) cluster(id string) string  { return n.object("SVC", id) }
func (n chainNames) local(id string) string    { return n.object("SVL", id) }
func (n chainNames) external(id string) string { return n.object("EXT", id) }
func (n chainNames) sources(id string) string  { return n.object("FW", id) }
func (n chainNames) group(id string) string    { return n.object("GRP", id) }
func (n chainNames) endpoint(id string, addr netip.AddrPort) string {
	return n.object("SEP", id+addr.String())
}

// object is the name of a chain of one object: as much of a hash as there is room
// for, and no more than kube-proxy has.
func (n chainNames) object(kind, id string) string {
	sum := sha256.Sum256([]byte(id))
	name := n.prefix + "-" + kind + "-"
	return name + base32.StdEncoding.EncodeToString(sum[:])[:min(16, maxChainName-len(name))]
}

// identity is what the hashes of a service port's chains are made of.
func identity(name changetracker.ServicePortName) string {
	return name.String() + strings.ToLower(string(name.Protocol))
}

// owns says whether a chain is this instance's, or that of a kube-proxy whose place
// it takes.
func (n chainNames) owns(chain string) bool {
	rest, ok := strings.CutPrefix(chain, n.prefix+"-")
	if !ok {
		return false
	}
	switch rest {
	case "SERVICES", "NODEPORTS", "POSTROUTING", "MARK-MASQ", "MARK-NON-POD", "HAIRPIN", "FORWARD", "LOCALNET", "HEALTH":
		return true
	case "EXTERNAL-SERVICES", "PROXY-FIREWALL", "PROXY-CANARY", "PORTALS-CONTAINER", "PORTALS-HOST",
		"NODEPORT-CONTAINER", "NODEPORT-HOST", "NODEPORT-NON-LOCAL",
		"NODE-PORT", "LOAD-BALANCER", "SOURCE-RANGES-FIREWALL", "IPVS-FILTER", "IPVS-OUT-FILTER": // the ipvs mode's
		return n.prefix == kubePrefix
	}
	for _, kind := range []string{"SVC-", "SVL-", "EXT-", "FW-", "SEP-", "GRP-", "VIP-", "NP-", "HP-", "HC-"} {
		if strings.HasPrefix(rest, kind) {
			return true
		}
	}
	return false
}
