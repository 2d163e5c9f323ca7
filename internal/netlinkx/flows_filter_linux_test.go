package netlinkx

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// A dump has all entries that it should list, and no others where the kernel compares right.
func TestADumpListsWhatItShould(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	s, err := Open(ns.Path())
	netnstest.Check(t, err)
	defer s.Close()
	type entry struct {
		protocol uint8
		to       netip.AddrPort
	}
	var all []entry
	for _, addr := range []string{"10.96.0.1", "10.96.0.2", "fd00:96::1", "fd00:96::2"} {
		for _, port := range []uint16{53, 80} {
			for _, protocol := range []uint8{unix.IPPROTO_UDP, unix.IPPROTO_TCP, unix.IPPROTO_SCTP} {
				all = append(all, entry{protocol, netip.AddrPortFrom(netip.MustParseAddr(addr), port)})
			}
		}
	}
	family := func(a netip.Addr) uint8 {
		if a.Is6() {
			return unix.AF_INET6
		}
		return unix.AF_INET
	}
	for _, e := range all {
		s.create(t, family(e.to.Addr()), e.protocol, e.to)
	}
	for name, c := range map[string]struct {
		family uint8
		which  Which
		others bool
	}{
		"all of IPv4":              {unix.AF_INET, Which{}, false},
		"all of IPv6":              {unix.AF_INET6, Which{}, false},
		"unanswered":               {unix.AF_INET, Which{Unanswered: true}, false},
		"one protocol":             {unix.AF_INET6, Which{Protocol: unix.IPPROTO_TCP}, false},
		"one address":              {unix.AF_INET, Which{To: netip.MustParseAddrPort("10.96.0.2:0")}, false},
		"one address of IPv6":      {unix.AF_INET6, Which{To: netip.MustParseAddrPort("[fd00:96::2]:0")}, true},
		"one port":                 {unix.AF_INET, Which{Protocol: unix.IPPROTO_UDP, To: netip.AddrPortFrom(netip.Addr{}, 53)}, false},
		"one frontend":             {unix.AF_INET, Which{Protocol: unix.IPPROTO_TCP, To: netip.MustParseAddrPort("10.96.0.1:80")}, false},
		"one frontend of IPv6":     {unix.AF_INET6, Which{Protocol: unix.IPPROTO_UDP, To: netip.MustParseAddrPort("[fd00:96::1]:53")}, true},
		"unanswered, one frontend": {unix.AF_INET, Which{Unanswered: true, Protocol: unix.IPPROTO_TCP, To: netip.MustParseAddrPort("10.96.0.1:80")}, false},
		"one frontend of SCTP":     {unix.AF_INET, Which{Protocol: unix.IPPROTO_SCTP, To: netip.MustParseAddrPort("10.96.0.1:80")}, true},
	} {
		var want, got []entry
		for _, e := range all {
			w := &c.which
			if family(e.to.Addr()) == c.family && (w.Protocol == 0 || w.Protocol == e.protocol) &&
				(!w.To.Addr().IsValid() || w.To.Addr() == e.to.Addr()) && (w.To.Port() == 0 || w.To.Port() == e.to.Port()) {
				want = append(want, e)
			}
		}
		netnstest.Check(t, s.list(t.Context(), c.family, c.which, func(f *Flow) { got = append(got, entry{f.Protocol, f.Destination}) }))
		missing := slices.ContainsFunc(want, func(e entry) bool { return !slices.Contains(got, e) })
		if missing || len(got) != len(want) && !c.others {
			t.Errorf("%s: the kernel lists %v, want %v", name, got, want)
		}
	}
}

// create makes an entry without an answer and without translation.
func (s *Socket) create(t *testing.T, family, protocol uint8, to netip.AddrPort) {
	t.Helper()
	client := netip.MustParseAddr("198.51.100.9")
	if family == unix.AF_INET6 {
		client = netip.MustParseAddr("2001:db8::9")
	}
	const clientPort = 4321
	from := netip.AddrPortFrom(client, clientPort)
	attrs := slices.Concat(direction(nl.CTA_TUPLE_ORIG, protocol, from, to), direction(nl.CTA_TUPLE_REPLY, protocol, to, from), appendAttribute(nil, nl.CTA_TIMEOUT, []byte{0, 0, 2, 0}))
	if protocol == unix.IPPROTO_TCP {
		const state = 1 // CTA_PROTOINFO_TCP_STATE
		attrs = append(attrs, nest(nl.CTA_PROTOINFO, nest(nl.CTA_PROTOINFO_TCP, appendAttribute(nil, state, []byte{TCPSynSent})))...)
	}
	netnstest.Check(t, s.ask(nl.IPCTNL_MSG_CT_NEW, unix.NLM_F_CREATE|unix.NLM_F_ACK, family, attrs, nil))
}

// direction is one direction of an entry.
func direction(typ uint16, protocol uint8, from, to netip.AddrPort) []byte {
	source, destination := uint16(nl.CTA_IP_V4_SRC), uint16(nl.CTA_IP_V4_DST)
	if to.Addr().Is6() {
		source, destination = nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	port := func(p uint16) []byte { return []byte{byte(p >> 8), byte(p)} }
	return nest(typ,
		nest(nl.CTA_TUPLE_IP, appendAttribute(nil, source, from.Addr().AsSlice()), appendAttribute(nil, destination, to.Addr().AsSlice())),
		nest(nl.CTA_TUPLE_PROTO, appendAttribute(nil, nl.CTA_PROTO_NUM, []byte{protocol}),
			appendAttribute(nil, nl.CTA_PROTO_SRC_PORT, port(from.Port())), appendAttribute(nil, nl.CTA_PROTO_DST_PORT, port(to.Port()))))
}
