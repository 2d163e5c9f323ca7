package userspace

import (
	"context"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

const dummyName = "vips"

// dummy is an Addresses that uses a bridge without ports, since not every kernel has
// dummy devices.
type dummy struct{ ns *netns.NS }

func newDummy(t *testing.T, ns *netns.NS) dummy {
	t.Helper()
	netnstest.Check(t, ns.AddBridge(dummyName))
	return dummy{ns}
}

func (d dummy) Add(_ context.Context, addr netip.Addr) error {
	return d.ns.AddAddrs(dummyName, netip.PrefixFrom(addr, addr.BitLen()))
}

func (d dummy) Remove(_ context.Context, addr netip.Addr) error {
	return d.ns.RemoveAddr(dummyName, netip.PrefixFrom(addr, addr.BitLen()))
}

func mustHaveAddr(t *testing.T, ns *netns.NS, addr netip.Addr, want bool) {
	t.Helper()
	local, err := lightdeps.LocalAddresses(ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	if got := slices.Contains(local, addr); got != want {
		t.Errorf("address %v is local: %v, want %v (of %v)", addr, got, want, local)
	}
}

// Two VIPs with two service ports each serve local and remote clients until their last
// port is removed (W-U6).
func TestVIPsOnADummyDevice(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		e := inNode(t, n, s.family, Config{AtFrontends: true, Addresses: newDummy(t, n.node)})
		var services []*desired.Service
		for _, protocol := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
			services = append(services, servicePort("both", protocol,
				[]desired.Frontend{vipFrontend(s.vips[0], 80), vipFrontend(s.vips[1], 80)}, s.one()))
		}
		services = append(services, servicePort("second", v1.ProtocolTCP, []desired.Frontend{vipFrontend(s.vips[1], 443)}, s.two()))
		program(t, e, desired.Globals{}, services...)
		for protocol := range bothProtocols() {
			for _, client := range []*netns.NS{n.away, n.node} {
				for _, vip := range s.vips {
					mustAnswer(t, client, protocol, netip.AddrPortFrom(vip, 80), "one")
				}
			}
		}
		second := netip.AddrPortFrom(s.vips[1], 443)
		mustAnswer(t, n.away, "tcp", second, "two")

		program(t, e, desired.Globals{}, services[2])
		mustHaveAddr(t, n.node, s.vips[0], false)
		mustAnswer(t, n.away, "tcp", second, "two")
		mustNotAnswer(t, n.away, "tcp", netip.AddrPortFrom(s.vips[1], 80), netns.ErrRefused)
		if err := e.Close(); err != nil {
			t.Errorf("Close = %v, want nil", err)
		}
		mustHaveAddr(t, n.node, s.vips[1], false)
		mustHaveAddr(t, n.node, s.node, true)
	})
}

// Without Addresses, a VIP that is not local is an error of its Service.
func TestAnAddressThatIsNotHereIsAnErrorOfItsService(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		e := inNode(t, n, s.family, Config{AtFrontends: true})
		vip := servicePort("vip", v1.ProtocolTCP, []desired.Frontend{vipFrontend(s.vips[0], 80)}, s.one())
		nodePorts := servicePort("node-port", v1.ProtocolTCP, []desired.Frontend{nodePort(30080)}, s.one())
		here := netip.PrefixFrom(s.node, s.node.BitLen())
		update := desired.Update{
			Full: true, Changes: desired.ChangesTo(vip, nodePorts),
			Globals: desired.Globals{NodePortAddresses: []netip.Prefix{here}},
		}
		if failureOf(e.Apply(t.Context(), update)) == nil {
			t.Error("Apply = nil, want an error of the Service whose VIP is not local")
		}
		mustAnswer(t, n.away, "tcp", netip.AddrPortFrom(s.node, 30080), "one")
		netnstest.Check(t, n.node.AddAddrs("lo", netip.PrefixFrom(s.vips[0], s.vips[0].BitLen())))
		if err := failureOf(e.Apply(t.Context(), update)); err != nil {
			t.Errorf("Apply = %v with the address, want nil", err)
		}
		mustAnswer(t, n.away, "tcp", netip.AddrPortFrom(s.vips[0], 80), "one")
	})
}
