//go:build linux

package iptables

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// update makes the test write the golden files instead of comparing.
var update = flag.Bool("update", false, "rewrite the golden files")

// goldenCase is one Service, and the node that programs it.
type goldenCase struct {
	about    string
	config   Config
	family   v1.IPFamily
	globals  desired.Globals
	resolver desired.Resolver
	protocol v1.Protocol

	port      changetracker.ServicePort
	endpoints []changetracker.Endpoint
}

// golden is a case over IPv4, with the default names and pods detected by CIDR.
func golden(about string, change ...func(*goldenCase)) goldenCase {
	c := goldenCase{
		about: about, family: v1.IPv4Protocol, protocol: v1.ProtocolTCP, resolver: desired.Resolver{Node: changetracker.Node{Name: "here"}},
		globals: desired.Globals{
			NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		},
		port: changetracker.ServicePort{ClusterIP: netip.MustParseAddr("10.96.0.10"), Port: 80},
	}
	for _, f := range change {
		f(&c)
	}
	c.config = c.config.WithDefaults()
	c.resolver.DetectsPods = c.globals.DetectsPods()
	return c
}

// The parts that cases are made of.

func endpointsAt(node string, numbers ...byte) func(*goldenCase) {
	return func(c *goldenCase) {
		for _, n := range numbers {
			addr := netip.AddrFrom4([4]byte{10, 244, 0, n})
			if c.family == v1.IPv6Protocol {
				addr = netip.AddrFrom16([16]byte{0xfd, 0, 2, 0x44, 15: n})
			}
			c.endpoints = append(c.endpoints, changetracker.Endpoint{
				Addr: netip.AddrPortFrom(addr, 8080), Ready: true, Serving: true, Node: node,
			})
		}
	}
}

func remotes(numbers ...byte) func(*goldenCase) { return endpointsAt("there", numbers...) }

// weights gives the endpoints their weights.
func weights(list ...uint16) func(*goldenCase) {
	return func(c *goldenCase) {
		for i := range c.endpoints {
			c.endpoints[i].Weight = list[i]
		}
	}
}

func locals(numbers ...byte) func(*goldenCase) { return endpointsAt("here", numbers...) }

func manyRemotes(n byte) func(*goldenCase) {
	var numbers []byte
	for i := range n {
		numbers = append(numbers, i+1)
	}
	return remotes(numbers...)
}

// everywhere adds addresses of all kinds to the Service.
func everywhere(c *goldenCase) {
	c.port.NodePort = 30080
	c.port.ExternalIPs = []netip.Addr{netip.MustParseAddr("192.0.2.20")}
	c.port.LoadBalancerVIPs = []netip.Addr{netip.MustParseAddr("203.0.113.1")}
	if c.family == v1.IPv6Protocol {
		c.port.ExternalIPs = []netip.Addr{netip.MustParseAddr("2001:db8::20")}
		c.port.LoadBalancerVIPs = []netip.Addr{netip.MustParseAddr("2001:db8:1::1")}
	}
}

func portals(c *goldenCase) { c.config.Portals = true }

func nodePort(c *goldenCase) { c.port.NodePort = 30080 }

func internalLocal(c *goldenCase) { c.port.InternalPolicyLocal = true }

func externalLocal(c *goldenCase) { c.port.ExternalPolicyLocal = true }

func sourceRanges(c *goldenCase) {
	everywhere(c)
	c.port.LoadBalancerSourceRanges = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("203.0.113.128/25")}
	if c.family == v1.IPv6Protocol {
		c.port.LoadBalancerSourceRanges = []netip.Prefix{netip.MustParsePrefix("2001:db8:2::/48")}
	}
}

func denyAll(c *goldenCase) { everywhere(c); c.port.DenyAllSources = true }

func affinity(c *goldenCase) { c.port.SessionAffinity = 3 * time.Hour }

func health(c *goldenCase) { externalLocal(c); everywhere(c); c.port.HealthCheckNodePort = 32000 }

func udp(c *goldenCase) { c.protocol = v1.ProtocolUDP }

func sctp(c *goldenCase) { c.protocol = v1.ProtocolSCTP }

// v6 must precede all options with addresses.
func v6(c *goldenCase) {
	c.family = v1.IPv6Protocol
	c.port.ClusterIP = netip.MustParseAddr("fd00:96::10")
	c.globals.NodePortAddresses = []netip.Prefix{netip.MustParsePrefix("::/0")}
	c.globals.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("fd00:244::/32")}
}

func kubeNames(c *goldenCase) { c.config.Names = proxier.KubeProxyNames() }

func podsByInterface(c *goldenCase) { c.globals.PodCIDRs, c.globals.PodInterface = nil, "cali*" }

func podsUnknown(c *goldenCase) { c.globals.PodCIDRs = nil }

func masqueradeAll(c *goldenCase) { c.resolver.MasqueradeAll = true }

func keepInvalid(c *goldenCase) { c.config.KeepInvalid = true }

func localhost(c *goldenCase) { c.config.RouteLocalnet = true }

func acceptOn(ranges ...string) func(*goldenCase) {
	return func(c *goldenCase) {
		c.globals.NodePortAddresses = nil
		for _, r := range ranges {
			c.globals.NodePortAddresses = append(c.globals.NodePortAddresses, netip.MustParsePrefix(r))
		}
	}
}

// goldenCases are the cases by the name of their file.
func goldenCases() map[string]goldenCase {
	return map[string]goldenCase{
		"clusterip":              golden("A cluster IP; pods keep their source (PKT-01, PKT-03).", remotes(1, 2, 3)),
		"clusterip-kube":         golden("The same with kube-proxy's names: each endpoint has a chain.", remotes(1, 2, 3), kubeNames),
		"clusterip-v6":           golden("The same over IPv6.", v6, remotes(1, 2, 3)),
		"masquerade-all":         golden("All sources of a cluster IP are masqueraded.", masqueradeAll, remotes(1)),
		"no-endpoints":           golden("Without endpoints all addresses refuse (PKT-09, PKT-26).", everywhere),
		"no-endpoints-v6":        golden("Without endpoints all addresses refuse, over IPv6.", v6, everywhere),
		"internal-local":         golden("internalTrafficPolicy Local takes this node's endpoint (PKT-07).", internalLocal, remotes(1), locals(2)),
		"internal-local-none":    golden("internalTrafficPolicy Local without one here drops (PKT-08).", internalLocal, remotes(1)),
		"external-cluster":       golden("All kinds of addresses, policy Cluster: what comes from outside is masqueraded (PKT-20).", everywhere, remotes(1), locals(2)),
		"external-cluster-v6":    golden("All kinds of addresses, policy Cluster, over IPv6.", v6, everywhere, remotes(1), locals(2)),
		"external-cluster-kube":  golden("All kinds of addresses with kube-proxy's names.", everywhere, remotes(1), locals(2), kubeNames),
		"external-local":         golden("Policy Local with an endpoint here: the source stays; pods and the node take any (PKT-21, PKT-23, PKT-25).", externalLocal, everywhere, remotes(1), locals(2)),
		"external-local-v6":      golden("Policy Local with an endpoint here, over IPv6.", v6, externalLocal, everywhere, remotes(1), locals(2)),
		"external-local-none":    golden("Policy Local with endpoints elsewhere: dropped, but not for pods and the node (PKT-22).", externalLocal, everywhere, remotes(1)),
		"external-local-nothing": golden("Policy Local without any endpoint: refused.", externalLocal, everywhere),
		"source-ranges":          golden("Only the source ranges reach the load balancer address; other addresses are open.", sourceRanges, remotes(1)),
		"source-ranges-v6":       golden("Source ranges over IPv6.", v6, sourceRanges, remotes(1)),
		"source-ranges-none":     golden("Source ranges without endpoints: refused for those in it, dropped for others.", sourceRanges),
		"source-ranges-local":    golden("Source ranges and policy Local.", sourceRanges, externalLocal, remotes(1), locals(2)),
		"deny-all-sources":       golden("No source may reach the load balancer address.", denyAll, remotes(1)),
		"affinity":               golden("Session affinity: a client goes where it went before.", affinity, remotes(1, 2)),
		"affinity-v6":            golden("Session affinity over IPv6.", v6, affinity, remotes(1, 2)),
		"sixteen-endpoints":      golden("As many endpoints as a chain draws from.", manyRemotes(16)),
		"forty-endpoints":        golden("More endpoints than a chain draws from: groups.", manyRemotes(40)),
		"forty-endpoints-kube":   golden("Groups, with a chain for each endpoint.", manyRemotes(40), kubeNames),
		"weights":                golden("Endpoints with weights 1, 2 and 5.", remotes(1, 2, 3), weights(1, 2, 5)),
		"hairpin":                golden("Endpoints here that may come back to themselves.", remotes(1), locals(2, 3)),
		"hairpin-v6":             golden("Endpoints here that may come back to themselves, over IPv6.", v6, remotes(1), locals(2, 3)),
		"udp":                    golden("UDP.", udp, everywhere, remotes(1, 2)),
		"sctp":                   golden("SCTP.", sctp, everywhere, remotes(1, 2)),
		"health":                 golden("The health check node port is let in.", health, remotes(1), locals(2)),
		"pods-by-interface":      golden("Pods are detected by a prefix of their interfaces' names.", podsByInterface, externalLocal, everywhere, remotes(1), locals(2)),
		"pods-unknown":           golden("Pods cannot be detected (PKT-04).", podsUnknown, externalLocal, everywhere, remotes(1), locals(2)),
		"node-port-ranges":       golden("Node ports on addresses of some ranges only, one of them loopback.", nodePort, acceptOn("127.0.0.0/8", "192.0.2.0/24"), remotes(1)),
		"node-port-none":         golden("Node ports on no address.", nodePort, acceptOn(), remotes(1)),
		"node-port-localhost":    golden("Node ports on loopback addresses too; other hosts cannot reach these.", nodePort, localhost, remotes(1)),
		"node-port-v6":           golden("Node ports over IPv6, never on loopback.", v6, nodePort, localhost, remotes(1)),
		"portals":                golden("Sockets refuse who comes past the portals, and not who was led to them.", portals, remotes(1)),
		"portals-kube":           golden("Portals with kube-proxy's names: its chains of the userspace mode.", portals, kubeNames, remotes(1)),
		"keep-invalid":           golden("Packets out of order are forwarded.", keepInvalid, remotes(1)),
	}
}

// rules returns the input of iptables-restore, with a heading.
func (c *goldenCase) rules(t *testing.T) string {
	t.Helper()
	name := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "test", Name: "web"}, Port: "http", Protocol: c.protocol}
	tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{c.family}, Node: c.resolver.Node})
	if err != nil {
		t.Fatalf("new tracker: %v", err)
	}
	c.port.Name = name
	if _, err := tracker.Services.Set(name.NamespacedName, c.port); err != nil {
		t.Fatalf("set service: %v", err)
	}
	if _, err := tracker.Endpoints.Set(name, c.endpoints...); err != nil {
		t.Fatalf("set endpoints: %v", err)
	}
	u := &desired.Update{Family: c.family, Full: true, Globals: c.globals}
	err = tracker.Apply(c.family, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		state := delta.After
		s, ok := c.resolver.Resolve(state, name)
		if !ok {
			t.Fatal("the service is not resolved")
		}
		u.Changes = append(u.Changes, desired.Change{Name: name, After: s})
		return nil, nil
	})
	if err != nil {
		t.Fatalf("apply: %v", err)
	}
	return "# " + c.about + "\n" + plan(&c.config, c.family, u)
}

func TestRulesOfEachBehaviour(t *testing.T) {
	cases := goldenCases()
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			file, got := filepath.Join("testdata", "golden", name+".rules"), c.rules(t)
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("rules (-golden +got), -update rewrites them:\n%s", diff)
			}
		})
	}
	files, err := filepath.Glob(filepath.Join("testdata", "golden", "*.rules"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if _, ok := cases[strings.TrimSuffix(filepath.Base(file), ".rules")]; !ok {
			t.Errorf("%s has no case", file)
		}
	}
}

// Saved rules equal restored rules, so that the engine can compare rules as text.
func TestSavedRulesEqualRestoredRules(t *testing.T) {
	for _, variant := range []Variant{VariantNFT, VariantLegacy} {
		t.Run(string(variant), func(t *testing.T) {
			tools := map[v1.IPFamily]*tool{}
			home := netnstest.New(t)
			for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
				var err error
				tools[family], err = openTool(t.Context(), toolConfig{
					family: family, netNS: home.Path(), variant: variant, lockWait: defaultLockWait, timeout: defaultTimeout,
				})
				if err != nil {
					t.Fatalf("open programs: %v", err)
				}
			}
			for name, c := range goldenCases() {
				t.Run(name, func(t *testing.T) { checkRoundTrip(t, *tools[c.family], &c) })
			}
		})
	}
}

// checkRoundTrip loads a golden file in a new network namespace, and compares the tables.
func checkRoundTrip(t *testing.T, programs tool, c *goldenCase) {
	t.Helper()
	programs.config.netNS = netnstest.New(t).Path()
	input, err := os.ReadFile(filepath.Join("testdata", "golden", filepath.Base(t.Name())+".rules"))
	if err != nil {
		t.Fatal(err)
	}
	if err := programs.restore(t.Context(), input); err != nil {
		t.Fatalf("restore: %v", err)
	}
	for _, table := range []string{tableNAT, tableFilter} {
		text, err := programs.save(t.Context(), table)
		if err != nil {
			t.Fatalf("save %s: %v", table, err)
		}
		got, err := parse(text, chainNames{c.config.Names.ChainPrefix}.owns)
		if err != nil {
			t.Fatalf("parse %s: %v", table, err)
		}
		want := goldenTable(t, string(input), table, chainNames{c.config.Names.ChainPrefix})
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(observed{}, jump{})); diff != "" {
			t.Errorf("table %s (-written +read back):\n%s", table, diff)
		}
	}
}

// goldenTable returns the rules after loading one table of a golden file. The rule inserted
// first is the last one.
func goldenTable(t *testing.T, text, table string, names chainNames) observed {
	t.Helper()
	_, rest, _ := strings.Cut(text, "*"+table+"\n")
	part, _, ok := strings.Cut(rest, "COMMIT\n")
	if !ok {
		t.Fatalf("no table %s in:\n%s", table, text)
	}
	o, err := parse([]byte(part), names.owns)
	if err != nil {
		t.Fatalf("parse: %v", err)
	}
	byChain := map[string][]jump{}
	for line := range strings.Lines(part) {
		if rest, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "-I "); ok {
			chain, r, _ := strings.Cut(rest, " 1 ")
			byChain[chain] = append(byChain[chain], jump{chain, rule(r).jumpsTo(), rule(r)})
		}
	}
	for _, hook := range []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"} {
		slices.Reverse(byChain[hook])
		o.jumps = append(o.jumps, byChain[hook]...)
	}
	return o
}
