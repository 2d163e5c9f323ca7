package ipvs

import (
	"net/netip"
	"testing"

	"github.com/serviceplane/serviceplane/desired"
)

// FuzzServerElement: an element of the set of virtual servers is read as it was written, and
// an element that is none is left out.
func FuzzServerElement(f *testing.F) {
	f.Add(encodeServer(keyOf(desired.TCP, netip.MustParseAddrPort("10.96.0.1:80"))))
	f.Add(encodeServer(keyOf(desired.SCTP, netip.MustParseAddrPort("[fd00::1]:53"))))
	f.Add([]byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		key, ok := decodeServer(b)
		if !ok {
			return
		}
		again, ok := decodeServer(encodeServer(key))
		if !ok || again != key {
			t.Errorf("%+v came back as %+v, %v", key, again, ok)
		}
	})
}
