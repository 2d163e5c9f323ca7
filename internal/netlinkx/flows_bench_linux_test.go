package netlinkx

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// BenchmarkList lists 100,000 flows with an answer: all, those without one, or those of a frontend that has none.
func BenchmarkList(b *testing.B) {
	ns := netnstest.New(b)
	s, err := Open(ns.Path())
	netnstest.Check(b, err)
	defer s.Close()
	vip, server := netip.MustParseAddrPort("10.96.0.1:53"), netip.MustParseAddrPort("10.244.0.1:53")
	for i := range 100_000 {
		client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(i >> 16), byte(i >> 8)}), 51200+uint16(i&255))
		attrs := slices.Concat(
			direction(nl.CTA_TUPLE_ORIG, unix.IPPROTO_UDP, client, vip), direction(nl.CTA_TUPLE_REPLY, unix.IPPROTO_UDP, server, client),
			appendAttribute(nil, nl.CTA_TIMEOUT, []byte{0, 0, 2, 0}),
			appendAttribute(nil, nl.CTA_STATUS, []byte{0, 0, 0, 8 | ipsSeenReply})) // 8: IPS_CONFIRMED
		netnstest.Check(b, s.ask(nl.IPCTNL_MSG_CT_NEW, unix.NLM_F_CREATE|unix.NLM_F_ACK, unix.AF_INET, attrs, nil))
	}
	for name, which := range map[string]Which{"all": {}, "unanswered": {Unanswered: true}, "of one frontend": {Protocol: unix.IPPROTO_UDP, To: netip.MustParseAddrPort("10.96.0.2:53")}} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				netnstest.Check(b, s.list(b.Context(), unix.AF_INET, which, func(*Flow) {}))
			}
		})
	}
}
