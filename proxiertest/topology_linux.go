package proxiertest

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// Topology is a dual-stack network of hosts around one node. Each host is a network
// namespace of the test.
//
//	         Client 198.51.100.2, .3, .100-.119       LocalPods 10.244.1.2, .18, .34
//	             │                                        │ │ │
//	198.51.100.1 │                                        │ │ │ 10.244.1.1, .17, .33
//	           Node ──────────────────────────────────────┴─┴─┘   lo 192.0.2.20
//	192.0.2.10 │
//	           │
//	 192.0.2.1 │                                          10.244.2.1, .17, .33
//	          Router ─────────────────────────────────────┬─┬─┐   lo 203.0.113.1
//	                                                      │ │ │
//	                                                   RemotePods 10.244.2.2, .18, .34
//
// All hosts have the node as default route, and the node has the router. So packets to
// VIPs, and answers of remote pods to clients and to local pods, go through the node. Pods
// serve on port 8080, over TCP and UDP. The last local pod also has every address of
// 10.244.64.0/20 and fd00:10:244:64::/64.
//
// The IPv6 addresses are 2001:db8:c::/64 around the client, 2001:db8:2::/64
// between node and router, and fd00:10:244:1::/64 and fd00:10:244:2::/64 for pods.
type Topology struct {
	Node, Client, Router  *Host
	LocalPods, RemotePods []*Host // three of each

	servers []*netns.Server
	mu      sync.Mutex // guards settling
	// settling is the Flush that has not begun yet, for all who ask meanwhile.
	settling *settling
	begun    sync.Mutex // one Flush runs at a time
}

// settling is one run of Flush, for several callers.
type settling struct {
	done chan struct{} // closed when err is set
	err  error
}

// Flush returns when whatever the hosts sent before has come to its end: it is dropped, answered, or
// taken by a socket that is no server of the Topology. Given as AskOptions.Flusher, it shows that a packet
// without an answer got none, and not a late one.
func (t *Topology) Flush(ctx context.Context) error {
	t.mu.Lock()
	run := t.settling
	if run == nil {
		run = &settling{done: make(chan struct{})}
		t.settling = run
		go t.settle(context.WithoutCancel(ctx), run)
	}
	t.mu.Unlock()
	<-run.done
	return run.err
}

func (t *Topology) settle(ctx context.Context, run *settling) {
	t.begun.Lock()
	defer t.begun.Unlock()
	t.mu.Lock()
	t.settling = nil // whoever asks from now on may have sent too late for this run
	t.mu.Unlock()
	defer close(run.done)
	if run.err = netns.Flush(); run.err != nil {
		return
	}
	for _, server := range t.servers {
		if run.err = server.Flush(ctx); run.err != nil {
			return
		}
	}
	run.err = netns.Flush() // the answers
}

// Host is one host of a Topology.
type Host struct {
	// Name is the name in the answers of its servers.
	Name string
	// Addrs are its addresses. The first of each family is the main one.
	Addrs []netip.Addr

	ns *netns.NS
}

// Answer is the answer of a server of a Topology.
type Answer struct {
	// Server is the name of the server.
	Server string
	// Source is the client's address as the server sees it.
	Source netip.AddrPort
	// Local is the destination of the packets as the server sees it.
	Local netip.AddrPort
}

// AskOptions are the options of Host.Ask and Host.Open.
type AskOptions struct {
	// From is the source address; with the zero value, routing chooses it.
	From netip.Addr
	// FromPort is the source port; 0 means any. It needs From.
	FromPort uint16
	// Timeout is how long to wait for the answer after the request is sent; 0 means 30s.
	Timeout time.Duration
	// Flusher is for a request that expects no answer: the Topology. If not nil, Ask calls its Flush when the
	// request is sent, from another goroutine or this one. Once it returns, all answers must have come: Ask
	// waits on only if it heard something.
	Flusher interface {
		Flush(ctx context.Context) error
	}
}

// Conn is a TCP connection, or a UDP socket with one peer, for several requests to the same
// server. Only one goroutine may use it at a time.
type Conn struct{ flow *netns.Flow }

// Ask sends a request, and returns the server's answer. Its errors are those of Host.Ask.
func (f *Conn) Ask(ctx context.Context) (Answer, error) {
	answer, err := f.flow.Ask(ctx)
	return Answer(answer), err
}

// Expect sets what AskOptions.Flusher is, for the requests from now on.
func (f *Conn) Expect(flusher interface {
	Flush(ctx context.Context) error
},
) {
	f.flow.Expect(flusher)
}

// SentAgain returns how many packets of a TCP connection the host had to send again.
func (f *Conn) SentAgain() (packets uint32, err error) { return f.flow.SentAgain() }

// Close closes the flow.
func (f *Conn) Close() error { return f.flow.Close() }

// Abort closes the flow; a TCP connection with a reset, so that its port is free at once.
func (f *Conn) Abort() error { return f.flow.Abort() }

// Errors of Host.Ask, for errors.Is.
var (
	// ErrRefused means that a TCP reset or an ICMP port unreachable came back.
	ErrRefused = netns.ErrRefused
	// ErrUnreachable means that the host or a router has no route.
	ErrUnreachable = netns.ErrUnreachable
	// ErrTimeout means that no packet came back.
	ErrTimeout = netns.ErrTimeout
	// ErrDroppedLocally means that the packet did not leave the host.
	ErrDroppedLocally = netns.ErrDroppedLocally
)

// Addr returns the host's main address of a family.
func (h *Host) Addr(family v1.IPFamily) netip.Addr {
	for _, addr := range h.Addrs {
		if familyOf(addr) == family {
			return addr
		}
	}
	return netip.Addr{}
}

// Ask opens a connection ("tcp") or sends a datagram ("udp") from the host, and returns
// the server's answer.
func (h *Host) Ask(ctx context.Context, network string, to netip.AddrPort, opts AskOptions) (Answer, error) {
	answer, err := netns.Ask(ctx, h.ns, network, to, netns.AskOptions(opts))
	return Answer(answer), err
}

// Open is Ask, but leaves the connection open for more requests.
func (h *Host) Open(ctx context.Context, network string, to netip.AddrPort, opts AskOptions) (*Conn, error) {
	flow, err := netns.Open(ctx, h.ns, network, to, netns.AskOptions(opts))
	if err != nil {
		return nil, err
	}
	return &Conn{flow}, nil
}

// Do calls f in the host's network namespace. Sockets that f opens and programs that it
// starts belong there; goroutines that it starts do not.
func (h *Host) Do(f func() error) error { return h.ns.Do(f) }

// NetNS returns the path of the host's network namespace, for Config.NetNS.
func (h *Host) NetNS() string { return h.ns.Path() }

// Config returns the configuration of a proxy for the node. It detects pods by the
// cluster's pod CIDRs.
func (t *Topology) Config() proxier.Config {
	return proxier.Config{
		NetNS: t.Node.NetNS(),
		Node: changetracker.Node{
			Name:      nodeName,
			Addresses: []netip.Addr{t.Node.Addr(v1.IPv4Protocol), t.Node.Addr(v1.IPv6Protocol)},
			PodCIDRs:  []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")},
		},
		Masquerade: proxier.Masquerade{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}},
	}
}

const (
	nodeName = "node"
	// podPort is where every pod serves.
	podPort = 8080
	// silentPort is where no pod answers.
	silentPort = 8081
	// servicePort is where the router serves, as a cloud's load balancer.
	servicePort = 80
	// hostPort is where a process of the node serves, in the range of node ports. None
	// serves at idleHostPort.
	hostPort, idleHostPort = 31999, 31998
	podsOfAKind            = 3
	clientAddrs            = 20
)

// NewTopology creates a network, which is deleted at the end of the test.
func NewTopology(tb testing.TB) *Topology {
	tb.Helper()
	t := &Topology{
		Node:   newHost(tb, "node", "192.0.2.10", "2001:db8:2::10", "192.0.2.20", "2001:db8:2::20", "198.51.100.1", "2001:db8:c::1"),
		Client: newHost(tb, "client", "198.51.100.2", "2001:db8:c::2", "198.51.100.3", "2001:db8:c::3"),
		Router: newHost(tb, "router", "192.0.2.1", "2001:db8:2::1"),
	}
	t.joinHosts(tb)
	t.LocalPods = t.addPods(tb, "pod", t.Node, 1)
	t.RemotePods = t.addPods(tb, "remote", t.Router, 2)
	t.addCrowd(tb)
	t.serve(tb, t.Node, hostPort)
	t.serve(tb, t.Router, servicePort)
	return t
}

func (t *Topology) serve(tb testing.TB, host *Host, port uint16) {
	tb.Helper()
	t.servers = append(t.servers, netnstest.Serve(tb, host.ns, host.Name, port))
}

func newHost(tb testing.TB, name string, addrs ...string) *Host {
	tb.Helper()
	host := &Host{Name: name, ns: netnstest.New(tb)}
	for _, addr := range addrs {
		host.Addrs = append(host.Addrs, netip.MustParseAddr(addr))
	}
	return host
}

// joinHosts connects node, client and router, with all addresses and routes except those
// of the pods.
func (t *Topology) joinHosts(tb testing.TB) {
	tb.Helper()
	for i := range clientAddrs {
		t.Client.Addrs = append(t.Client.Addrs,
			netip.AddrFrom4([4]byte{198, 51, 100, byte(100 + i)}),
			netip.MustParseAddr(fmt.Sprintf("2001:db8:c::1:%x", i)))
	}
	netnstest.Check(tb, netns.Connect(
		netns.Plug{NS: t.Node.ns, Link: "client", Addrs: prefixes(t.Node.Addrs[4:], 24, 64)},
		netns.Plug{NS: t.Client.ns, Link: "eth0", Addrs: prefixes(t.Client.Addrs, 24, 64)}))
	netnstest.Check(tb, netns.Connect(
		netns.Plug{NS: t.Node.ns, Link: "uplink", Addrs: prefixes(t.Node.Addrs[:2], 24, 64)},
		netns.Plug{NS: t.Router.ns, Link: "uplink", Addrs: prefixes(t.Router.Addrs, 24, 64)}))
	// Masquerading on a link does not use the addresses of lo.
	netnstest.Check(tb, t.Node.ns.AddAddrs("lo", prefixes(t.Node.Addrs[2:4], 32, 128)...))
	for _, family := range families() {
		netnstest.Check(tb, t.Node.ns.AddAddrs("lo", prefixes([]netip.Addr{localVIP(family), localServiceIP(family)}, 32, 128)...))
		netnstest.Check(tb, t.Router.ns.AddAddrs("lo", prefixes([]netip.Addr{cloudVIP(family)}, 32, 128)...))
	}
	netnstest.Check(tb, t.Node.ns.Forward())
	netnstest.Check(tb, t.Router.ns.Forward())
	defaultRoutes(tb, t.Client, t.Node.Addrs[4:])
	defaultRoutes(tb, t.Router, t.Node.Addrs)
	defaultRoutes(tb, t.Node, t.Router.Addrs)
	for i, addr := range t.Node.Addrs[2:4] { // they are in the prefix of the router's link, but on lo
		netnstest.Check(tb, t.Router.ns.AddRoute(netip.PrefixFrom(addr, addr.BitLen()), t.Node.Addrs[i]))
	}
}

// addPods connects pods to a host, each with its own prefix.
func (t *Topology) addPods(tb testing.TB, kind string, gateway *Host, subnet byte) []*Host {
	tb.Helper()
	pods := make([]*Host, podsOfAKind)
	for i := range pods {
		v4 := netip.AddrFrom4([4]byte{10, 244, subnet, byte(16*i + 1)})
		v6 := netip.MustParseAddr(fmt.Sprintf("fd00:10:244:%d:%d::1", subnet, i))
		pods[i] = newHost(tb, fmt.Sprintf("%s-%d", kind, i), v4.Next().String(), v6.Next().String())
		gateway.Addrs = append(gateway.Addrs, v4, v6)
		netnstest.Check(tb, netns.Connect(
			netns.Plug{NS: gateway.ns, Link: fmt.Sprintf("pod%d", i), Addrs: prefixes([]netip.Addr{v4, v6}, 28, 80)},
			netns.Plug{NS: pods[i].ns, Link: "eth0", Addrs: prefixes(pods[i].Addrs, 28, 80)}))
		defaultRoutes(tb, pods[i], []netip.Addr{v4, v6})
		t.serve(tb, pods[i], podPort)
	}
	return pods
}

// addCrowd gives the last local pod addresses for thousands of endpoints.
func (t *Topology) addCrowd(tb testing.TB) {
	tb.Helper()
	pod := t.LocalPods[podsOfAKind-1]
	for i, extra := range []string{"10.244.64.0/20", "fd00:10:244:64::/64"} {
		prefix := netip.MustParsePrefix(extra)
		netnstest.Check(tb, pod.ns.AddRange(prefix))
		netnstest.Check(tb, t.Node.ns.AddRoute(prefix, pod.Addrs[i]))
	}
}

// crowdAddr is the n-th address of the last local pod's range.
func crowdAddr(family v1.IPFamily, n int) netip.Addr {
	return familyAddr(family, fmt.Sprintf("10.244.%d.%d", 64+n>>8, n&0xff), fmt.Sprintf("fd00:10:244:64::%x", n))
}

// localVIP is a load balancer IP that is also an address of the node.
func localVIP(family v1.IPFamily) netip.Addr {
	return familyAddr(family, "198.19.255.1", "2001:db8:19:ffff::1")
}

// localServiceIP is an address of the node in the ranges of ClusterIPs, such as that of a
// DNS cache on the node.
func localServiceIP(family v1.IPFamily) netip.Addr {
	return familyAddr(family, "10.96.255.1", "fd00:10:96::ff01")
}

// cloudVIP is the address of a load balancer outside of the node: the router.
func cloudVIP(family v1.IPFamily) netip.Addr {
	return familyAddr(family, "203.0.113.1", "2001:db8:113::1")
}

// either returns one of two values, by IP family.
func either[T any](family v1.IPFamily, four, six T) T {
	if family == v1.IPv4Protocol {
		return four
	}
	return six
}

// familyAddr returns one of two addresses, by IP family.
func familyAddr(family v1.IPFamily, four, six string) netip.Addr {
	return netip.MustParseAddr(either(family, four, six))
}

// inBoth returns the addresses of both IP families.
func inBoth(of func(v1.IPFamily) netip.Addr) []string {
	return []string{of(v1.IPv4Protocol).String(), of(v1.IPv6Protocol).String()}
}

// defaultRoutes adds a default route for each family.
func defaultRoutes(tb testing.TB, host *Host, via []netip.Addr) {
	tb.Helper()
	netnstest.Check(tb, host.ns.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), via[0]))
	netnstest.Check(tb, host.ns.AddRoute(netip.MustParsePrefix("::/0"), via[1]))
}

func prefixes(addrs []netip.Addr, bits4, bits6 int) []netip.Prefix {
	nets := make([]netip.Prefix, len(addrs))
	for i, addr := range addrs {
		nets[i] = netip.PrefixFrom(addr, either(familyOf(addr), bits4, bits6))
	}
	return nets
}
