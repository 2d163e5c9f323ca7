// Package chainname knows the names of an instance's iptables chains, for the engine that writes them and
// for those that find them in a trace.
package chainname

import "strings"

// MaxName is XT_EXTENSION_MAXNAMELEN (29) of linux/netfilter/x_tables.h, less the terminating NUL.
const MaxName = 28

// KubePrefix is the prefix of kube-proxy's chains.
const KubePrefix = "KUBE"

// KubeHash is the length of the hash in kube-proxy's names.
const KubeHash = 16

const base32Chars = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"

// Owned reports whether a chain belongs to the instance with a prefix, or to a kube-proxy that it
// replaces. The prefix alone is not enough, because chains of other programs begin with
// "KUBE-" too: a fixed name must match completely, any other by its form.
func Owned(prefix, chain string) bool {
	rest, ok := strings.CutPrefix(chain, prefix+"-")
	if !ok {
		return false
	}
	switch rest {
	case "SERVICES", "NODEPORTS", "POSTROUTING", "MARK-MASQ", "MARK-NON-POD", "HAIRPIN", "FORWARD", "LOCALNET", "HEALTH", "SCRATCH":
		return true
	case "EXTERNAL-SERVICES", "PROXY-FIREWALL", "PROXY-CANARY", "PORTALS-CONTAINER", "PORTALS-HOST",
		"NODEPORT-CONTAINER", "NODEPORT-HOST", "NODEPORT-NON-LOCAL",
		"NODE-PORT", "LOAD-BALANCER", "SOURCE-RANGES-FIREWALL", "IPVS-FILTER", "IPVS-OUT-FILTER": // of the ipvs mode
		return prefix == KubePrefix
	}
	kind, id, _ := strings.Cut(rest, "-")
	room := MaxName - len(prefix+"-"+kind+"-")
	switch kind {
	case "XLB": // of kube-proxy before 1.24
		return prefix == KubePrefix && isHash(id, KubeHash)
	case "SVC", "SVL", "EXT", "FW", "SEP", "GRP":
		return isHash(id, min(KubeHash, room))
	case "VIPS", "SELF":
		addr, port, hasPort := strings.Cut(id, "-")
		return isHash(id, room) || isHex(addr) && (!hasPort || len(addr) == 32/DigitBits && isPort(port))
	case "PORTS", "CHECK":
		return isPort(id)
	}
	return false
}

func isHash(id string, length int) bool {
	return len(id) == length && strings.Trim(id, base32Chars) == ""
}

func isHex(text string) bool { return text != "" && strings.Trim(text, "0123456789ABCDEF") == "" }

// The digits of a key in a tree: DigitBits each of its address, from the end; one for the
// protocol; then PortDigits of the port, from its beginning.
const (
	DigitBits  = 4
	PortDigits = 16 / DigitBits
)

// isPort matches the end of a path in a tree: a digit for the protocol, and up to four for
// the port.
func isPort(text string) bool {
	return isHex(text) && len(text) <= 1+PortDigits && strings.Contains("123", text[:1])
}
