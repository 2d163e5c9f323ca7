package packetcost

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// The rules of kube-proxy 1.37 for Services of one TCP and one UDP port each, as far as packets of
// these benchmarks pass them. podRange is its clusterCIDR.
const podRange = "10.244.0.0/16"

func feed(b *testing.B, host *proxiertest.Host, input, program string, args ...string) {
	b.Helper()
	netnstest.Check(b, host.Do(func() error {
		c := exec.CommandContext(b.Context(), program, args...)
		c.Stdin = strings.NewReader(input)
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %.500s", program, err, out)
		}
		return nil
	}))
}

// likeIPTables programs the rules of its mode iptables: all ClusterIPs are in one chain.
func likeIPTables(restore string) func(*testing.B, *road) {
	return func(b *testing.B, r *road) {
		b.Helper()
		var chains, services, rules, external, nodePorts strings.Builder
		for i, s := range r.services {
			for _, protocol := range s.protocols() {
				id := fmt.Sprintf("%d-%s", i, protocol)
				fmt.Fprintf(&chains, ":KUBE-SVC-%s - [0:0]\n", id)
				fmt.Fprintf(&services, "-A KUBE-SERVICES -d %s/32 -p %s -m %s --dport %d -j KUBE-SVC-%s\n", s.clusterIP, protocol, protocol, servicePort, id)
				fmt.Fprintf(&rules, "-A KUBE-SVC-%s ! -s %s -d %s/32 -p %s -m %s --dport %d -j KUBE-MARK-MASQ\n", id, podRange, s.clusterIP, protocol, protocol, servicePort)
				for n, endpoint := range r.endpoints {
					fmt.Fprintf(&chains, ":KUBE-SEP-%s-%d - [0:0]\n", id, n)
					choice := ""
					if left := len(r.endpoints) - n; left > 1 {
						choice = fmt.Sprintf("-m statistic --mode random --probability %.10f ", 1/float64(left))
					}
					fmt.Fprintf(&rules, "-A KUBE-SVC-%s %s-j KUBE-SEP-%s-%d\n", id, choice, id, n)
					fmt.Fprintf(&rules, "-A KUBE-SEP-%s-%d -s %s/32 -j KUBE-MARK-MASQ\n", id, n, endpoint.Addr())
					fmt.Fprintf(&rules, "-A KUBE-SEP-%s-%d -p %s -m %s -j DNAT --to-destination %s\n", id, n, protocol, protocol, endpoint)
				}
				if s.isMeasured() {
					fmt.Fprintf(&chains, ":KUBE-EXT-%s - [0:0]\n", id)
					fmt.Fprintf(&rules, "-A KUBE-EXT-%s -j KUBE-MARK-MASQ\n-A KUBE-EXT-%s -j KUBE-SVC-%s\n", id, id, id)
					fmt.Fprintf(&external, "-A KUBE-SERVICES -d %s/32 -p %s -m %s --dport %d -j KUBE-EXT-%s\n", s.loadBalancer, protocol, protocol, servicePort, id)
					fmt.Fprintf(&nodePorts, "-A KUBE-NODEPORTS -p %s -m %s --dport %d -j KUBE-EXT-%s\n", protocol, protocol, nodePort, id)
				}
			}
		}
		feed(b, r.world.Node, `*filter
:KUBE-FORWARD - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-NODEPORTS - [0:0]
-A INPUT -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL
-A INPUT -j KUBE-NODEPORTS
-A INPUT -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES
-A FORWARD -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL
-A FORWARD -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -j KUBE-SERVICES
-A FORWARD -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES
-A OUTPUT -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL
-A OUTPUT -m conntrack --ctstate NEW -j KUBE-SERVICES
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
`+chains.String()+`-A PREROUTING -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
`+services.String()+external.String()+"-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n"+nodePorts.String()+rules.String()+"COMMIT\n", restore)
	}
}

// likeNFTables programs the rules of its mode nftables: a map of all ClusterIPs leads to a chain of
// each service port, which has the endpoints in a map, or a single one in its rule.
func likeNFTables(b *testing.B, r *road) {
	b.Helper()
	var text, clusterIPs, hairpins, ips, ports strings.Builder
	address := func(all *strings.Builder, ip netip.Addr, protocol, chain string) {
		fmt.Fprintf(all, "%s . %s . %d : goto %s,\n", ip, protocol, servicePort, chain)
	}
	for _, endpoint := range r.endpoints {
		for _, protocol := range []string{"tcp", "udp"} {
			fmt.Fprintf(&hairpins, "%s . %s . %s . %d,\n", endpoint.Addr(), endpoint.Addr(), protocol, endpoint.Port())
		}
	}
	for i, s := range r.services {
		fmt.Fprintf(&clusterIPs, "%s,\n", s.clusterIP)
		for _, protocol := range s.protocols() {
			id := fmt.Sprintf("%d-%s", i, protocol)
			address(&ips, s.clusterIP, protocol, "service-"+id)
			to := "to " + r.endpoints[0].String()
			if len(r.endpoints) > 1 {
				var choices []string
				for n, endpoint := range r.endpoints {
					choices = append(choices, fmt.Sprintf("%d : %s . %d", n, endpoint.Addr(), endpoint.Port()))
				}
				to = fmt.Sprintf("ip addr . port to numgen random mod %d map { %s }", len(choices), strings.Join(choices, ", "))
			}
			fmt.Fprintf(&text, "chain service-%s { meta l4proto %s dnat %s; }\n", id, protocol, to)
			if s.isMeasured() {
				fmt.Fprintf(&text, "chain external-%s { meta mark set meta mark or 0x4000; goto service-%s; }\n", id, id)
				address(&ips, s.loadBalancer, protocol, "external-"+id)
				fmt.Fprintf(&ports, "%s . %d : goto external-%s,\n", protocol, nodePort, id)
			}
		}
	}
	feed(b, r.world.Node, `table ip kube-proxy {
set cluster-ips { type ipv4_addr; elements = { `+clusterIPs.String()+` } }
set nodeport-ips { type ipv4_addr; elements = { `+nodeAddr(r).String()+` } }
set hairpin-connections { type ipv4_addr . ipv4_addr . inet_proto . inet_service; elements = { `+hairpins.String()+` } }
map no-endpoint-services { type ipv4_addr . inet_proto . inet_service : verdict; }
map no-endpoint-nodeports { type inet_proto . inet_service : verdict; }
map firewall-ips { type ipv4_addr . inet_proto . inet_service : verdict; }
chain masquerading {
meta mark & 0x4000 != 0 meta mark set meta mark xor 0x4000 masquerade fully-random;
ct status dnat ip saddr . ip daddr . meta l4proto . th dport @hairpin-connections masquerade fully-random;
}
`+text.String()+`map service-ips { type ipv4_addr . inet_proto . inet_service : verdict; elements = { `+ips.String()+` } }
map service-nodeports { type inet_proto . inet_service : verdict; elements = { `+ports.String()+` } }
chain services {
ip daddr @cluster-ips ip saddr != `+podRange+` meta mark set meta mark or 0x4000;
ip daddr . meta l4proto . th dport vmap @service-ips;
ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports;
}
chain service-endpoints-check { ip daddr . meta l4proto . th dport vmap @no-endpoint-services; }
chain nodeport-endpoints-check { ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports; }
chain firewall-check { ip daddr . meta l4proto . th dport vmap @firewall-ips; }
chain cluster-ips-check { ip daddr @cluster-ips reject; }
chain filter-prerouting-pre-dnat { type filter hook prerouting priority -110; ct state new jump firewall-check; }
chain filter-output-pre-dnat { type filter hook output priority -110; ct state new jump firewall-check; }
chain filter-input { type filter hook input priority 0; ct state new jump nodeport-endpoints-check; ct state new jump service-endpoints-check; }
chain filter-forward { type filter hook forward priority 0; ct state new jump service-endpoints-check; ct state new jump cluster-ips-check; }
chain filter-output { type filter hook output priority 0; ct state new jump service-endpoints-check; ct state new jump cluster-ips-check; }
chain nat-prerouting { type nat hook prerouting priority -100; jump services; }
chain nat-output { type nat hook output priority -100; jump services; }
chain nat-postrouting { type nat hook postrouting priority 100; jump masquerading; }
}
`, "nft", "-f", "-")
}
