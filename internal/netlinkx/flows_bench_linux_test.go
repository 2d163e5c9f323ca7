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
	for i := range 100_000 {
		client, port, vip, server := []byte{198, 18, byte(i >> 16), byte(i >> 8)}, []byte{200, byte(i)}, []byte{10, 96, 0, 1}, []byte{10, 244, 0, 1}
		attrs := slices.Concat(
			udp(nl.CTA_TUPLE_ORIG, client, vip, port, []byte{0, 53}), udp(nl.CTA_TUPLE_REPLY, server, client, []byte{0, 53}, port),
			appendAttribute(nil, nl.CTA_TIMEOUT, []byte{0, 0, 2, 0}),
			appendAttribute(nil, nl.CTA_STATUS, []byte{0, 0, 0, 8 | ipsSeenReply})) // 8: IPS_CONFIRMED
		netnstest.Check(b, s.ask(nl.IPCTNL_MSG_CT_NEW, unix.NLM_F_CREATE|unix.NLM_F_ACK, unix.AF_INET, attrs, nil))
	}
	for name, which := range map[string]Which{"all": {}, "unanswered": {Unanswered: true}, "of one frontend": {Protocol: unix.IPPROTO_UDP, To: netip.MustParseAddrPort("10.96.0.2:53")}} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				netnstest.Check(b, s.list(unix.AF_INET, which, func(*Flow) {}))
			}
		})
	}
}

func udp(typ uint16, from, to, fromPort, toPort []byte) []byte {
	return nest(typ,
		nest(nl.CTA_TUPLE_IP, appendAttribute(nil, nl.CTA_IP_V4_SRC, from), appendAttribute(nil, nl.CTA_IP_V4_DST, to)),
		nest(nl.CTA_TUPLE_PROTO, appendAttribute(nil, nl.CTA_PROTO_NUM, []byte{unix.IPPROTO_UDP}),
			appendAttribute(nil, nl.CTA_PROTO_SRC_PORT, fromPort), appendAttribute(nil, nl.CTA_PROTO_DST_PORT, toPort)))
}
