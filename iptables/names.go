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
func (n chainNames) vipTree() string      { return n.prefix + "-VIPS-" }
func (n chainNames) nodePortTree() string { return n.prefix + "-PORTS-" }
func (n chainNames) hairpinTree() string  { return n.prefix + "-SELF-" }
func (n chainNames) healthTree() string   { return n.prefix + "-CHECK-" }

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
	name := n.prefix + "-" + kind + "-"
	return name + hashed(id, min(kubeHash, maxChainName-len(name)))
}

// kubeHash is how much of a hash kube-proxy has in a name.
const kubeHash = 16

const base32Chars = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"

// hashed is the beginning of a hash.
func hashed(text string, length int) string {
	sum := sha256.Sum256([]byte(text))
	return base32.StdEncoding.EncodeToString(sum[:])[:length]
}

// identity is what the hashes of a service port's chains are made of.
func identity(name changetracker.ServicePortName) string {
	return name.String() + strings.ToLower(string(name.Protocol))
}

// owns says whether a chain is this instance's, or that of a kube-proxy whose place
// it takes. A beginning is not enough, since other programs' chains begin with "KUBE-"
// too: names that are fixed are ours as a whole, others if they have the form of ours.
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

// isPort is the end of a path in a tree: a digit for the protocol, and up to four of a
// port.
func isPort(text string) bool {
	return isHex(text) && len(text) <= 1+portDigits && strings.Contains("123", text[:1])
}
