package flows

import (
	"net/netip"
	"testing"

	"github.com/serviceplane/serviceplane/desired"
)

func TestWhichFlowsAreStale(t *testing.T) {
	t.Parallel()
	vip, a, b := netip.MustParseAddrPort("10.96.0.1:53"), netip.MustParseAddrPort("10.244.0.1:53"), netip.MustParseAddrPort("10.244.0.2:53")
	client := netip.MustParseAddrPort("198.51.100.9:1234")
	serving, none, gone := desired.Flows{Serving: desired.EndpointsOf(a)}, desired.Flows{}, desired.Flows{Gone: true}
	guarded := func(f desired.Flows, ranges ...string) desired.Flows {
		f.Restricted = true
		for _, r := range ranges {
			f.SourceRanges = append(f.SourceRanges, netip.MustParsePrefix(r))
		}
		return f
	}
	in, out := []string{"192.0.2.0/24", "198.51.100.0/24"}, []string{"192.0.2.0/24"}
	for name, c := range map[string]struct {
		flows                desired.Flows
		server               netip.AddrPort
		answered, unanswered bool // whether it is stale
	}{
		"its endpoint serves":                           {serving, a, false, false},
		"its endpoint is gone (PKT-81)":                 {serving, b, true, true},
		"never translated, now there is an endpoint":    {serving, vip, true, true},
		"no endpoint serves (PKT-82)":                   {none, a, true, true},
		"never translated, and no endpoint":             {none, vip, false, true},
		"the frontend is gone (W-24)":                   {gone, a, true, true},
		"never translated, and the frontend is gone":    {gone, vip, false, false},
		"within the ranges":                             {guarded(serving, in...), a, false, false},
		"outside the ranges (PKT-85)":                   {guarded(serving, out...), a, false, true},
		"no source may":                                 {guarded(serving), a, false, true},
		"within the ranges, and its endpoint gone":      {guarded(serving, in...), b, true, true},
		"outside the ranges, and no endpoint":           {guarded(none, out...), vip, false, true},
		"outside the ranges of a frontend that is gone": {guarded(gone, out...), vip, false, false},
	} {
		for answered, want := range map[bool]bool{true: c.answered, false: c.unanswered} {
			if got := stale(&c.flows, &Flow{Client: client, Dialled: vip, Server: c.server, Answered: answered}); got != want {
				t.Errorf("%s, answered %t: stale = %v, want %v", name, answered, got, want)
			}
		}
	}
}
