package iptables

import (
	"net/netip"
	"strconv"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/chainname"
	"github.com/serviceplane/serviceplane/proxier"
)

func portName(namespace, name, port string) changetracker.ServicePortName {
	return changetracker.ServicePortName{
		NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}, Port: port, Protocol: v1.ProtocolTCP,
	}
}

// TestKubeProxysNames: other programs compute these names.
func TestKubeProxysNames(t *testing.T) {
	n := chainNames{proxier.KubeProxyNames().ChainPrefix}
	one, four := identity(portName("ns1", "svc1", "p80")), identity(portName("ns4", "svc4", "p80"))
	for got, want := range map[string]string{
		n.cluster(one): "KUBE-SVC-XPGD46QRK7WJZT7O", n.external(one): "KUBE-EXT-XPGD46QRK7WJZT7O",
		n.local(one): "KUBE-SVL-XPGD46QRK7WJZT7O", n.sources(one): "KUBE-FW-XPGD46QRK7WJZT7O",
		n.cluster(four): "KUBE-SVC-4SW47YFZTEDKD3PK",
		n.endpoint(four, netip.MustParseAddrPort("10.180.0.4:80")): "KUBE-SEP-UKSFD7AGPMPPLUHC",
		n.services(): "KUBE-SERVICES", n.nodePorts(): "KUBE-NODEPORTS", n.postrouting(): "KUBE-POSTROUTING", n.mark(): "KUBE-MARK-MASQ",
	} {
		if got != want {
			t.Errorf("name %s, want %s", got, want)
		}
	}
}

func TestNamesFitTheKernelWithAnyPrefix(t *testing.T) {
	for _, prefix := range []string{"KUBE", "SPL", "LONGEST8", "LONGEST_POS"} {
		n := chainNames{prefix}
		for _, name := range []string{n.cluster("x"), n.endpoint("x", netip.AddrPort{}), n.group("x"), n.markNonPod(), n.postrouting()} {
			if len(name) > chainname.MaxName || !n.owns(name) {
				t.Errorf("%s: %d bytes, ours %v, want %d at most, and ours", name, len(name), n.owns(name), chainname.MaxName)
			}
		}
	}
}

// TestOwnedChains: similar names of other programs are not owned.
func TestOwnedChains(t *testing.T) {
	for _, owner := range []struct {
		of     string
		prefix string
		ours   bool
		chains []string
	}{
		{"us and kube-proxy", "KUBE", true, []string{
			"KUBE-SERVICES", "KUBE-SVC-XPGD46QRK7WJZT7O", "KUBE-SEP-UKSFD7AGPMPPLUHC", "KUBE-XLB-XPGD46QRK7WJZT7O", "KUBE-PROXY-FIREWALL",
			"KUBE-EXTERNAL-SERVICES", "KUBE-PROXY-CANARY", "KUBE-PORTALS-CONTAINER", "KUBE-PORTALS-HOST", "KUBE-NODEPORT-NON-LOCAL",
			"KUBE-IPVS-FILTER", "KUBE-LOAD-BALANCER", "KUBE-VIPS-1A", "KUBE-VIPS-0A600001-1005", "KUBE-PORTS-178", "KUBE-SELF-1A", "KUBE-CHECK-17",
		}},
		{"CRI-O and dockershim", "KUBE", false, []string{"KUBE-HOSTPORTS", "KUBE-HP-XPGD46QRK7WJZT7O", "CRIO-HOSTPORTS-MASQ"}},
		{"kubelet", "KUBE", false, []string{"KUBE-FIREWALL", "KUBE-KUBELET-CANARY", "KUBE-IPTABLES-HINT", "KUBE-MARK-DROP"}},
		{"kube-router", "KUBE", false, []string{
			"KUBE-ROUTER-INPUT", "KUBE-ROUTER-SERVICES", "KUBE-NWPLCY-DEFAULT", "KUBE-NWPLCY-XPGD46QRK7WJZT7O", "KUBE-POD-FW-XPGD46QRK7WJZT7O",
		}},
		{"kube-vip", "KUBE", false, []string{"KUBE-VIP-EGRESS", "KUBE-VIPS-EGRESS"}},
		{"unknown programs", "KUBE", false, []string{
			"KUBE-SVC-X", "KUBE-SVC-XPGD46QRK7WJZT7OA", "KUBE-SVC-xpgd46qrk7wjzt7o", "KUBE-SVC-XPGD46QRK7WJZT71", "KUBE-FW-POLICY", "KUBE-SERVICES-2",
			"KUBE-PORTS-9", "KUBE-PORTS-", "KUBE-CHECK-1FFFFF", "KUBE-VIPS-1A-17", "KUBE-VIPS-", "KUBE-", "KUBE", "KUBEX-SERVICES",
		}},
		{"CNI plugins, Docker, Calico, Antrea, the kernel", "KUBE", false, []string{
			"CNI-HOSTPORT-DNAT", "DOCKER", "DOCKER-FORWARD", "cali-PREROUTING", "ANTREA-FORWARD", "PREROUTING",
		}},
		{"other instances", "KUBE", false, []string{"SPL-SERVICES", "SPL_KUBE-SERVICES"}},
		{"kube-proxy", "SPL", false, []string{"SPL-EXTERNAL-SERVICES", "SPL-PROXY-CANARY", "SPL-XLB-XPGD46QRK7WJZT7O", "KUBE-SERVICES"}},
	} {
		for _, chain := range owner.chains {
			if got := (chainNames{owner.prefix}).owns(chain); got != owner.ours {
				t.Errorf("%s, of %s: is ours with prefix %s: %v, want %v", chain, owner.of, owner.prefix, got, owner.ours)
			}
		}
	}
}

// everyName returns chains of all forms that an instance can have.
func everyName(n chainNames) []string {
	all := []string{
		n.services(), n.nodePorts(), n.postrouting(), n.mark(), n.markNonPod(), n.hairpin(), n.forward(), n.localnet(), n.health(),
	}
	for i := range 20 {
		id := strconv.Itoa(i)
		all = append(all, n.cluster(id), n.local(id), n.external(id), n.sources(id), n.group(id), n.endpoint(id, netip.AddrPort{}))
	}
	for _, addr := range []string{"10.96.0.1", "255.255.255.255", "fd00:96::1234:5678"} {
		key := desired.Key{VIP: netip.MustParseAddr(addr), Protocol: desired.SCTP, Port: 65535}
		for _, prefix := range []string{n.vipTree(), n.hairpinTree()} {
			t := newTree("", prefix, key.VIP.BitLen())
			for depth := range t.digits() {
				all = append(all, t.name(key, depth))
			}
		}
		for _, prefix := range []string{n.nodePortTree(), n.healthTree()} {
			t := newTree("", prefix, 0)
			for depth := range t.digits() {
				all = append(all, t.name(key, depth))
			}
		}
	}
	return all
}

// Instances share no names, for any two names of instances and any form of name.
func TestInstancesShareNoNames(t *testing.T) {
	instances := []proxier.Names{proxier.DefaultNames(), proxier.KubeProxyNames()}
	words := []string{
		"edge", "edge-fw", "edge-f", "edgefw", "kube", "docker", "spl", "cni", "ipvs", "a-ipvs", "vips", "ports", "self", "check", "portals",
		"svc", "svl", "ext", "fw", "sep", "grp", "health", "mark", "forward", "abcdefg", "a-b-c-d",
	}
	for _, a := range "aF01-" {
		words = append(words, string(a))
		for _, b := range "aF01-" {
			words = append(words, string(a)+string(b), string(a)+"-"+string(b), string(a)+"--"+string(b))
		}
	}
	for _, word := range words {
		if n, err := proxier.NamesFor(word); err == nil {
			instances = append(instances, n)
		}
	}
	taken := map[string]string{}
	for _, one := range instances {
		names := everyName(chainNames{one.ChainPrefix})
		for _, other := range instances {
			for _, name := range names {
				if owns := (chainNames{other.ChainPrefix}).owns(name); owns != (one == other) {
					t.Errorf("%s of %s: owned by %s: %v", name, one.Instance, other.Instance, owns)
				}
			}
		}
		for _, name := range []string{"table " + one.Table, "table " + one.Table + ".ipvs", "device " + one.Device} {
			if by, ok := taken[name]; ok {
				t.Errorf("%s is of %s and %s", name, by, one.Instance)
			}
			taken[name] = one.Instance
		}
	}
}
