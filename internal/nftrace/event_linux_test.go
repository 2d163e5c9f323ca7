package nftrace

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nftext"
)

// encoded is an event as the kernel sends it.
func encoded(tb testing.TB) []byte {
	tb.Helper()
	ae := netlink.NewAttributeEncoder()
	ae.ByteOrder = binary.BigEndian
	ae.String(traceTable, "firewall")
	ae.String(traceChain, "forward")
	ae.Uint64(traceHandle, 7)
	ae.Uint32(traceType, 3)
	ae.Uint32(traceID, 99)
	ae.Nested(traceResult, func(ae *netlink.AttributeEncoder) error {
		ae.Uint32(1, uint32(0xfffffffd)) // NFTA_VERDICT_CODE: NFT_JUMP
		ae.String(2, "deep")             // NFTA_VERDICT_CHAIN
		return nil
	})
	header := make([]byte, 20)
	header[0] = 0x45
	copy(header[12:], netip.MustParseAddr("192.0.2.9").AsSlice())
	copy(header[16:], netip.MustParseAddr("10.96.0.10").AsSlice())
	ae.Bytes(traceHeader, header)
	ae.Bytes(traceTransport, binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, 40000), 80))
	ae.Uint16(traceOutputType, unix.ARPHRD_LOOPBACK)
	ae.Uint32(traceCtState, 1<<3) // NF_CT_STATE_BIT(IP_CT_NEW)
	data, err := ae.Encode()
	if err != nil {
		tb.Fatal(err)
	}
	return append([]byte{unix.NFPROTO_INET, 0, 0, 0}, data...)
}

func TestAnEventIsDecoded(t *testing.T) {
	t.Parallel()
	got, ok := parse(netlinkx.Message{Type: msgTrace, Body: encoded(t)})
	want := event{
		MatchedRule: MatchedRule{Family: "inet", Table: "firewall", Chain: "forward", Handle: 7, Verdict: "jump deep"},
		id:          99, source: netip.MustParseAddrPort(client), destination: netip.MustParseAddrPort(vip), loopback: true, state: "new",
	}
	if !ok || got != want {
		t.Errorf("parse = %+v, %v\nwant %+v", got, ok, want)
	}
}

// FuzzParse: no message of the kernel, nor a damaged one, makes the parser and the printer of
// rules fail in another way than with an error.
func FuzzParse(f *testing.F) {
	f.Add(encoded(f))
	f.Fuzz(func(_ *testing.T, data []byte) {
		_, _ = parse(netlinkx.Message{Type: msgTrace, Body: data})
		_ = nftext.Print(unix.NFPROTO_IPV4, netlinkx.Values(data), func(string) *nftext.Set {
			return &nftext.Set{Anonymous: true, KeySize: 8, Elements: func() []nftext.Element { return []nftext.Element{{First: data}} }}
		}, func(uint32) string { return "" })
	})
}
