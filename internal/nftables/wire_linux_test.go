package nftables

import (
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nft"
)

// FuzzMessagesOfTheKernel decodes random bytes.
func FuzzMessagesOfTheKernel(f *testing.F) {
	w := newWire(unix.NFPROTO_IPV4, "t")
	w.newTable()
	spec := &setSpecs[setServices]
	w.newSet(spec, 0)
	w.verdictElement(spec, 1, "chain")
	f.Add(w.Buf)
	f.Fuzz(func(_ *testing.T, b []byte) {
		for m := range netlinkx.Messages(b) {
			m.Errno()
			m.Netfilter()
			for _, value := range netlinkx.Attributes(m.Body) {
				for _, item := range netlinkx.Attributes(value) {
					nft.ParseElement(item)
				}
				parseChain(value)
				shapeOf(value)
				comment(value)
			}
		}
	})
}

// FuzzChainNamesOfClasses checks that a class can be parsed from its chain's name, and from
// no other name.
func FuzzChainNamesOfClasses(f *testing.F) {
	f.Add("keep-cluster-3")
	f.Add("affinity-draw-local-12")
	f.Add("all-cluster-source-port-4093")
	f.Add("affinity-timeout-10800s")
	f.Fuzz(func(t *testing.T, name string) {
		if class, ok := parseClass(name); ok && class.chain() != name {
			t.Errorf("%q parsed as %#x, which is called %q", name, class, class.chain())
		}
	})
}

func TestChainNamesTellTheClass(t *testing.T) {
	var classes []class
	for n := range treatments() {
		for _, endpoints := range []int{1, 10, maxEndpoints} {
			for by := range numChoices {
				classes = append(classes, forwardingClass(n, by, endpoints), drawClass(n.scope, by, endpoints))
			}
		}
	}
	for _, timeout := range []time.Duration{1, 10800, longestTimeout} {
		classes = append(classes, timeoutClass(timeout*time.Second))
	}
	for _, want := range classes {
		if got, ok := parseClass(want.chain()); !ok || got != want || !want.isCounted() {
			t.Errorf("%q parsed as %#x, %v, want %#x", want.chain(), got, ok, want)
		}
	}
}

// TestTimeoutsAreRoundedUp: there are few timeouts, none is shorter than requested or more
// than a fifth longer, and common values stay.
func TestTimeoutsAreRoundedUp(t *testing.T) {
	distinct := map[class]bool{}
	for n := range longestTimeout {
		want := time.Duration(n+1) * time.Second
		c := timeoutClass(want)
		distinct[c] = true
		if got := c.timeout(); !c.isTimeout() || got < want || got > want+want/5 {
			t.Fatalf("timeout %v is rounded to %v (%#x)", want, got, c)
		}
	}
	if len(distinct) > 254 {
		t.Errorf("%d timeouts, want at most 254", len(distinct))
	}
	for _, same := range []time.Duration{
		time.Second, 59 * time.Second, time.Minute, 90 * time.Second, 5 * time.Minute, 15 * time.Minute, 45 * time.Minute,
		time.Hour, 90 * time.Minute, 3 * time.Hour, 12 * time.Hour, 18 * time.Hour, 24 * time.Hour,
	} {
		if got := timeoutClass(same).timeout(); got != same {
			t.Errorf("timeout %v is rounded to %v", same, got)
		}
	}
	for asked, want := range map[time.Duration]time.Duration{0: time.Second, time.Millisecond: time.Second, 30 * time.Hour: 24 * time.Hour} {
		if got := timeoutClass(asked).timeout(); got != want {
			t.Errorf("timeout %v is rounded to %v, want %v", asked, got, want)
		}
	}
}

// TestRangesAreWhatTheKernelAccepts: intervals must neither touch nor overlap.
func TestRangesAreWhatTheKernelAccepts(t *testing.T) {
	for name, c := range map[string]struct {
		prefixes []string
		want     []string
	}{
		"one":      {[]string{"10.0.0.0/8"}, []string{"10.0.0.0-10.255.255.255"}},
		"touching": {[]string{"10.0.0.0/9", "10.128.0.0/9"}, []string{"10.0.0.0-10.255.255.255"}},
		"apart":    {[]string{"10.0.0.0/24", "10.0.2.0/24"}, []string{"10.0.0.0-10.0.0.255", "10.0.2.0-10.0.2.255"}},
		"all":      {[]string{"0.0.0.0/0"}, []string{"0.0.0.0-255.255.255.255"}},
		"all IPv6": {[]string{"::/0"}, []string{"::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"}},
	} {
		t.Run(name, func(t *testing.T) {
			var prefixes []netip.Prefix
			for _, p := range c.prefixes {
				prefixes = append(prefixes, netip.MustParsePrefix(p))
			}
			var got []string
			for _, r := range ranges(prefixes) {
				got = append(got, r.first.String()+"-"+r.last.String())
			}
			if len(got) != len(c.want) {
				t.Fatalf("ranges = %v, want %v", got, c.want)
			}
			for i := range got {
				if got[i] != c.want[i] {
					t.Errorf("range %d = %v, want %v", i, got[i], c.want[i])
				}
			}
		})
	}
}

// FuzzFrontendKey: the key of a frontend is read as it was written.
func FuzzFrontendKey(f *testing.F) {
	f.Add([]byte{10, 96, 0, 1}, uint8(6), uint16(80))
	f.Add([]byte{}, uint8(17), uint16(53))
	f.Fuzz(func(t *testing.T, vip []byte, protocol uint8, port uint16) {
		want := desired.Key{Protocol: desired.Protocol(protocol), Port: port}
		if addr, ok := netip.AddrFromSlice(vip); ok {
			want.VIP = addr
		}
		if got := parseFrontendKey([]byte(keyString(frontendKey(want)))); got != want {
			t.Errorf("%+v came back as %+v", want, got)
		}
	})
}
