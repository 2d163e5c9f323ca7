package jhash_test

import (
	"fmt"
	"net/netip"
	"os/exec"
	"regexp"
	"strconv"
	"testing"

	"github.com/serviceplane/serviceplane/internal/jhash"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// TestTheKernelAgrees sends datagrams from different sources, and reads the indexes that a
// rule of nf_tables computes for them.
func TestTheKernelAgrees(t *testing.T) {
	ns := netnstest.New(t)
	netnstest.Check(t, ns.AddBridge("pods", netip.MustParsePrefix("10.244.0.1/24"), netip.MustParsePrefix("10.244.0.2/24"),
		netip.MustParsePrefix("fd00:10:244::1/64"), netip.MustParsePrefix("fd00:10:244::2/64")))
	nft := func(args ...string) (text string) {
		netnstest.Check(t, ns.Do(func() error {
			out, err := exec.CommandContext(t.Context(), "nft", args...).CombinedOutput()
			text = string(out)
			return err
		}))
		return text
	}
	const slots = 65521
	for _, family := range []struct{ saddr, to string }{{"ip saddr", "10.244.0.1:9"}, {"ip6 saddr", "[fd00:10:244::1]:9"}} {
		for n, source := range []string{"10.244.0.1:1", "10.244.0.2:40000", "[fd00:10:244::1]:1", "[fd00:10:244::2]:65535"} {
			client := netip.MustParseAddrPort(source)
			if client.Addr().Is4() != netip.MustParseAddrPort(family.to).Addr().Is4() {
				continue
			}
			t.Run(source, func(t *testing.T) {
				for title, key := range map[string]string{"address": family.saddr, "address and port": family.saddr + " . th sport"} {
					table := fmt.Sprintf("t%d", n)
					nft(fmt.Sprintf(`table inet %s {
						set seen {
							typeof meta mark; flags dynamic; size 9;
						}
						chain out {
							type filter hook output priority 0
							udp dport 9 meta mark set jhash %s mod %d seed 0x%x add @seen { meta mark }
						}
					}`, table, key, slots, jhash.Seed))
					flow, err := netns.Open(t.Context(), ns, "udp", netip.MustParseAddrPort(family.to), netns.AskOptions{From: client.Addr(), FromPort: client.Port()})
					netnstest.Check(t, err)
					_, _ = flow.Ask(t.Context()) // nobody answers
					_ = flow.Close()
					from := client
					if title == "address" {
						from = netip.AddrPortFrom(client.Addr(), 0)
					}
					seen := regexp.MustCompile(`elements = \{ (0x[0-9a-f]+) \}`).FindStringSubmatch(nft("list", "set", "inet", table, "seen"))
					nft("delete", "table", "inet", table)
					if seen == nil {
						t.Fatal("the rule has seen no packet")
					}
					if want, _ := strconv.ParseInt(seen[1], 0, 64); int64(jhash.Source(from, slots)) != want {
						t.Errorf("%s: index %#x, the kernel has %#x", title, jhash.Source(from, slots), want)
					}
				}
			})
		}
	}
}

// The indexes never change on machines of this byte order.
func TestIndexesNeverChange(t *testing.T) {
	for source, want := range map[string]int{"192.0.2.1:0": 10128, "192.0.2.1:1": 30426, "[2001:db8::1]:0": 27352, "[2001:db8::1]:1": 11551} {
		if got := jhash.Source(netip.MustParseAddrPort(source), 65521); got != want {
			t.Errorf("%s has index %d, want %d", source, got, want)
		}
	}
}
