package desired

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Servers are ready or serving, terminating or not, once each (CT-03).
func TestServersServe(t *testing.T) {
	t.Parallel()
	a, b := netip.MustParseAddrPort("10.244.0.1:53"), netip.MustParseAddrPort("10.244.0.2:53")
	got := Serving([]changetracker.Endpoint{
		{Addr: b, Serving: true, Terminating: true},
		{Addr: a, Serving: true, Ready: true},
		{Addr: netip.MustParseAddrPort("10.244.0.3:53"), Terminating: true},
		{Addr: a, Serving: true},
	})
	if want := []netip.AddrPort{a, b}; !slices.Equal(got, want) {
		t.Errorf("servers %v, want %v", got, want)
	}
}

func TestWhatIsReadyIsAServerToo(t *testing.T) { // publishNotReadyAddresses
	for state := range 8 {
		e := changetracker.Endpoint{
			Addr: netip.MustParseAddrPort("10.0.0.1:80"), Ready: state&1 != 0, Serving: state&2 != 0, Terminating: state&4 != 0,
		}
		if got, want := len(Serving([]changetracker.Endpoint{e})) == 1, e.Ready || e.Serving; got != want || e.Usable() && !got {
			t.Errorf("%v serving=%v: a server: %v, want %v", &e, e.Serving, got, want)
		}
	}
}
