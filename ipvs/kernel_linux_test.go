//go:build vm

package ipvs_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// node is the node of a topology with a running Provider.
type node struct {
	t     *testing.T
	world *proxiertest.Topology
	ns    string
	proxy *proxier.Proxier
	stop  func()

	reports *reports
}

// reports counts the writes of IPv4 syncs.
type reports struct {
	mu     sync.Mutex
	writes []int
}

func (r *reports) ObserveSync(s proxier.SyncReport) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.Family == v1.IPv4Protocol {
		r.writes = append(r.writes, s.Apply.Writes)
	}
}

// total returns the writes since the last call.
func (r *reports) total() (writes int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range r.writes {
		writes += n
	}
	r.writes = nil
	return writes
}

func newNode(t *testing.T, change ...func(*ipvs.Config)) *node {
	t.Helper()
	n := newIdleNode(t)
	n.start(change...)
	return n
}

// newIdleNode returns a node without a Provider.
func newIdleNode(t *testing.T) *node {
	t.Helper()
	world := proxiertest.NewTopology(t)
	return &node{t: t, world: world, ns: world.Node.NetNS()}
}

// start starts a Provider, which ends with the test or by stop.
func (n *node) start(change ...func(*ipvs.Config)) {
	n.t.Helper()
	config := ipvs.Config{Config: n.world.Config(), SetSysctls: true}
	config.Runner = runner.Options{MinInterval: runner.Unlimited}
	for _, c := range change {
		c(&config)
	}
	n.reports = &reports{}
	p, err := ipvs.New(config, proxier.Deps{Observer: n.reports})
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(n.t.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		if err := p.Run(ctx); err != nil {
			n.t.Errorf("Run: %v", err)
		}
	})
	var once sync.Once
	n.proxy, n.stop = p, func() {
		once.Do(func() {
			cancel()
			running.Wait()
		})
	}
	n.t.Cleanup(n.stop)
}

// synced reports that all objects were delivered, and waits for the first sync.
func (n *node) synced() {
	n.t.Helper()
	n.proxy.OnServiceSynced()
	n.proxy.OnEndpointSlicesSynced()
	n.sync()
}

func (n *node) sync() {
	n.t.Helper()
	if err := proxiertest.Sync(n.t.Context(), n.proxy); err != nil {
		n.t.Fatal(err)
	}
}

// run runs a program on the node: an oracle that is independent of this library.
func (n *node) run(program string, args ...string) string {
	n.t.Helper()
	var out []byte
	var err error
	netnstest.Check(n.t, namespace.Visit(n.ns, func() error {
		out, err = exec.Command(program, args...).CombinedOutput()
		return nil
	}))
	if err != nil {
		n.t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
	}
	return string(out)
}

const webVIP = "10.96.0.10"

func web(options ...proxiertest.ServiceOption) *v1.Service {
	return proxiertest.Service("shop", "web", append([]proxiertest.ServiceOption{
		proxiertest.ClusterIPs(webVIP), proxiertest.Port("http", v1.ProtocolTCP, 80),
	}, options...)...)
}

func webSlice(pods ...*proxiertest.Host) *discovery.EndpointSlice {
	options := []proxiertest.SliceOption{proxiertest.SlicePort("http", v1.ProtocolTCP, 8080)}
	for _, pod := range pods {
		options = append(options, proxiertest.Endpoint(pod.Addr(v1.IPv4Protocol).String(), proxiertest.OnNode("node")))
	}
	return proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, options...)
}

func (n *node) ask() (string, error) {
	answer, err := n.world.LocalPods[2].Ask(n.t.Context(), "tcp", netip.MustParseAddrPort(webVIP+":80"), proxiertest.AskOptions{Timeout: 3 * time.Second})
	return answer.Server, err
}

// everybody sends many requests; exactly these pods must answer.
func (n *node) everybody(want ...*proxiertest.Host) {
	n.t.Helper()
	seen := map[string]bool{}
	for range 4 * len(want) {
		server, err := n.ask()
		if err != nil {
			n.t.Fatal(err)
		}
		seen[server] = true
	}
	for _, host := range want {
		if !seen[host.Name] {
			n.t.Errorf("answered by %v, want %s among them", seen, host.Name)
		}
	}
	if len(seen) != len(want) {
		n.t.Errorf("answered by %v, want %d of them", seen, len(want))
	}
}

// TestDrainingLetsConnectionsEnd: an open connection to a removed endpoint continues, new ones
// use other endpoints, also after a restart. An endpoint that returns gets new connections
// again. The deadline ends the remaining connections.
func TestDrainingLetsConnectionsEnd(t *testing.T) {
	const drain = 6 * time.Second
	n := newNode(t, func(c *ipvs.Config) { c.Drain = time.Hour })
	pods := n.world.LocalPods[:2]
	n.proxy.OnServiceAdd(web())
	n.proxy.OnEndpointSliceAdd(webSlice(pods[0]))
	n.synced()
	flow := n.open()
	alive := func(when string) {
		t.Helper()
		if answer, err := flow.Ask(t.Context()); err != nil || answer.Server != pods[0].Name {
			t.Errorf("%s: the open connection is answered by %q, %v, want %s", when, answer.Server, err, pods[0].Name)
		}
	}
	alive("at first")
	n.proxy.OnEndpointSliceUpdate(nil, webSlice(pods[1]))
	n.sync()
	alive("while its endpoint drains")
	n.everybody(pods[1])
	if got := n.run("ipvsadm", "-Ln"); !strings.Contains(got, pods[0].Addr(v1.IPv4Protocol).String()+":8080") {
		t.Errorf("ipvsadm shows\n%swant the draining endpoint", got)
	}

	n.stop()
	n.start(func(c *ipvs.Config) { c.Drain = time.Hour })
	n.proxy.OnServiceAdd(web())
	n.proxy.OnEndpointSliceAdd(webSlice(pods[1]))
	n.synced()
	alive("after a restart")
	n.everybody(pods[1])

	n.proxy.OnEndpointSliceUpdate(nil, webSlice(pods...))
	n.sync()
	n.everybody(pods...)
	alive("when its endpoint is back")

	n.stop()
	n.start(func(c *ipvs.Config) { c.Drain = drain })
	n.proxy.OnServiceAdd(web())
	n.proxy.OnEndpointSliceAdd(webSlice(pods[1]))
	n.synced()
	alive("before the deadline")
	poll.Until(n.t, "the endpoint is gone at the deadline", func() bool {
		return !strings.Contains(n.run("ipvsadm", "-Ln"), pods[0].Addr(v1.IPv4Protocol).String()+":8080")
	})
	if answer, err := flow.Ask(t.Context()); err == nil {
		t.Errorf("after the deadline: answered by %s, want no response", answer.Server)
	}
	n.everybody(pods[1])
}

// TestTheLastEndpointGoes: clients are refused at once, and do not hang.
func TestTheLastEndpointGoes(t *testing.T) {
	n := newNode(t)
	n.proxy.OnServiceAdd(web())
	n.proxy.OnEndpointSliceAdd(webSlice(n.world.LocalPods[0]))
	n.synced()
	flow := n.open()
	n.everybody(n.world.LocalPods[0])
	n.proxy.OnEndpointSliceUpdate(nil, webSlice())
	n.sync()
	if server, err := n.ask(); !errors.Is(err, proxiertest.ErrRefused) {
		t.Errorf("answered by %q, %v, want a refusal", server, err)
	}
	if _, err := flow.Ask(t.Context()); err != nil {
		t.Errorf("the open connection: %v, want it to go on", err)
	}
}

// Objects of other programs stay after sync, repair and clean-up: virtual servers and addresses (W-V2). An external
// IP that is the node's own address works, and the node keeps its ports.
func TestObjectsOfOtherProgramsStay(t *testing.T) {
	n := newNode(t)
	main := n.world.Node.Addr(v1.IPv4Protocol)
	n.run("ip", "link", "add", "other0", "type", "dummy")
	n.run("ip", "addr", "add", "192.0.2.77/32", "dev", "other0")
	n.run("ipvsadm", "-A", "-t", "192.0.2.77:80", "-s", "wlc")
	n.run("ipvsadm", "-a", "-t", "192.0.2.77:80", "-r", "192.0.2.1:80", "-m", "-w", "7")
	n.run("ipvsadm", "-A", "-f", "7", "-s", "rr")
	before := n.run("ipvsadm", "-Ln")

	n.proxy.OnServiceAdd(web(proxiertest.ExternalIPs(main.String())))
	n.proxy.OnEndpointSliceAdd(webSlice(n.world.LocalPods[0]))
	n.synced()
	at := func(port uint16) (string, error) {
		answer, err := n.world.Router.Ask(t.Context(), "tcp", netip.AddrPortFrom(main, port), proxiertest.AskOptions{Timeout: 3 * time.Second})
		return answer.Server, err
	}
	if server, err := at(80); err != nil || server != n.world.LocalPods[0].Name {
		t.Errorf("the external IP is answered by %q, %v, want the pod", server, err)
	}
	if server, err := at(31999); err != nil || server != n.world.Node.Name { // its own process
		t.Errorf("the node's own port is answered by %q, %v, want the node", server, err)
	}
	if got := n.run("ip", "addr", "show", "dev", n.device()); strings.Contains(got, main.String()) || !strings.Contains(got, webVIP) {
		t.Errorf("the device has\n%swant the ClusterIP, and not the node's address", got)
	}
	if got := n.run("nft", "list", "tables"); !strings.Contains(got, "serviceplane.ipvs") {
		t.Errorf("nft lists\n%swant the table of the rules", got)
	}
	n.run("ipvsadm", "-D", "-t", webVIP+":80") // damage
	poll.Until(n.t, "the virtual server is back", func() bool { return strings.Contains(n.run("ipvsadm", "-Ln"), webVIP+":80") })
	real := n.world.LocalPods[0].Addr(v1.IPv4Protocol).String() + ":8080"
	n.run("ipvsadm", "-d", "-t", webVIP+":80", "-r", real)
	poll.Until(n.t, "the real server is back", func() bool { return strings.Contains(n.run("ipvsadm", "-Ln", "-t", webVIP+":80"), real) })
	n.run("ip", "addr", "del", webVIP+"/32", "dev", n.device())
	poll.Until(n.t, "the address is back", func() bool { return strings.Contains(n.run("ip", "addr"), webVIP) })
	n.stop()
	if err := n.proxy.Cleanup(t.Context()); err != nil {
		t.Fatalf("Cleanup: %v", err)
	}
	if got := n.run("ipvsadm", "-Ln"); got != before {
		t.Errorf("after the clean-up ipvsadm shows\n%swant\n%s", got, before)
	}
	if got := n.run("ip", "addr"); !strings.Contains(got, "192.0.2.77") || strings.Contains(got, "serviceplane0") {
		t.Errorf("after the clean-up there is\n%swant other0 and not our device", got)
	}
	if got := n.run("nft", "list", "tables"); strings.Contains(got, "serviceplane") {
		t.Errorf("after the clean-up nft lists\n%swant no table of ours", got)
	}
}

// TestTakingOverFromKubeProxy: of the virtual servers on kube-ipvs0, and of those for wanted
// node ports, wanted ones keep their connections, and all others are deleted, in both IP
// families. Objects of other programs stay.
func TestTakingOverFromKubeProxy(t *testing.T) {
	n := newIdleNode(t)
	const gone, gone6 = "10.96.0.99", "fd00:10:96::99"
	pods, main := n.world.LocalPods[:2], n.world.Node.Addr(v1.IPv4Protocol).String()
	real := func(i int) string { return pods[i].Addr(v1.IPv4Protocol).String() + ":8080" }
	for _, setting := range []string{"net.ipv4.vs.conntrack=1", "net.ipv4.ip_forward=1"} {
		n.run("sysctl", "-w", setting)
	}
	for device, addrs := range map[string][]string{"kube-ipvs0": {webVIP + "/32", gone + "/32", gone6 + "/128"}, "other0": {"192.0.2.77/32"}} {
		n.run("ip", "link", "add", device, "type", "dummy")
		for _, addr := range addrs {
			n.run("ip", "addr", "add", addr, "dev", device)
		}
	}
	for server, reals := range map[string][]string{
		webVIP + ":80": {real(0), "10.244.1.77:8080"}, // and an endpoint that has gone meanwhile
		gone + ":80":   {real(1)}, "[" + gone6 + "]:80": {"[fd00:10:244:1::77]:8080"},
		main + ":30080": {real(0), "10.244.1.77:8080"},
		"192.0.2.77:80": {real(1)},
	} {
		n.run("ipvsadm", "-A", "-t", server, "-s", "rr")
		for _, r := range reals {
			n.run("ipvsadm", "-a", "-t", server, "-r", r, "-m")
		}
	}
	n.run("ipvsadm", "-d", "-t", webVIP+":80", "-r", "10.244.1.77:8080")
	flow := n.open() // to pods[0], as no other is there
	n.run("ipvsadm", "-a", "-t", webVIP+":80", "-r", "10.244.1.77:8080", "-m")
	alive := func() {
		t.Helper()
		if answer, err := flow.Ask(t.Context()); err != nil || answer.Server != pods[0].Name {
			t.Errorf("the open connection is answered by %q, %v, want %s", answer.Server, err, pods[0].Name)
		}
	}
	alive()

	n.start(func(c *ipvs.Config) { c.Names = proxier.KubeProxyNames() })
	n.proxy.OnServiceAdd(proxiertest.Service("shop", "web", proxiertest.ClusterIPs(webVIP), proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30080)))
	n.proxy.OnEndpointSliceAdd(webSlice(pods...))
	n.synced()
	alive()
	n.everybody(pods...)
	servers := func() string { return n.run("ipvsadm", "-Ln") }
	poll.Until(n.t, "what is not wanted has gone", func() bool {
		got := servers()
		return !strings.Contains(got, gone) && !strings.Contains(got, gone6) && !strings.Contains(got, "10.244.1.77")
	})
	for _, server := range []string{webVIP + ":80", main + ":30080"} {
		if got := n.run("ipvsadm", "-Ln", "-t", server); !strings.Contains(got, real(0)) || !strings.Contains(got, real(1)) {
			t.Errorf("ipvsadm shows\n%swant both pods", got)
		}
	}
	if got := n.run("ip", "addr", "show", "dev", "kube-ipvs0"); !strings.Contains(got, webVIP+"/") || strings.Contains(got, gone) || strings.Contains(got, gone6) {
		t.Errorf("kube-ipvs0 has\n%swant %s of the three", got, webVIP)
	}
	alive()
	n.stop()
	if err := n.proxy.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := servers(); strings.Count(got, "TCP ") != 1 || !strings.Contains(got, "192.0.2.77:80") {
		t.Errorf("after the clean-up ipvsadm shows\n%swant that of other0 only", got)
	}
	if got := n.run("ip", "addr"); !strings.Contains(got, "192.0.2.77") || strings.Contains(got, "kube-ipvs0") {
		t.Errorf("after the clean-up there is\n%swant other0 only", got)
	}
}

// TestAMissingSchedulerConcernsOneService: the others are programmed.
func TestAMissingSchedulerConcernsOneService(t *testing.T) {
	n := newNode(t, func(c *ipvs.Config) {
		c.Tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) { p.Ext = s.Annotations["scheduler"] }
		c.Choose = func(s *desired.Service) ipvs.Tuning {
			scheduler, _ := changetracker.Ext[string](s.Port.Ext)
			return ipvs.Tuning{Scheduler: scheduler}
		}
	})
	other := proxiertest.Service("shop", "other", proxiertest.ClusterIPs("10.96.0.11"), proxiertest.Port("http", v1.ProtocolTCP, 80))
	other.Annotations = map[string]string{"scheduler": "nonsense"}
	n.proxy.OnServiceAdd(other)
	n.proxy.OnEndpointSliceAdd(proxiertest.Slice("shop", "other", discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
		proxiertest.Endpoint("10.244.1.2", proxiertest.OnNode("node"))))
	n.proxy.OnServiceAdd(web())
	n.proxy.OnEndpointSliceAdd(webSlice(n.world.LocalPods[0]))
	n.proxy.OnServiceSynced()
	n.proxy.OnEndpointSlicesSynced()
	err := proxiertest.Sync(t.Context(), n.proxy)
	var one *proxier.ServiceError
	if !errors.As(err, &one) || one.Name.Name != "other" || !errors.Is(err, proxier.ErrNotSupported) || !strings.Contains(err.Error(), "ip_vs_nonsense") {
		t.Errorf("Sync = %v, want a ServiceError about other, and the module that it needs", err)
	}
	n.everybody(n.world.LocalPods[0])
	other = other.DeepCopy()
	other.Annotations["scheduler"] = "lc"
	n.proxy.OnServiceUpdate(nil, other)
	n.sync()
	if got := n.run("ipvsadm", "-Ln"); !strings.Contains(got, "10.96.0.11:80 lc") {
		t.Errorf("ipvsadm shows\n%swant other with scheduler lc", got)
	}
}

func (n *node) device() string { return "serviceplane0" }

func (n *node) open() *proxiertest.Conn {
	n.t.Helper()
	flow, err := n.world.LocalPods[2].Open(n.t.Context(), "tcp", netip.MustParseAddrPort(webVIP+":80"), proxiertest.AskOptions{Timeout: 3 * time.Second})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = flow.Close() }) // it may have been cut
	return flow
}

// One change is one exchange among 2,000 Services: adding an endpoint takes one message to the kernel, replacing
// one takes two, and a restart writes nothing.
func TestOneChangeIsOneExchange(t *testing.T) {
	const services = 2000
	n := newNode(t)
	slice := func(service string, endpoints ...int) *discovery.EndpointSlice {
		options := []proxiertest.SliceOption{proxiertest.SlicePort("http", v1.ProtocolTCP, 8080)}
		for _, e := range endpoints {
			options = append(options, proxiertest.Endpoint(fmt.Sprintf("10.244.9.%d", e), proxiertest.OnNode("elsewhere")))
		}
		return proxiertest.Slice("shop", service, discovery.AddressTypeIPv4, options...)
	}
	feed := func() {
		for i := range services {
			name := fmt.Sprintf("s-%d", i)
			n.proxy.OnServiceAdd(proxiertest.Service("shop", name, proxiertest.ClusterIPs(fmt.Sprintf("10.97.%d.%d", i/250, i%250+1)), proxiertest.Port("http", v1.ProtocolTCP, 80)))
			n.proxy.OnEndpointSliceAdd(slice(name, 1, 2))
		}
		n.proxy.OnServiceAdd(web())
		n.proxy.OnEndpointSliceAdd(webSlice(n.world.LocalPods[0]))
		n.synced()
	}
	feed()
	if got := strings.Count(n.run("ipvsadm", "-Ln"), "TCP "); got != services+1 {
		t.Errorf("ipvsadm shows %d virtual servers, want %d", got, services+1)
	}
	n.everybody(n.world.LocalPods[0])
	n.reports.total()
	for _, step := range []struct {
		what      string
		endpoints []int
		want      int
	}{
		{"one endpoint more", []int{1, 2, 3}, 1},
		{"one endpoint replaced", []int{1, 2, 4}, 2},
		{"one endpoint less", []int{1, 2}, 1},
	} {
		n.proxy.OnEndpointSliceUpdate(nil, slice("s-7", step.endpoints...))
		n.sync()
		if got := n.reports.total(); got != step.want {
			t.Errorf("%s: %d writes, want %d", step.what, got, step.want)
		}
	}
	poll.Until(n.t, "what drained is gone", func() bool { return !strings.Contains(n.run("ipvsadm", "-Ln"), "10.244.9.4") })
	n.stop()
	n.start()
	feed()
	if got := n.reports.total(); got != 0 {
		t.Errorf("a restart: %d writes, want none", got)
	}
	n.everybody(n.world.LocalPods[0])
}

// TestWithoutPrivilege runs itself again as nobody: the error is ErrPermission.
func TestWithoutPrivilege(t *testing.T) {
	const marker, nobody = "SERVICEPLANE_AS_NOBODY", 65534
	if os.Getenv(marker) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestWithoutPrivilege$", "-test.count=1")
		cmd.Env = append(os.Environ(), marker+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "PASS") {
			t.Errorf("as nobody: %v\n%s", err, out)
		}
		return
	}
	p, err := ipvs.New(ipvs.Config{SetSysctls: true}, proxier.Deps{Health: proxier.NoHealth()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = p.Run(ctx) })
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	if err := p.Sync(ctx); !errors.Is(err, proxier.ErrPermission) || !strings.Contains(err.Error(), "run with CAP_NET_ADMIN") {
		t.Errorf("Sync = %v, want ErrPermission and what to do", err)
	}
	cancel()
	running.Wait()
}

// TestKernelSettings: they are set on request only, in the node's network namespace. Without
// the one that masquerading needs, nothing is programmed.
func TestKernelSettings(t *testing.T) {
	n := newNode(t, func(c *ipvs.Config) { c.StrictARP = true })
	n.synced()
	for name, want := range map[string]string{
		"net.ipv4.vs.conntrack": "1", "net.ipv4.vs.expire_nodest_conn": "1", "net.ipv4.vs.expire_quiescent_template": "1",
		"net.ipv4.conf.all.arp_ignore": "1", "net.ipv4.conf.all.arp_announce": "2",
	} {
		if got := strings.TrimSpace(n.run("sysctl", "-n", name)); got != want {
			t.Errorf("%s = %s, want %s", name, got, want)
		}
	}
	n.stop()
	n.run("sysctl", "-w", "net.ipv4.vs.conntrack=0")
	n.start(func(c *ipvs.Config) { c.SetSysctls = false })
	n.proxy.OnServiceSynced()
	n.proxy.OnEndpointSlicesSynced()
	if err := n.proxy.Sync(t.Context()); err == nil || !strings.Contains(err.Error(), "net/ipv4/vs/conntrack is 0, want 1") {
		t.Errorf("Sync = %v, want it to name the setting", err)
	}
}
