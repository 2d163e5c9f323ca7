package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"net/netip"
	"strings"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/chainname"
)

// chainNames holds the names of one instance's chains. Chains that kube-proxy has too have
// its names.
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

// scratch is a chain that exists for a moment when the engine starts: see checkFeatures.
func (n chainNames) scratch() string { return n.prefix + "-SCRATCH" }

// The chains of kube-proxy's userspace mode: for pods and other hosts, and for the node
// itself.
func (n chainNames) portalsContainer() string { return n.prefix + "-PORTALS-CONTAINER" }
func (n chainNames) portalsHost() string      { return n.prefix + "-PORTALS-HOST" }

// The prefixes of the trees below the fixed chains.
func (n chainNames) vipTree() string      { return n.prefix + "-VIPS-" }
func (n chainNames) nodePortTree() string { return n.prefix + "-PORTS-" }
func (n chainNames) hairpinTree() string  { return n.prefix + "-SELF-" }
func (n chainNames) healthTree() string   { return n.prefix + "-CHECK-" }

// The chains of a service port: its endpoints under policy Cluster and Local, external
// traffic, source ranges, a group of endpoints, and one endpoint.
func (n chainNames) cluster(id string) string  { return n.object("SVC", id) }
func (n chainNames) local(id string) string    { return n.object("SVL", id) }
func (n chainNames) external(id string) string { return n.object("EXT", id) }
func (n chainNames) sources(id string) string  { return n.object("FW", id) }
func (n chainNames) group(id string) string    { return n.object("GRP", id) }
func (n chainNames) endpoint(id string, addr netip.AddrPort) string {
	return n.object("SEP", id+addr.String())
}

// object returns the name of a chain of one object. Its hash is as long as kube-proxy's,
// or shorter if the prefix is long.
func (n chainNames) object(kind, id string) string {
	name := n.prefix + "-" + kind + "-"
	return name + hashPrefix(id, min(chainname.KubeHash, chainname.MaxName-len(name)))
}

// hashPrefix returns the first characters of a hash.
func hashPrefix(text string, length int) string {
	sum := sha256.Sum256([]byte(text))
	return base32.StdEncoding.EncodeToString(sum[:])[:length]
}

// identity is the hashed text for the chains of a service port.
func identity(name changetracker.ServicePortName) string {
	return name.String() + strings.ToLower(string(name.Protocol))
}

// owns reports whether a chain belongs to this instance, or to a kube-proxy that it replaces.
func (n chainNames) owns(chain string) bool { return chainname.Owned(n.prefix, chain) }
