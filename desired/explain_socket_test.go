package desired

import (
	"net/netip"
	"strings"
	"testing"
)

// TestExplainSockets: an engine that translates sockets does it for clients on the node, and Explain says
// whether, and if not, why.
func TestExplainSockets(t *testing.T) {
	x := explainerOfWeb(t, nil, local(1), remote(2))
	x.Globals.PodInterface, x.Globals.PodCIDRs = "", []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	own := netip.MustParsePrefix("10.0.1.0/24")
	x.Resolver.Node.PodCIDRs = []netip.Prefix{own}
	carried := true
	x.Traits = func(*Service) Traits {
		return Traits{Sockets: func(*Service, *Frontend, *Globals) (bool, string) { return carried, "it is a test" }}
	}
	pod := own.Addr().Next()
	for _, c := range []struct {
		name       string
		from       netip.Addr
		origin     Origin
		to         string
		carried    bool
		bySocket   bool
		masquerade bool
		because    string
	}{
		{"a pod", pod, FromPod, clusterIP.String(), true, true, false, "by a socket"},
		{"a pod, external", pod, FromPod, vip.String(), true, true, false, "by a socket"},
		{"the node", nodeIP, FromNode, clusterIP.String(), true, true, true, "by a socket"},
		{"a pod of another node", netip.MustParseAddr("10.0.2.1"), FromPod, clusterIP.String(), true, false, false, "by rules, because the client is not on this node"},
		{"a host outside", netip.MustParseAddr("198.51.100.7"), FromOutside, clusterIP.String(), true, false, true, "by rules, because the client is not on this node"},
		{"declined", pod, FromPod, vip.String(), false, false, true, "by rules, because it is a test"},
	} {
		carried = c.carried
		e, err := x.explain(Packet{Protocol: TCP, Source: c.from, Origin: c.origin, Destination: netip.MustParseAddrPort(c.to + ":30080")})
		if err != nil {
			t.Fatal(err)
		}
		if reasons := strings.Join(e.Reasons, "\n"); e.BySocket != c.bySocket || e.Masquerade != c.masquerade || !strings.Contains(reasons, c.because) {
			t.Errorf("%s: by socket %v, masquerade %v, because\n%s\nwant %v, %v, %q", c.name, e.BySocket, e.Masquerade, reasons, c.bySocket, c.masquerade, c.because)
		}
	}
}
