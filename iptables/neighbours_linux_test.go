package iptables

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// neighbours are rules as other programs create them: CRI-O's host ports, kubelet,
// kube-router, kube-vip, Docker, Calico and Antrea. <pod> stands for a pod's address, <at>
// for its address and port.
const neighbours = `*nat
:KUBE-MARK-MASQ - [0:0]
:KUBE-MARK-DROP - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-HOSTPORTS - [0:0]
:KUBE-HP-ABCDEFGHIJKLMN27 - [0:0]
:KUBE-ROUTER-HAIRPIN - [0:0]
:DOCKER - [0:0]
:cali-PREROUTING - [0:0]
:ANTREA-POSTROUTING - [0:0]
:SPL - [0:0]
-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000
-A PREROUTING -m comment --comment "kube hostport portals" -m addrtype --dst-type LOCAL -j KUBE-HOSTPORTS
-A OUTPUT -m comment --comment "kube hostport portals" -m addrtype --dst-type LOCAL -j KUBE-HOSTPORTS
-A KUBE-HOSTPORTS -p tcp -m comment --comment "web_default hostport 8081" -m tcp --dport 8081 -j KUBE-HP-ABCDEFGHIJKLMN27
-A KUBE-HP-ABCDEFGHIJKLMN27 -s <pod> -m comment --comment "web_default hostport 8081" -j KUBE-MARK-MASQ
-A KUBE-HP-ABCDEFGHIJKLMN27 -p tcp -m comment --comment "web_default hostport 8081" -m tcp -j DNAT --to-destination <at>
-A PREROUTING -j cali-PREROUTING
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -j ANTREA-POSTROUTING
-A POSTROUTING -j KUBE-ROUTER-HAIRPIN
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-ROUTER-INPUT - [0:0]
:KUBE-NWPLCY-ABCDEFGHIJKLMN27 - [0:0]
:KUBE-POD-FW-ABCDEFGHIJKLMN27 - [0:0]
:DOCKER-FORWARD - [0:0]
:ANTREA-FORWARD - [0:0]
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP
-A INPUT -j KUBE-ROUTER-INPUT
-A FORWARD -j DOCKER-FORWARD
-A FORWARD -j ANTREA-FORWARD
-A FORWARD -d <pod> -j KUBE-POD-FW-ABCDEFGHIJKLMN27
-A KUBE-POD-FW-ABCDEFGHIJKLMN27 -j KUBE-NWPLCY-ABCDEFGHIJKLMN27
COMMIT
*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-VIP-EGRESS - [0:0]
-A PREROUTING -j KUBE-VIP-EGRESS
COMMIT
`

// sharedNode is a node with rules of other programs, a pod with a host port, and a client.
type sharedNode struct {
	*world

	client *netns.NS
	hosts  []netip.AddrPort
}

func newSharedNode(t *testing.T, variant Variant, names proxier.Names) *sharedNode {
	t.Helper()
	w := &world{t, netnstest.New(t), variant, names}
	s := &sharedNode{w, netnstest.New(t), []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:8081"), netip.MustParseAddrPort("[2001:db8::1]:8081")}}
	pod := netnstest.New(t)
	netnstest.Connect(t, s.client, []string{"192.0.2.2/24", "2001:db8::2/64"}, w.ns, []string{"192.0.2.1/24", "2001:db8::1/64"})
	netnstest.Check(t, netns.Connect(
		netns.Plug{NS: pod, Link: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.244.0.2/24"), netip.MustParsePrefix("fd00:244::2/64")}},
		netns.Plug{NS: w.ns, Link: "pod0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.244.0.1/24"), netip.MustParsePrefix("fd00:244::1/64")}}))
	netnstest.Check(t, w.ns.Forward())
	netnstest.Check(t, pod.AddRoute(netip.MustParsePrefix("192.0.2.0/24"), netip.MustParseAddr("10.244.0.1")))
	netnstest.Check(t, pod.AddRoute(netip.MustParsePrefix("2001:db8::/64"), netip.MustParseAddr("fd00:244::1")))
	netnstest.Serve(t, pod, "pod", 8080)
	for family, replace := range map[v1.IPFamily][]string{
		v1.IPv4Protocol: {"<pod>", "10.244.0.2/32", "<at>", "10.244.0.2:8080"},
		v1.IPv6Protocol: {"<pod>", "fd00:244::2/128", "<at>", "[fd00:244::2]:8080"},
	} {
		tool := mustOpenTool(t, testConfig(t, w.ns, variant, family))
		mustRestore(t, tool, strings.TrimSuffix(strings.NewReplacer(replace...).Replace(neighbours), "\n"))
	}
	return s
}

// others returns the rules of all tables that do not belong to the instance.
func (s *sharedNode) others() string {
	n := chainNames{s.names.ChainPrefix}
	var all []string
	for _, program := range []string{"iptables", "ip6tables"} {
		for _, table := range []string{"nat", "filter", "mangle"} {
			for line := range strings.Lines(s.run(program+"-"+string(s.variant)+"-save", "-t", table)) {
				line, _, _ = strings.Cut(strings.TrimSpace(line), " [")
				chain, text, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(line, ":"), "-A "), " ")
				if !strings.HasPrefix(line, "#") && !n.owns(chain) && (!slices.Contains(builtInChains, chain) || !n.owns(rule(text).jumpsTo())) {
					all = append(all, program+" "+table+" "+line)
				}
			}
		}
	}
	return strings.Join(all, "\n")
}

// Rules of other programs stay exactly as they are, and CRI-O's host ports keep working.
func TestRulesOfOtherProgramsStay(t *testing.T) {
	instances := []proxier.Names{proxier.KubeProxyNames(), proxier.DefaultNames()}
	for _, name := range []string{"edge", "edge-fw", "kube", "docker"} {
		n, err := proxier.NamesFor(name)
		if err != nil {
			t.Fatal(err)
		}
		instances = append(instances, n)
	}
	for _, variant := range variants(t) {
		for _, names := range instances[:3] {
			t.Run(string(variant)+"/"+names.Instance, func(t *testing.T) {
				t.Parallel()
				s := newSharedNode(t, variant, names)
				for _, other := range instances {
					if other != names {
						_, stop := (&world{t, s.ns, variant, other}).startWith(some(3), func(c *Config) { c.RouteLocalnet = false })
						stop()
					}
				}
				before := s.others()
				check := func(after string) {
					t.Helper()
					if diff := gocmp.Diff(before, s.others()); diff != "" {
						t.Fatalf("rules of others (-before +after %s):\n%s", after, diff)
					}
					for _, host := range s.hosts {
						if a, err := netns.Ask(t.Context(), s.client, "tcp", host, netns.AskOptions{}); err != nil || a.Server != "pod" {
							t.Fatalf("host port %v after %s: %+v, %v, want a response of the pod", host, after, a, err)
						}
					}
				}
				check("nothing")
				p, stop := s.startWith(some(6))
				check("start")
				add(p, 6, 40)
				p.OnServiceDelete(proxiertest.Service("test", "web-1"))
				s.sync(p)
				check("a change")
				stop()
				_, stop = s.startWith(some(4), func(c *Config) { c.Portals = true })
				check("a start in another mode")
				stop()
				fresh, _ := s.start()
				if err := fresh.Cleanup(t.Context()); err != nil {
					t.Errorf("Cleanup = %v, want nil", err)
				}
				check("clean-up")
				s.nothingLeft()
			})
		}
	}
}

// nothingLeft checks that all chains of the instance are deleted, but one that others use.
func (s *sharedNode) nothingLeft() {
	s.t.Helper()
	n := chainNames{s.names.ChainPrefix}
	for line := range strings.Lines(s.save()) {
		chain, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), ":"), " ")
		if n.owns(chain) && chain != "KUBE-MARK-MASQ" || n.owns(rule(line).jumpsTo()) && !strings.Contains(line, "KUBE-HP-") {
			s.t.Errorf("left after clean-up: %s", line)
		}
	}
}
