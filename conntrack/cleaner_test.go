//go:build linux

package conntrack

import (
	"net/netip"
	"testing"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
)

// The kernel is asked for what all flows of a check have in common, and for no less.
func TestTheKernelListsWhatTheFlowsHaveInCommon(t *testing.T) {
	t.Parallel()
	flows := func(vip string, protocol desired.Protocol, port uint16) desired.Flows {
		f := desired.Flows{Key: desired.Key{Protocol: protocol, Port: port}} // a node port
		if vip != "" {
			f.Key.VIP = netip.MustParseAddr(vip)
		}
		return f
	}
	const udp, tcp = desired.UDP, desired.TCP
	dns, otherPort, otherVIP, nodePort := flows("10.96.0.10", udp, 53), flows("10.96.0.10", udp, 54), flows("10.96.0.11", udp, 53), flows("", udp, 30053)
	overTCP := flows("10.96.0.10", tcp, 53)
	to := func(addr string, port uint16) netip.AddrPort {
		if addr == "" {
			return netip.AddrPortFrom(netip.Addr{}, port)
		}
		return netip.AddrPortFrom(netip.MustParseAddr(addr), port)
	}
	for name, c := range map[string]struct {
		check    desired.FlowCheck
		answered bool
		want     netlinkx.Which
	}{
		"one frontend":         {desired.FlowCheck{Frontends: []desired.Flows{dns}}, false, netlinkx.Which{Protocol: uint8(udp), To: to("10.96.0.10", 53)}},
		"two ports":            {desired.FlowCheck{Frontends: []desired.Flows{dns, otherPort}}, false, netlinkx.Which{Protocol: uint8(udp), To: to("10.96.0.10", 0)}},
		"two addresses":        {desired.FlowCheck{Frontends: []desired.Flows{dns, otherVIP}}, false, netlinkx.Which{Protocol: uint8(udp), To: to("", 53)}},
		"a node port too":      {desired.FlowCheck{Frontends: []desired.Flows{dns, nodePort}}, false, netlinkx.Which{Protocol: uint8(udp)}},
		"a node port":          {desired.FlowCheck{Frontends: []desired.Flows{nodePort}}, false, netlinkx.Which{Protocol: uint8(udp), To: to("", 30053)}},
		"two protocols":        {desired.FlowCheck{Frontends: []desired.Flows{dns}, Untranslated: []desired.Flows{overTCP}}, false, netlinkx.Which{To: to("10.96.0.10", 0)}},
		"untranslated":         {desired.FlowCheck{Untranslated: []desired.Flows{overTCP}}, false, netlinkx.Which{Unanswered: true, Protocol: uint8(tcp), To: to("10.96.0.10", 53)}},
		"of processes":         {desired.FlowCheck{Untranslated: []desired.Flows{overTCP}}, true, netlinkx.Which{Protocol: uint8(tcp), To: to("10.96.0.10", 53)}},
		"connections that end": {desired.FlowCheck{End: []desired.Flows{overTCP}}, false, netlinkx.Which{Protocol: uint8(tcp), To: to("10.96.0.10", 53)}},
		"all of a range":       {desired.FlowCheck{Frontends: []desired.Flows{dns}, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}}, false, netlinkx.Which{}},
		"none":                 {desired.FlowCheck{}, false, netlinkx.Which{Unanswered: true}},
	} {
		if got := which(&c.check, c.answered); got != c.want {
			t.Errorf("%s: lists %+v, want %+v", name, got, c.want)
		}
	}
}
