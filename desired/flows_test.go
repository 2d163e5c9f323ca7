package desired

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/serviceplane/serviceplane/changetracker"
)

func TestWhichFlowsAreStale(t *testing.T) {
	t.Parallel()
	vip, a, b := netip.MustParseAddrPort("10.96.0.1:53"), netip.MustParseAddrPort("10.244.0.1:53"), netip.MustParseAddrPort("10.244.0.2:53")
	serving, nobody, gone := Flows{Servers: []netip.AddrPort{a}}, Flows{}, Flows{Gone: true}
	for name, c := range map[string]struct {
		flows  Flows
		server netip.AddrPort
		want   bool
	}{
		"its endpoint serves":                    {serving, a, false},
		"its endpoint is gone (PKT-81)":          {serving, b, true},
		"never translated, now there is one":     {serving, vip, true},
		"no endpoint serves any more (PKT-82)":   {nobody, a, true},
		"never translated, and nobody to go to":  {nobody, vip, false},
		"the frontend is gone (W-24)":            {gone, a, true},
		"never translated, and no Service's now": {gone, vip, false},
	} {
		if got := c.flows.Stale(vip, c.server); got != c.want {
			t.Errorf("%s: stale = %v, want %v", name, got, c.want)
		}
	}
}

// TestServersServe: ready or not, terminating or not, once each (CT-03).
func TestServersServe(t *testing.T) {
	t.Parallel()
	a, b := netip.MustParseAddrPort("10.244.0.1:53"), netip.MustParseAddrPort("10.244.0.2:53")
	got := Servers([]changetracker.Endpoint{
		{Addr: b, Serving: true, Terminating: true},
		{Addr: a, Serving: true, Ready: true},
		{Addr: netip.MustParseAddrPort("10.244.0.3:53"), Terminating: true},
		{Addr: a, Serving: true},
	})
	if want := []netip.AddrPort{a, b}; !slices.Equal(got, want) {
		t.Errorf("servers %v, want %v", got, want)
	}
}
