package coexistence

import (
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// readers are the versions of nft that a node may have, by release.
func readers() map[string]string {
	return map[string]string{bullseye: "0.9.8", bookworm: "1.0.6", trixie: "1.1.3"}
}

// startAll runs an engine with Services of all kinds, so that all of its rules exist.
func (w *world) startAll() {
	w.t.Helper()
	p := w.start(w.engine)
	kinds := map[string][]proxiertest.ServiceOption{
		"affinity":  {proxiertest.ClientAffinity(time.Hour)},
		"external":  {proxiertest.ExternalIPs("198.18.0.1", "2001:db8:18::1"), proxiertest.ExternalPolicyLocal()},
		"ranges":    {proxiertest.LoadBalancer("198.18.0.2", "2001:db8:18::2"), proxiertest.SourceRanges("192.0.2.0/24", "2001:db8:2::/64")},
		"internal":  {proxiertest.InternalPolicyLocal()},
		"allranges": {proxiertest.LoadBalancer("198.18.0.3", "2001:db8:18::3"), proxiertest.SourceRanges("0.0.0.0/0", "::/0")},
		"empty":     {},
	}
	for i, kind := range slices.Sorted(maps.Keys(kinds)) {
		options := append(kinds[kind],
			proxiertest.ClusterIPs(clusterIP(place(20+i), v1.IPv4Protocol).String(), clusterIP(place(20+i), v1.IPv6Protocol).String()),
			proxiertest.NodePort("tcp", v1.ProtocolTCP, 80, 31000+int32(i)), proxiertest.NodePort("udp", v1.ProtocolUDP, 80, 31000+int32(i)),
			proxiertest.Port("sctp", v1.ProtocolSCTP, 80))
		p.OnServiceAdd(proxiertest.Service("kinds", kind, options...))
		for _, family := range families() {
			slice := []proxiertest.SliceOption{
				proxiertest.SliceName(kind + "-" + string(family)), proxiertest.SlicePort("tcp", v1.ProtocolTCP, 8080),
				proxiertest.SlicePort("udp", v1.ProtocolUDP, 8080), proxiertest.SlicePort("sctp", v1.ProtocolSCTP, 8080),
			}
			for _, pods := range [][]*proxiertest.Host{w.net.LocalPods, w.net.RemotePods} {
				for _, pod := range pods {
					if kind != "empty" {
						slice = append(slice, proxiertest.Endpoint(pod.Addr(family).String(), proxiertest.OnNode(w.net.Config().Node.Name)))
					}
				}
			}
			p.OnEndpointSliceAdd(proxiertest.Slice("kinds", kind, discovery.AddressType(family), slice...))
		}
	}
	w.sync(p.Proxier)
}

// nodeWith runs an engine with Services of all kinds, beside no other program.
func nodeWith(t *testing.T, e engine) *world {
	t.Helper()
	net := proxiertest.NewTopology(t)
	w := &world{sandbox: newSandbox(t, trixie, net.Node), net: net, engine: e}
	w.startAll()
	return w
}

// TestEveryNftReadsOurTables: the nft programs of three releases print the tables, as
// text and as JSON.
func TestEveryNftReadsOurTables(t *testing.T) {
	mustRoots(t)
	t.Parallel()
	w := nodeWith(t, engineNamed("nftables"))
	var rules []int
	for _, release := range slices.Sorted(maps.Keys(readers())) {
		there := newSandbox(t, release, w.net.Node)
		if version := mustTell(t, there, "nft", "--version"); !strings.Contains(version, "v"+readers()[release]+" ") {
			t.Errorf("nft --version = %q, want %s", version, readers()[release])
		}
		listed := mustTell(t, there, "nft", "list", "ruleset")
		for _, object := range []string{"table ip kube-proxy {", "table ip6 kube-proxy {", "map services {", "set hairpin {", "10.96.0.20 . tcp . 80"} {
			if !strings.Contains(listed, object) {
				t.Errorf("nft %s prints no %q:\n%s", readers()[release], object, listed)
			}
		}
		rules = append(rules, strings.Count(mustTell(t, there, "nft", "-j", "list", "ruleset"), `{"rule":`))
		elsewhere := newSandbox(t, release, netnstest.New(t))
		if _, err := elsewhere.tryWith(elsewhere.command("nft", "-f", "-"), strings.NewReader(listed)); err == nil {
			t.Errorf("nft %s accepts what it has printed: say so in %s", readers()[release], document)
		}
	}
	if slices.Min(rules) < 20 || slices.Min(rules) != slices.Max(rules) {
		t.Errorf("rules in the JSON of three versions: %v, want as many in each", rules)
	}
}

// TestNewerIPTablesReadsOurChains: nft of each release prints the chains of the iptables
// engine, which this machine's iptables writes. iptables-nft-save of a newer release prints
// the same rules, that of an older one leaves out matches.
func TestNewerIPTablesReadsOurChains(t *testing.T) {
	mustRoots(t)
	t.Parallel()
	w := nodeWith(t, engineNamed("iptables-nft"))
	written := parseSaved("iptables", mustTellHere(t, w.net.Node, "iptables-nft-save"))
	for release, version := range readers() {
		s := newSandbox(t, release, w.net.Node)
		for _, table := range []string{"ip nat", "ip6 filter"} {
			if listed := mustTell(t, s, append([]string{"nft", "list", "table"}, strings.Fields(table)...)...); !strings.Contains(listed, "chain KUBE-SERVICES {") {
				t.Errorf("nft %s prints of table %s:\n%s", version, table, listed)
			}
		}
		saved := parseSaved("iptables", mustTell(t, s, "iptables-nft-save"))
		diff := gocmp.Diff(written, saved, gocmp.AllowUnexported(chain{}))
		if len(saved) < 20 || len(saved) != len(written) {
			t.Errorf("iptables-nft-save of %s prints %d chains, want %d", release, len(saved), len(written))
		}
		if older := release == bullseye; older != (diff != "") {
			t.Errorf("iptables-nft-save of %s differs: %v, want %v; -written +printed:\n%s", release, !older, older, diff)
		}
	}
}

// mustTellHere runs a program of this machine in a host's namespace.
func mustTellHere(t *testing.T, host *proxiertest.Host, args ...string) string {
	t.Helper()
	var out []byte
	check(t, host.Do(func() (err error) {
		out, err = exec.CommandContext(t.Context(), args[0], args[1:]...).Output()
		return err
	}))
	return string(out)
}

// mustTell runs a program, and returns its output.
func mustTell(t *testing.T, s *sandbox, args ...string) string {
	t.Helper()
	out, err := s.tryWith(s.command(args...), nil)
	if err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	return out
}
