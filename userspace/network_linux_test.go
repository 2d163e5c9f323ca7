package userspace

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// side holds the addresses of an IP family in the network.
type side struct {
	family     v1.IPFamily
	node, away netip.Addr   // the ends of the cable
	more       []netip.Addr // of the node
	vips       []netip.Addr
	vipRange   netip.Prefix
}

func sides() []side {
	addr := netip.MustParseAddr
	return []side{
		{
			family: v1.IPv4Protocol, node: addr("192.0.2.1"), away: addr("192.0.2.2"),
			more:     []netip.Addr{addr("192.0.2.11"), addr("192.0.2.12")},
			vips:     []netip.Addr{addr("198.51.100.10"), addr("198.51.100.20")},
			vipRange: netip.MustParsePrefix("198.51.100.0/24"),
		},
		{
			family: v1.IPv6Protocol, node: addr("2001:db8::1"), away: addr("2001:db8::2"),
			more:     []netip.Addr{addr("2001:db8::11"), addr("2001:db8::12")},
			vips:     []netip.Addr{addr("2001:db8:1::10"), addr("2001:db8:1::20")},
			vipRange: netip.MustParsePrefix("2001:db8:1::/64"),
		},
	}
}

// network is a node and a remote host. The host is a client, and has the endpoints "one"
// at port 8081 and "two" at port 8082. It routes VIPs to the node.
type network struct{ node, away *netns.NS }

func newNetwork(t *testing.T) *network {
	t.Helper()
	n := &network{node: netnstest.New(t), away: netnstest.New(t)}
	netnstest.Connect(t, n.node, []string{"192.0.2.1/24", "2001:db8::1/64"}, n.away, []string{"192.0.2.2/24", "2001:db8::2/64"})
	for _, s := range sides() {
		netnstest.Check(t, n.away.AddRoute(s.vipRange, s.node))
	}
	netnstest.Serve(t, n.away, "one", 8081)
	netnstest.Serve(t, n.away, "two", 8082)
	return n
}

func (s *side) one() netip.AddrPort { return netip.AddrPortFrom(s.away, 8081) }
func (s *side) two() netip.AddrPort { return netip.AddrPortFrom(s.away, 8082) }

// eachFamily runs a test for both IP families, each in a new network.
func eachFamily(t *testing.T, test func(t *testing.T, n *network, s *side)) {
	t.Helper()
	for _, s := range sides() {
		t.Run(string(s.family), func(t *testing.T) { test(t, newNetwork(t), &s) })
	}
}

// mustAnswer checks which server answers a request.
func mustAnswer(t *testing.T, from *netns.NS, protocol string, to netip.AddrPort, want string) {
	t.Helper()
	if got, err := netns.Ask(t.Context(), from, protocol, to, netns.AskOptions{Timeout: patience}); err != nil || got.Server != want {
		t.Errorf("%s to %v: answer of %q, %v, want %q", protocol, to, got.Server, err, want)
	}
}

// mustNotAnswer checks that a request fails, with want unless that is nil.
func mustNotAnswer(t *testing.T, from *netns.NS, protocol string, to netip.AddrPort, want error) {
	t.Helper()
	var got netns.Answer
	var err error
	poll.Soon(func() bool { // the kernel limits its ICMP messages, and a refusal during connect(2) is reported only at the second packet
		got, err = netns.Ask(t.Context(), from, protocol, to, netns.AskOptions{Timeout: 5 * time.Second})
		return want == nil || !errors.Is(err, netns.ErrTimeout) || errors.Is(err, want)
	})
	if err == nil || want != nil && !errors.Is(err, want) {
		t.Errorf("%s to %v: answer of %q, %v, want %v", protocol, to, got.Server, err, want)
	}
}

func vipFrontend(vip netip.Addr, port uint16) desired.Frontend {
	return clusterIP(vip.String(), port)
}

// program applies a full update.
func program(t *testing.T, e *Engine, globals desired.Globals, services ...*desired.Service) {
	t.Helper()
	if _, err := e.Apply(t.Context(), desired.Update{Family: e.family, Full: true, Globals: globals, Changes: desired.ChangesTo(services...)}); err != nil {
		t.Fatalf("Apply = %v, want nil", err)
	}
}

func bothProtocols() map[string]v1.Protocol {
	return map[string]v1.Protocol{"tcp": v1.ProtocolTCP, "udp": v1.ProtocolUDP}
}

// inNode returns an engine on the node, which is closed at the end of the test.
func inNode(t *testing.T, n *network, family v1.IPFamily, config Config) *Engine {
	t.Helper()
	config.NetNS = n.node.Path()
	return engineOf(t, family, proxier.Deps{}, config)
}

// dialIn opens a connection inside a namespace, which is closed at the end of the test.
func dialIn(t *testing.T, ns *netns.NS, network string, to netip.AddrPort) net.Conn {
	t.Helper()
	conn, err := ns.Dial(t.Context(), network, to.String())
	if err != nil {
		t.Fatalf("dial %v: %v", to, err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(patience))
	return conn
}
