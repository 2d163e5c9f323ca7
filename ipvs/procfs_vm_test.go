//go:build vm

package ipvs

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// ListFast returns what List does, without timeouts and most flags, for both IP families and beside virtual servers
// of other programs. It may be incomplete while the network namespaces of earlier tests exist.
func TestListFastReturnsWhatListDoes(t *testing.T) {
	b := bare{t, netnstest.New(t).Path()}
	dice := rand.New(rand.NewPCG(1, 2))
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		k, err := openKernel(b.ns, family)
		if err != nil {
			t.Fatal(err)
		}
		defer k.Close()
		fill(t, k, dice, ofFamily(family, "10.96.0.0", "fd00:10:96::"), 300)
		b.run("ipvsadm", "-A", "-f", ofFamily(family, "4", "6"), "-s", "rr")
		b.run("ipvsadm", "-A", ofFamily(family, "-t", "-u"), ofFamily(family, "192.0.2.77:80", "[2001:db8::77]:80"), "-s", "wlc")
		all, err := k.List()
		if err != nil || len(all) != 301 {
			t.Fatalf("%s: List has %d virtual servers, %v, want 301", family, len(all), err)
		}
		for key, v := range all {
			if got, err := k.Get(key); err != nil || got == nil || text(map[serverKey]*virtual{key: got}) != text(map[serverKey]*virtual{key: v}) {
				t.Errorf("%s: Get(%v) = %v, %v, want %v", family, key, got, err, v)
			}
			v.settings = settings{scheduler: v.scheduler, flags: v.flags & flagPersistent}
		}
		var got map[serverKey]*virtual
		poll.Until(t, "all are returned, when the namespaces of earlier tests are deleted", func() bool {
			got, err = k.ListFast()
			return err != nil || len(got) == len(all)
		})
		if err != nil || text(got) != text(all) {
			t.Errorf("%s: ListFast = %v\n%swant\n%s", family, err, text(got), text(all))
		}
		if got, err := k.Get(tcpKey(ofFamily(family, "192.0.2.99:80", "[2001:db8::99]:80"))); err != nil || got != nil {
			t.Errorf("%s: Get of a missing one = %v, %v, want none", family, got, err)
		}
	}
}

// Other namespaces hide no damage, although the kernel then omits virtual servers.
func TestOtherNamespacesHideNoDamage(t *testing.T) {
	var kernels []*netlinkKernel
	for range 2 {
		k, err := openKernel(netnstest.New(t).Path(), v1.IPv4Protocol)
		if err != nil {
			t.Fatal(err)
		}
		defer k.Close()
		fill(t, k, rand.New(rand.NewPCG(1, 2)), "10.96.0.0", 300)
		kernels = append(kernels, k)
	}
	for _, k := range kernels {
		all, err := k.List()
		if err != nil || len(all) != 300 {
			t.Fatalf("List has %d virtual servers, %v, want 300", len(all), err)
		}
		shown, err := k.ListFast()
		t.Logf("%d of %d are returned", len(shown), len(all))
		table := newTable(k, 0, time.Now)
		for key, v := range all {
			table.adopt(key, v)
		}
		if text, damageErr := table.findDamage(); err != nil || damageErr != nil || text != "" {
			t.Errorf("damage = %q, %v, %v, want none", text, err, damageErr)
		}
		for key := range all {
			if err := k.Delete(key); err != nil {
				t.Fatal(err)
			}
			if text, err := table.findDamage(); err != nil || text != "virtual server "+key.String() {
				t.Errorf("damage = %q, %v, want virtual server %v", text, err, key)
			}
			break
		}
	}
}

// fill creates virtual servers of all protocols, with few and with many real servers.
func fill(tb testing.TB, k *netlinkKernel, dice *rand.Rand, base string, n int) {
	tb.Helper()
	addr := netip.MustParseAddr(base)
	for range n {
		addr = addr.Next()
		key := keyOf([]desired.Protocol{desired.TCP, desired.UDP, desired.SCTP}[dice.IntN(3)], netip.AddrPortFrom(addr, uint16(1+dice.IntN(65535))))
		s := settings{scheduler: []string{"rr", "lc", "sh"}[dice.IntN(3)]}
		if dice.IntN(2) == 0 {
			s.flags, s.timeout = flagPersistent, 3*time.Hour
		}
		if err := k.Put(key, s, true); err != nil {
			tb.Fatal(err)
		}
		reals, real := dice.IntN(4), addr
		if dice.IntN(50) == 0 {
			reals = 100
		}
		for range reals {
			real = real.Next()
			if err := k.PutReal(key, netip.AddrPortFrom(real, 8080), dice.IntN(3), ForwardMasquerade, true); err != nil {
				tb.Fatal(err)
			}
		}
	}
}

// BenchmarkList compares the ways to list all virtual servers.
func BenchmarkList(b *testing.B) {
	k, err := openKernel(netnstest.New(b).Path(), v1.IPv4Protocol)
	if err != nil {
		b.Fatal(err)
	}
	defer k.Close()
	n := 0
	for _, more := range []int{1000, 9000} {
		fill(b, k, rand.New(rand.NewPCG(1, 2)), fmt.Sprintf("10.%d.0.0", more/100), more)
		n += more
		for what, list := range map[string]func() (map[serverKey]*virtual, error){"list": k.List, "fast": k.ListFast} {
			b.Run(fmt.Sprintf("N=%d/%s", n, what), func(b *testing.B) {
				for b.Loop() {
					if all, err := list(); err != nil || len(all) != n {
						b.Fatalf("%d virtual servers, %v, want %d", len(all), err, n)
					}
				}
			})
		}
	}
}
