package localhost_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
	"github.com/serviceplane/serviceplane/userspace"
	"github.com/serviceplane/serviceplane/userspace/localhost"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const podPort = 8080

// node is a Provider of both IP families whose engines record what they get, with sockets at
// localhost in a network namespace of its own. The pods one and two are there too.
type node struct {
	*proxier.Proxier

	ns      *netns.NS
	kernel  map[v1.IPFamily]*proxiertest.RecordingEngine
	engines map[v1.IPFamily]proxier.Engine
	ended   chan error
	stop    context.CancelFunc
}

func newNode(t *testing.T, change ...func(*userspace.Config)) *node {
	t.Helper()
	ns := netnstest.New(t)
	netnstest.Check(t, ns.AddBridge("pods", netip.MustParsePrefix("10.244.0.1/24"), netip.MustParsePrefix("10.244.0.2/24"),
		netip.MustParsePrefix("fd00:10:244::1/64"), netip.MustParsePrefix("fd00:10:244::2/64")))
	return startIn(t, ns, change...)
}

// startIn starts a Provider in a network namespace that has the pods.
func startIn(t *testing.T, ns *netns.NS, change ...func(*userspace.Config)) *node {
	t.Helper()
	n := &node{
		ns: ns, ended: make(chan error, 1),
		kernel: map[v1.IPFamily]*proxiertest.RecordingEngine{}, engines: map[v1.IPFamily]proxier.Engine{},
	}
	config := userspace.Config{Config: proxier.Config{
		NetNS: n.ns.Path(), NodePorts: proxier.NodePorts{Localhost: true},
		Runner: runner.Options{MinInterval: runner.Unlimited, Retry: runner.Backoff{Initial: 10 * time.Millisecond, Max: 20 * time.Millisecond}},
	}}
	for _, c := range change {
		c(&config)
	}
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		n.kernel[family] = &proxiertest.RecordingEngine{}
		engines[family] = n.kernel[family]
	}
	deps := proxier.Deps{}
	wrap := localhost.Wrap(config, deps)
	deps.Wrap = func(family v1.IPFamily, engine proxier.Engine) (proxier.Engine, error) {
		wrapped, err := wrap(family, engine)
		n.engines[family] = wrapped
		return wrapped, err
	}
	var err error
	if n.Proxier, err = proxier.New(config.Config, deps, engines); err != nil {
		t.Fatal(err)
	}
	var ctx context.Context
	ctx, n.stop = context.WithCancel(t.Context())
	go func() { n.ended <- n.Run(ctx) }()
	t.Cleanup(func() {
		n.stop()
		if err := <-n.ended; err != nil {
			t.Errorf("Run: %v", err)
		}
		n.ended <- nil
	})
	n.OnServiceSynced()
	n.OnEndpointSlicesSynced()
	n.sync(t)
	return n
}

func (n *node) sync(t *testing.T) {
	t.Helper()
	if err := proxiertest.Sync(t.Context(), n); err != nil {
		t.Fatalf("Sync: %v", err)
	}
}

// service returns a Service of both protocols and families with a node port.
func service(name string, nodePort int32, options ...proxiertest.ServiceOption) *v1.Service {
	return proxiertest.Service("default", name, append([]proxiertest.ServiceOption{
		proxiertest.ClusterIPs(fmt.Sprintf("10.96.%d.%d", nodePort>>8, nodePort&0xff), fmt.Sprintf("fd00:10:96::%x", nodePort)),
		proxiertest.NodePort("tcp", v1.ProtocolTCP, 80, nodePort), proxiertest.NodePort("udp", v1.ProtocolUDP, 80, nodePort),
	}, options...)...)
}

// slices returns the EndpointSlices of a Service; a pod is the last digit of its addresses.
func slicesOf(name string, pods ...int) (all []*discovery.EndpointSlice) {
	for family, format := range map[discovery.AddressType]string{discovery.AddressTypeIPv4: "10.244.0.%d", discovery.AddressTypeIPv6: "fd00:10:244::%d"} {
		options := []proxiertest.SliceOption{proxiertest.SlicePort("tcp", v1.ProtocolTCP, podPort), proxiertest.SlicePort("udp", v1.ProtocolUDP, podPort)}
		for _, pod := range pods {
			options = append(options, proxiertest.Endpoint(fmt.Sprintf(format, pod)))
		}
		all = append(all, proxiertest.Slice("default", name, family, options...))
	}
	return all
}

// set sets the endpoints of a Service.
func (n *node) set(name string, pods ...int) {
	for _, s := range slicesOf(name, pods...) {
		n.OnEndpointSliceUpdate(nil, s)
	}
}

func name(service, port string) changetracker.ServicePortName {
	n := changetracker.ServicePortName{Port: port, Protocol: v1.ProtocolTCP}
	if port == "udp" {
		n.Protocol = v1.ProtocolUDP
	}
	n.Namespace, n.Name = "default", service
	return n
}

// each calls f for each protocol and family, with the address of localhost.
func each(port uint16, f func(network string, to netip.AddrPort)) {
	for _, network := range []string{"tcp", "udp"} {
		for _, addr := range []string{"127.0.0.1", "::1"} {
			f(network, netip.AddrPortFrom(netip.MustParseAddr(addr), port))
		}
	}
}

// servers starts the pods, which answer with the address that was asked.
func (n *node) servers(t *testing.T) {
	t.Helper()
	netnstest.Serve(t, n.ns, "pod", podPort)
}

// mustServe checks that clients reach these pods, at both protocols and families.
func (n *node) mustServe(t *testing.T, port uint16, pods ...string) {
	t.Helper()
	each(port, func(network string, to netip.AddrPort) {
		var reached []string
		for range 2 * len(pods) {
			answer, err := netns.Ask(t.Context(), n.ns, network, to, netns.AskOptions{})
			if err != nil {
				t.Errorf("%s %v: %v", network, to, err)
				return
			}
			text := answer.Local.Addr().String()
			reached = append(reached, text[len(text)-1:])
		}
		slices.Sort(reached)
		if reached = slices.Compact(reached); !slices.Equal(reached, pods) {
			t.Errorf("%s %v: reached pods %v, want %v", network, to, reached, pods)
		}
	})
}

func (n *node) mustRefuse(t *testing.T, port uint16) {
	t.Helper()
	each(port, func(network string, to netip.AddrPort) {
		if _, err := netns.Ask(t.Context(), n.ns, network, to, netns.AskOptions{}); !isRefused(err) {
			t.Errorf("%s %v: %v, want it refused", network, to, err)
		}
	})
}

// Endpoints come and go, and there is no socket where there is no endpoint.
func TestEndpointsComeAndGo(t *testing.T) {
	n := newNode(t)
	n.servers(t)
	n.OnServiceAdd(service("web", 30080, proxiertest.ExternalPolicyLocal(), proxiertest.InternalPolicyLocal()))
	n.set("web")
	n.sync(t)
	n.mustRefuse(t, 30080)
	n.set("web", 1, 2)
	n.sync(t)
	n.mustServe(t, 30080, "1", "2")
	n.set("web", 2)
	n.sync(t)
	n.mustServe(t, 30080, "2")
	moved := service("web", 30081)
	n.OnServiceUpdate(service("web", 30080), moved)
	n.sync(t)
	n.mustRefuse(t, 30080)
	n.mustServe(t, 30081, "2")
	n.set("web")
	n.sync(t)
	n.mustRefuse(t, 30081)
	n.set("web", 1)
	n.OnServiceUpdate(moved, proxiertest.Service("default", "web", proxiertest.ClusterIPs("10.96.0.1", "fd00:10:96::1"), proxiertest.Port("tcp", v1.ProtocolTCP, 80)))
	n.sync(t)
	n.mustRefuse(t, 30081)
}

// TestClientsStayWithSessionAffinity: all of localhost is one client.
func TestClientsStayWithSessionAffinity(t *testing.T) {
	n := newNode(t)
	n.servers(t)
	n.OnServiceAdd(service("web", 30080, proxiertest.ClientAffinity(time.Hour)))
	n.set("web", 1, 2)
	n.sync(t)
	each(30080, func(network string, to netip.AddrPort) {
		var first netns.Answer
		for i := range 6 {
			answer, err := netns.Ask(t.Context(), n.ns, network, to, netns.AskOptions{})
			if err != nil {
				t.Fatalf("%s %v: %v", network, to, err)
			}
			if i == 0 {
				first = answer
			}
			if answer.Local != first.Local {
				t.Errorf("%s %v: connection %d is at %v, want the first one's %v", network, to, i, answer.Local, first.Local)
			}
		}
	})
}

// TestATakenPortFailsItsServiceAlone: the other frontends of the Service are programmed, other
// Services work, and the port is served as soon as it is free.
func TestATakenPortFailsItsServiceAlone(t *testing.T) {
	n := newNode(t)
	n.servers(t)
	program, err := n.ns.Listen(t.Context(), "tcp4", "0.0.0.0:30080")
	netnstest.Check(t, err)
	defer func() { _ = program.Close() }()
	n.OnServiceAdd(service("web", 30080))
	n.OnServiceAdd(service("api", 30081))
	n.set("web", 1)
	n.set("api", 1)
	_ = n.Sync(t.Context())
	status := n.Status()
	for family, f := range status.Families {
		want := 0
		if family == v1.IPv4Protocol {
			want = 1
		}
		if len(f.Failed) != want || want == 1 && (f.Failed[0].Name != name("web", "tcp") || !f.Failed[0].Partial || !isTaken(f.Failed[0])) {
			t.Errorf("%s: failed = %v, want %d", family, f.Failed, want)
		}
	}
	if got := len(n.kernel[v1.IPv4Protocol].Services()); got != 4 {
		t.Errorf("the wrapped engine has %d service ports, want all 4", got)
	}
	n.mustServe(t, 30081, "1")
	fullBefore := n.fullSyncs()
	_ = program.Close()
	poll.Nil(t, "the port is served", func() error {
		_, err := netns.Ask(t.Context(), n.ns, "tcp", netip.MustParseAddrPort("127.0.0.1:30080"), netns.AskOptions{})
		return err
	})
	n.mustServe(t, 30080, "1")
	if got := n.fullSyncs(); got != fullBefore {
		t.Errorf("%d full syncs for the retries, want none", got-fullBefore)
	}
	poll.Until(t, "nothing fails", func() bool { return len(n.Status().Families[v1.IPv4Protocol].Failed) == 0 })
}

func (n *node) fullSyncs() (full int) {
	for _, k := range n.kernel {
		for _, u := range k.Updates() {
			if u.Full {
				full++
			}
		}
	}
	return full
}

// TestConnectionsDrain: one lasts while its endpoint is removed, and until the Provider ends,
// or for Config.Drain, or Config.Linger.
func TestConnectionsDrain(t *testing.T) {
	for title, limit := range map[string]struct{ drain, linger time.Duration }{
		"without limit": {}, "limited": {drain: time.Millisecond}, "lingering": {linger: time.Hour},
	} {
		t.Run(title, func(t *testing.T) {
			n := newNode(t, func(c *userspace.Config) { c.Drain, c.Linger = limit.drain, limit.linger })
			n.servers(t)
			n.OnServiceAdd(service("web", 30080))
			n.set("web", 1)
			n.sync(t)
			flow, err := netns.Open(t.Context(), n.ns, "tcp", netip.MustParseAddrPort("[::1]:30080"), netns.AskOptions{})
			netnstest.Check(t, err)
			defer func() { _ = flow.Close() }()
			_, err = flow.Ask(t.Context())
			netnstest.Check(t, err)
			n.set("web")
			n.sync(t)
			n.mustRefuse(t, 30080)
			if limit.drain > 0 {
				poll.Until(t, "the connection has ended", func() bool { _, err := flow.Ask(t.Context()); return err != nil })
				return
			}
			if _, err := flow.Ask(t.Context()); err != nil {
				t.Errorf("the connection ended with its endpoint: %v", err)
			}
			n.stop()
			if limit.linger > 0 {
				poll.Until(t, "Run ends otherwise", func() bool { return n.Sync(t.Context()) != nil })
				if _, err := flow.Ask(t.Context()); err != nil {
					t.Errorf("the connection does not linger: %v", err)
				}
				return // without the connection, the Provider ends
			}
			n.ended <- <-n.ended // Run has returned
			if _, err := flow.Ask(t.Context()); err == nil {
				t.Error("the connection outlives the Provider")
			}
		})
	}
}

// The next process has the ports while connections of the one before linger.
func TestTheNextProcessHasThePorts(t *testing.T) {
	n := newNode(t, func(c *userspace.Config) { c.Linger = time.Hour })
	n.servers(t)
	n.OnServiceAdd(service("web", 30080))
	n.set("web", 1)
	n.sync(t)
	flow, err := netns.Open(t.Context(), n.ns, "tcp", netip.MustParseAddrPort("127.0.0.1:30080"), netns.AskOptions{})
	netnstest.Check(t, err)
	defer func() { _ = flow.Close() }()
	_, err = flow.Ask(t.Context())
	netnstest.Check(t, err)
	n.stop()
	next := startIn(t, n.ns)
	next.OnServiceAdd(service("web", 30080))
	next.set("web", 2)
	poll.Until(t, "the next process has the ports", func() bool { return proxiertest.Sync(t.Context(), next) == nil })
	next.mustServe(t, 30080, "2")
	if _, err := flow.Ask(t.Context()); err != nil {
		t.Errorf("the connection does not linger: %v", err)
	}
}

// A full sync opens a socket again that root has closed, as with ss -K. One of UDP that is bound to a port only
// loses its device, so that it would take what comes to the port at other devices.
func TestASocketThatRootHasClosedIsOpenedAgain(t *testing.T) {
	n := newNode(t, func(c *userspace.Config) { c.FullSyncPeriod = time.Nanosecond })
	n.servers(t)
	n.OnServiceAdd(service("web", 30080))
	n.set("web", 1)
	n.sync(t)
	n.mustServe(t, 30080, "1")
	at := netip.MustParseAddrPort("127.0.0.1:30080")
	for _, network := range []string{"tcp", "udp"} {
		netnstest.Check(t, n.ns.CloseSocket(network, at, "lo"))
	}
	n.sync(t)
	n.mustServe(t, 30080, "1")
	if err := n.ns.CloseSocket("udp", at, "lo"); err != nil {
		t.Errorf("no UDP socket is bound to lo: %v", err)
	}
}

// TestManyNodePorts: 2,000 node ports at localhost cost one descriptor each and no full sync.
// A change of one Service touches its own sockets only, and the budget's clients get the rest.
func TestManyNodePorts(t *testing.T) {
	const services, sockets = 1000, 2 * 1000 // in each family
	n := newNode(t)
	n.servers(t)
	full, before, limit := n.fullSyncs(), descriptors(t), n.engines[v1.IPv4Protocol].Abilities().Descriptors().Limit
	for i := range services {
		n.OnServiceAdd(service(fmt.Sprintf("s%d", i), int32(30000+i)))
		n.set(fmt.Sprintf("s%d", i), 1)
	}
	n.sync(t)
	engine, kernel := n.engines[v1.IPv4Protocol], n.kernel[v1.IPv4Protocol]
	perPort := float64(descriptors(t)-before) / (2 * sockets)
	t.Logf("%d node ports: %.2f descriptors for each and family", sockets, perPort)
	if perPort > 1.01 {
		t.Errorf("%.2f descriptors for each node port, want 1", perPort)
	}
	if left := engine.Abilities().Descriptors().Limit; limit-left != 2*sockets {
		t.Errorf("the budget of clients shrank by %d descriptors, want %d", limit-left, 2*sockets)
	}
	open, updates := inodes(t), len(kernel.Updates())
	n.set("s7", 2)
	n.sync(t)
	n.OnServiceDelete(service("s8", 30008))
	n.sync(t)
	gone := 0
	now := inodes(t)
	for inode := range open {
		if !now[inode] {
			gone++
		}
	}
	if gone != 4 { // TCP and UDP in both families
		t.Errorf("%d of %d sockets were closed, want 4", gone, len(open))
	}
	n.mustServe(t, 30007, "2")
	for _, u := range kernel.Updates()[updates:] {
		if u.Full || len(u.Changes) > 2 {
			t.Errorf("the wrapped engine got a full update (%v) or %d changes, want those of one Service", u.Full, len(u.Changes))
		}
	}
	if got := n.fullSyncs(); got != full {
		t.Errorf("%d full syncs for node ports, want none", got-full)
	}
}

// descriptors counts the open descriptors of the process.
func descriptors(t *testing.T) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	netnstest.Check(t, err)
	return len(files)
}

// inodes lists the sockets of the process.
func inodes(t *testing.T) map[string]bool {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	netnstest.Check(t, err)
	all := map[string]bool{}
	for _, f := range files {
		if to, err := os.Readlink("/proc/self/fd/" + f.Name()); err == nil && len(to) > 6 && to[:6] == "socket" {
			all[to] = true
		}
	}
	return all
}

// Other hosts do not reach localhost, even if the node routes packets to 127.0.0.1.
func TestOtherHostsDoNotReachLocalhost(t *testing.T) {
	n := newNode(t)
	n.servers(t)
	n.OnServiceAdd(service("web", 30080))
	n.set("web", 1)
	n.sync(t)
	other := netnstest.New(t)
	netnstest.Connect(t, n.ns, []string{"198.51.100.1/24"}, other, []string{"198.51.100.2/24"})
	netnstest.Check(t, n.ns.SetSysctl("net/ipv4/conf/all/route_localnet", "1"))
	netnstest.Check(t, other.SetSysctl("net/ipv4/conf/all/route_localnet", "1"))
	plain, err := n.ns.Listen(t.Context(), "tcp4", "127.0.0.1:9090") // a program of the node, as a control
	netnstest.Check(t, err)
	defer func() { _ = plain.Close() }()
	netnstest.Check(t, leaveLoopback(other))
	ask := func(port string) error {
		conn, err := dialWithin(t, other, "127.0.0.1:"+port)
		if err == nil {
			_ = conn.Close()
		}
		return err
	}
	if err := ask("9090"); err != nil {
		t.Fatalf("the control is not reachable, so this test shows nothing: %v", err)
	}
	if err := ask("30080"); err == nil {
		t.Error("another host reaches a node port at 127.0.0.1")
	}
}

func dialWithin(t *testing.T, ns *netns.NS, to string) (net.Conn, error) {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), 5*time.Second)
	defer stop()
	return ns.DialFrom(ctx, "tcp4", netip.MustParseAddr("198.51.100.2"), to)
}

// leaveLoopback routes 127.0.0.0/8 to the node.
func leaveLoopback(ns *netns.NS) error {
	return ns.Do(func() error {
		for _, args := range [][]string{{"address", "delete", "127.0.0.1/8", "dev", "lo"}, {"route", "add", "127.0.0.0/8", "via", "198.51.100.1"}} {
			if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
				return fmt.Errorf("ip %v: %w: %s", args, err, out)
			}
		}
		return nil
	})
}

func isRefused(err error) bool { return errors.Is(err, netns.ErrRefused) }

func isTaken(err error) bool { return errors.Is(err, syscall.EADDRINUSE) }
