package userspace

import (
	"net"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// Answers come from the node address that a remote client sent to, for connected and
// unconnected sockets.
func TestEveryAddressOfANodeAnswersForItself(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		for _, addr := range s.more {
			netnstest.Check(t, n.node.AddAddrs("eth0", netip.PrefixFrom(addr, s.vipRange.Bits())))
		}
		everywhere := netip.PrefixFrom(s.node, 0).Masked()
		for name, c := range map[string]struct {
			config  Config
			globals desired.Globals
		}{
			"proxy ports": {config: Config{Listen: []netip.Addr{everywhere.Addr()}, Ports: PortRange{30080, 30080}}},
			"node ports":  {Config{AtFrontends: true}, desired.Globals{NodePortAddresses: []netip.Prefix{everywhere}}},
		} {
			t.Run(name, func(t *testing.T) {
				e := inNode(t, n, s.family, c.config)
				program(t, e, c.globals, servicePort("web", v1.ProtocolUDP, []desired.Frontend{nodePort(30080)}, s.one()))
				for _, addr := range append(s.more, s.node) {
					to := netip.AddrPortFrom(addr, 30080)
					mustAnswer(t, n.away, "udp", to, "one") // by a connected socket
					mustAnswer(t, n.node, "udp", to, "one")
					mustComeFrom(t, n, s, to)
				}
			})
		}
	})
}

// mustComeFrom sends a datagram from an unconnected socket.
func mustComeFrom(t *testing.T, n *network, s *side, to netip.AddrPort) {
	t.Helper()
	conn, err := n.away.ListenPacket(t.Context(), "udp", netip.AddrPortFrom(s.away, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	udp, ok := conn.(*net.UDPConn)
	if !ok {
		t.Fatalf("a socket of type %T, want UDP", conn)
	}
	if _, from := askFrom(t, udp, to, "?\n"); from != to {
		t.Errorf("asked %v, answer from %v", to, from)
	}
}

// Answers from a link-local address need the interface.
func TestALinkLocalAddressAnswersForItself(t *testing.T) {
	n := newNetwork(t)
	s := sides()[1]
	node, away := netip.MustParseAddr("fe80::1"), netip.MustParseAddr("fe80::2")
	netnstest.Check(t, n.node.AddAddrs("eth0", netip.PrefixFrom(node, 64)))
	netnstest.Check(t, n.away.AddAddrs("eth0", netip.PrefixFrom(away, 64)))
	e := inNode(t, n, s.family, Config{Listen: []netip.Addr{netip.IPv6Unspecified()}, Ports: PortRange{30080, 30080}})
	program(t, e, desired.Globals{}, servicePort("web", v1.ProtocolUDP, []desired.Frontend{nodePort(30080)}, s.one()))
	mustAnswer(t, n.away, "udp", netip.AddrPortFrom(node.WithZone("eth0"), 30080), "one")
}
