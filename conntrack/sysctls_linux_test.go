package conntrack_test

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// The real kernel applies and restores the settings of a network namespace. The limit is read-only there: it is a
// condition, and all others are applied (W-26).
func TestSettingsOfANetworkNamespace(t *testing.T) {
	ns := netnstest.New(t)
	read := func(name string) (text string) {
		netnstest.Check(t, ns.Do(func() error {
			b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_" + name)
			text = strings.TrimSpace(string(b))
			return err
		}))
		return text
	}
	before := read("udp_timeout")
	limit, err := strconv.Atoi(read("max"))
	if err != nil {
		t.Fatal(err)
	}
	s, err := conntrack.NewSysctls(conntrack.SysctlOptions{
		// If it were not read-only, this value would do little harm.
		MaxPerCore: 1, Min: int32(limit - 1), LowerMax: true, UDP: 77 * time.Second, NetNS: ns.Path(), StateDir: t.TempDir(), Instance: "test",
	})
	if err != nil {
		t.Fatal(err)
	}
	conditions := s.Apply(t.Context())
	// The size of the hash table cannot be changed in a network namespace.
	conditions = slices.DeleteFunc(conditions, func(c proxier.Condition) bool { return strings.Contains(c.Message, "hashsize") })
	for _, c := range conditions {
		if c.Type != proxier.ConditionKernelSettings || !strings.Contains(c.Message, "nf_conntrack_max") {
			t.Errorf("condition %+v, want one about the limit only", c)
		}
	}
	if len(conditions) != 1 {
		t.Errorf("conditions %v, want one about the limit, which is read-only in a network namespace", conditions)
	}
	if got := read("udp_timeout"); got != "77" {
		t.Errorf("UDP timeout %s, want 77", got)
	}
	if err := s.Restore(t.Context()); err != nil {
		t.Errorf("Restore = %v, want nil", err)
	}
	if got := read("udp_timeout"); got != before {
		t.Errorf("UDP timeout %s after Restore, want %s as before", got, before)
	}
}
