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

// kubePrefix is the prefix of kube-proxy's chains.
const kubePrefix = "KUBE"

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
	return name + hashPrefix(id, min(kubeHash, maxChainName-len(name)))
}

// kubeHash is the length of the hash in kube-proxy's names.
const kubeHash = 16

const base32Chars = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"

// hashPrefix returns the first characters of a hash.
func hashPrefix(text string, length int) string {
	sum := sha256.Sum256([]byte(text))
	return base32.StdEncoding.EncodeToString(sum[:])[:length]
}

// identity is the hashed text for the chains of a service port.
func identity(name changetracker.ServicePortName) string {
	return name.String() + strings.ToLower(string(name.Protocol))
}

// owns reports whether a chain belongs to this instance, or to a kube-proxy that it
// replaces. The prefix alone is not enough, because chains of other programs begin with
// "KUBE-" too: a fixed name must match completely, any other by its form.
func (n chainNames) owns(chain string) bool {
	rest, ok := strings.CutPrefix(chain, n.prefix+"-")
	if !ok {
		return false
	}
	switch rest {
	case "SERVICES", "NODEPORTS", "POSTROUTING", "MARK-MASQ", "MARK-NON-POD", "HAIRPIN", "FORWARD", "LOCALNET", "HEALTH", "SCRATCH":
		return true
	case "EXTERNAL-SERVICES", "PROXY-FIREWALL", "PROXY-CANARY", "PORTALS-CONTAINER", "PORTALS-HOST",
		"NODEPORT-CONTAINER", "NODEPORT-HOST", "NODEPORT-NON-LOCAL",
		"NODE-PORT", "LOAD-BALANCER", "SOURCE-RANGES-FIREWALL", "IPVS-FILTER", "IPVS-OUT-FILTER": // of the ipvs mode
		return n.prefix == kubePrefix
	}
	kind, id, _ := strings.Cut(rest, "-")
	room := maxChainName - len(n.prefix+"-"+kind+"-")
	switch kind {
	case "XLB": // of kube-proxy before 1.24
		return n.prefix == kubePrefix && isHash(id, kubeHash)
	case "SVC", "SVL", "EXT", "FW", "SEP", "GRP":
		return isHash(id, min(kubeHash, room))
	case "VIPS", "SELF":
		addr, port, hasPort := strings.Cut(id, "-")
		return isHash(id, room) || isHex(addr) && (!hasPort || len(addr) == v4Bits/digitBits && isPort(port))
	case "PORTS", "CHECK":
		return isPort(id)
	}
	return false
}

func isHash(id string, length int) bool {
	return len(id) == length && strings.Trim(id, base32Chars) == ""
}

func isHex(text string) bool { return text != "" && strings.Trim(text, "0123456789ABCDEF") == "" }

// The digits of a key in a tree: four bits each of its address, from the end; one for the
// protocol; then those of the port, from its beginning.
const (
	v4Bits, v6Bits = 32, 128
	digitBits      = 4
	portDigits     = 16 / digitBits
)

// isPort matches the end of a path in a tree: a digit for the protocol, and up to four for
// the port.
func isPort(text string) bool {
	return isHex(text) && len(text) <= 1+portDigits && strings.Contains("123", text[:1])
}
