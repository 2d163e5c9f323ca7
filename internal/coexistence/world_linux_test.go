package coexistence

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// world is a node with the rules of another program, in a network of its own.
type world struct {
	*sandbox

	pod     *sandbox // of the pod that rules are in, if any
	net     *proxiertest.Topology
	foreign foreign
	engine  engine
}

func newWorld(t *testing.T, f foreign, e engine) *world {
	t.Helper()
	net := proxiertest.NewTopology(t)
	w := &world{net: net, foreign: f, engine: e}
	if f.flowtable { // the programs of the machine do
		w.sandbox = &sandbox{t: t, in: net.Node}
	} else {
		w.sandbox = newSandbox(t, trixie, net.Node)
		w.prefer(w.sandbox)
	}
	if f.setUp != nil {
		f.setUp(w)
	}
	w.load()
	return w
}

// prefer makes the programs of a sandbox use the node's variant of iptables.
func (w *world) prefer(s *sandbox) {
	w.t.Helper()
	s.run(fmt.Sprintf(`for family in iptables ip6tables; do
for part in "" -save -restore; do ln -sf "$family-%s$part" "/usr/sbin/$family$part"; done; done`, w.engine.iptables))
}

// load writes the rules of files.
func (w *world) load() {
	w.t.Helper()
	if w.foreign.nft != "" {
		w.loadNFT("")
	}
	if w.foreign.iptables != "" {
		w.restore(w.sandbox, w.foreign.iptables, "--noflush")
	}
}

// loadNFT writes the rules of files of nft after others.
func (w *world) loadNFT(rules string) {
	w.t.Helper()
	for name := range strings.FieldsSeq(w.foreign.nft) {
		rules += readFile(w.t, name+".nft")
	}
	_, err := w.tryWith(w.command("nft", "-f", "-"), strings.NewReader(rules))
	check(w.t, err)
}

// restore writes the rules, and the ipsets that they use, of a file.
func (w *world) restore(s *sandbox, name string, options ...string) {
	w.t.Helper()
	for _, family := range families() {
		if sets, err := os.ReadFile(filepath.Join("testdata", name+".ipset")); err == nil {
			s.write("/tmp/sets", fill(string(sets), family))
			s.run("ipset restore -exist </tmp/sets")
		}
		s.write("/tmp/rules", fill(readFile(w.t, name+".iptables"), family))
		s.run(program(family) + "-restore " + strings.Join(options, " ") + " </tmp/rules")
	}
}

// restart does what the other program does when it starts again, with all of its rules
// deleted meanwhile: ours too, where tables are common or "nft flush ruleset" is its way. Where they
// are not common, its chains come after ours now: they came before ours at the start.
func (w *world) restart() {
	w.t.Helper()
	if w.engine.ownTables {
		w.run(deleteIPTables)
	}
	switch {
	case w.foreign.reload != nil:
		w.foreign.reload(w)
	case w.foreign.nft != "":
		w.loadNFT("flush ruleset\n")
	default:
		w.restore(w.sandbox, w.foreign.iptables)
	}
}

func readFile(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	check(t, err)
	return string(text)
}

func program(family v1.IPFamily) string {
	if family == v1.IPv4Protocol {
		return "iptables"
	}
	return "ip6tables"
}

// fill puts the addresses of a family into a file.
func fill(text string, family v1.IPFamily) string {
	values := []string{
		"<4>", "4", "<nft>", "ip", "<inet>", "inet", "<set>", "", "<pods>", "10.244.0.0/16", "<here>", "10.244.1.0/24", "<services>", "10.96.0.0/16",
		"<pod2>", "10.244.1.34/32", "<at2>", "10.244.1.34", "<at2raw>", "10.244.1.34", "<link2>", "10.244.1.32/28",
		"<clients>", "198.51.100.0/24", "<multicast>", "224.0.0.0/4", "<loopback>", "127.0.0.0/8", "<localhost>", "127.0.0.1/32",
		"<passthrough>", "127.0.0.6/32", "<probes>", "169.254.7.127", "<tailnode>", "100.64.0.5/32", "<tailnet>", "100.64.0.0/10",
	}
	if family == v1.IPv6Protocol {
		values = []string{
			"<4>", "6", "<nft>", "ip6", "<inet>", "inet6", "<set>", "inet6:", "<pods>", "fd00:10:244::/48", "<here>", "fd00:10:244:1::/64", "<services>", "fd00:10:96::/112",
			"<pod2>", "fd00:10:244:1:2::2/128", "<at2>", "[fd00:10:244:1:2::2]", "<at2raw>", "fd00:10:244:1:2::2", "<link2>", "fd00:10:244:1:2::/80",
			"<clients>", "2001:db8:c::/64", "<multicast>", "ff00::/8", "<loopback>", "::1/128", "<localhost>", "::1/128",
			"<passthrough>", "::6/128", "<probes>", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff", "<tailnode>", "fd7a:115c:a1e0::5/128", "<tailnet>", "fd7a:115c:a1e0::/48",
		}
	}
	return strings.NewReplacer(values...).Replace(text)
}

// script runs commands, once for each family if they name addresses.
func (w *world) script(commands string) {
	w.t.Helper()
	for i, family := range families() {
		if i > 0 && !strings.Contains(commands, "<") {
			break
		}
		w.run(fill(strings.ReplaceAll(commands, "<iptables>", program(family)), family))
	}
}

func (w *world) probes() []probe {
	all := probes()
	if w.foreign.own != nil {
		all = append(all, *w.foreign.own)
	}
	return all
}

// proxy is a running Provider.
type proxy struct {
	*proxier.Proxier

	stop func()
}

// start runs an engine with all Services.
func (w *world) start(e engine) *proxy {
	w.t.Helper()
	config := w.net.Config()
	config.Names = proxier.KubeProxyNames()
	config.Runner = runner.Options{MinInterval: runner.Unlimited}
	p, err := e.create(config)
	check(w.t, err)
	for service, endpoint := range map[place]string{local: "pod0", remote: "remote0", strict: "pod0", foreignPod: "pod2"} {
		add(p, w.net, service, endpoint)
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	stop := poll.Background(w.t, p.Run)
	w.sync(p)
	return &proxy{p, stop}
}

func (w *world) sync(p *proxier.Proxier) {
	w.t.Helper()
	if err := proxiertest.Sync(w.t.Context(), p); err != nil {
		w.t.Fatalf("sync in mode %s: %v", w.engine.name, err)
	}
}

func name(service place) string { return fmt.Sprintf("service-%d", service) }

// add adds a Service of both families with one endpoint, or changes its endpoint.
func add(p *proxier.Proxier, net *proxiertest.Topology, service place, endpoint string) {
	options := []proxiertest.ServiceOption{
		proxiertest.ClusterIPs(clusterIP(service, v1.IPv4Protocol).String(), clusterIP(service, v1.IPv6Protocol).String()),
		proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30000+int32(service)),
	}
	if service == strict {
		options = append(options, proxiertest.ExternalPolicyLocal())
	}
	p.OnServiceAdd(proxiertest.Service("test", name(service), options...))
	host, at := map[string]*proxiertest.Host{
		"pod0": net.LocalPods[0], "pod2": net.LocalPods[2], "remote0": net.RemotePods[0], "remote1": net.RemotePods[1],
	}[endpoint], net.Config().Node.Name
	if strings.HasPrefix(endpoint, "remote") {
		at = "elsewhere"
	}
	for _, family := range families() {
		p.OnEndpointSliceAdd(proxiertest.Slice("test", name(service), discovery.AddressType(family), proxiertest.SliceName(name(service)+"-"+string(family)),
			proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint(host.Addr(family).String(), proxiertest.OnNode(at))))
	}
}

// mustKeep checks that the rules of others are what they were.
func (w *world) mustKeep(before rules, after string) {
	w.t.Helper()
	if diff := before.kept(w.rules()); diff != "" {
		w.t.Errorf("rules of others after %s:\n%s", after, diff)
	}
}

// mustFare checks what becomes of packets.
func (w *world) mustFare(want outcomes, after string) {
	w.t.Helper()
	if got := w.measure(w.t.Context(), want); got.String() != want.String() {
		w.t.Errorf("packets after %s: %s\nwant: %s", after, got, want)
	}
}

// mustRecover waits until packets fare as before.
func (w *world) mustRecover(want outcomes, after string) {
	w.t.Helper()
	poll.Nil(w.t, "packets fare as before "+after, func() error {
		if got := w.measureFor(w.t.Context(), impatience); got.String() != want.String() {
			return fmt.Errorf("got: %s, want: %s", got, want)
		}
		return nil
	})
}
