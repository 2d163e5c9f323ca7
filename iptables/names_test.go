package iptables

import (
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

func portName(namespace, name, port string) changetracker.ServicePortName {
	return changetracker.ServicePortName{
		NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}, Port: port, Protocol: v1.ProtocolTCP,
	}
}

// TestKubeProxysNames are those that other software computes.
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
	for _, prefix := range []string{"KUBE", "SPL", "LONGEST8"} {
		n := chainNames{prefix}
		for _, name := range []string{n.cluster("x"), n.endpoint("x", netip.AddrPort{}), n.group("x"), n.markNonPod(), n.postrouting()} {
			if len(name) > maxChainName || !n.owns(name) {
				t.Errorf("%s: %d bytes, ours %v, want %d at most, and ours", name, len(name), n.owns(name), maxChainName)
			}
		}
	}
}

// TestWhatIsOurs: chains of others that begin alike are not.
func TestWhatIsOurs(t *testing.T) {
	for chain, want := range map[string]bool{
		"KUBE-SERVICES": true, "KUBE-SVC-X": true, "KUBE-PROXY-FIREWALL": true, "KUBE-EXTERNAL-SERVICES": true, "KUBE-PROXY-CANARY": true,
		"KUBE-PORTALS-CONTAINER": true, "KUBE-PORTALS-HOST": true, "KUBE-NODEPORT-NON-LOCAL": true,
		"KUBE-IPVS-FILTER": true, "KUBE-LOAD-BALANCER": true,
		"KUBE-FIREWALL": false, "KUBE-KUBELET-CANARY": false, "KUBE-IPTABLES-HINT": false, "KUBE-ROUTER-INPUT": false, "KUBE-HOSTPORTS": false,
		"CNI-HOSTPORT-DNAT": false, "SPL-SERVICES": false, "PREROUTING": false, "KUBEX-SVC-X": false, "KUBE-": false, "KUBE-NWPLCY-X": false,
	} {
		if got := (chainNames{"KUBE"}).owns(chain); got != want {
			t.Errorf("%s is ours: %v, want %v", chain, got, want)
		}
	}
	for _, chain := range []string{"SPL-EXTERNAL-SERVICES", "SPL-PROXY-CANARY"} {
		if (chainNames{"SPL"}).owns(chain) {
			t.Errorf("%s is ours, want it only with kube-proxy's names", chain)
		}
	}
}
