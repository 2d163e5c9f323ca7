//go:build vm

package ipvs_test

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestAChangedPolicyRefusesNoConnection, although the kernel has no scheduler for a moment.
// Open connections stay.
func TestAChangedPolicyRefusesNoConnection(t *testing.T) {
	const annotation, dialers = "example.com/policy", 4
	n := newNode(t, func(c *ipvs.Config) {
		c.Tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) {
			_ = p.Balancing.UnmarshalText([]byte(s.Annotations[annotation])) // random without it
		}
	})
	before := web()
	n.proxy.OnServiceAdd(before)
	n.proxy.OnEndpointSliceAdd(webSlice(n.world.LocalPods[0], n.world.LocalPods[1]))
	n.synced()
	from, to := n.world.LocalPods[2], netip.MustParseAddrPort(webVIP+":80")
	patient := proxiertest.AskOptions{Timeout: 30 * time.Second} // what is dropped is sent again
	flow, err := from.Open(t.Context(), "tcp", to, patient)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = flow.Close() }()
	var (
		all   sync.WaitGroup
		ended atomic.Bool
		asked atomic.Int32
	)
	for range dialers {
		all.Go(func() {
			for !ended.Load() {
				if _, err := from.Ask(t.Context(), "tcp", to, patient); err != nil {
					t.Errorf("after %d connections: %v, want an answer", asked.Load(), err)
				}
				asked.Add(1)
			}
		})
	}
	for _, step := range []struct{ policy, scheduler string }{
		{"source-hash", "mh (mh-fallback)"},
		{"source-port-hash", "mh (mh-fallback,mh-port)"},
		{"least-connections", "lc"},
		{"random", "rr"},
		{"source-hash", "mh (mh-fallback)"},
		{"random", "rr"},
	} {
		more := asked.Load() + dialers
		poll.Until(t, "connections are made between changes", func() bool { return asked.Load() >= more })
		after := web()
		after.Annotations = map[string]string{annotation: step.policy}
		n.proxy.OnServiceUpdate(before, after)
		n.sync()
		before = after
		if got, want := n.run("ipvsadm", "-Ln"), fmt.Sprintf("TCP  %s:80 %s", webVIP, step.scheduler); !strings.Contains(got, want) {
			t.Errorf("policy %s: ipvsadm lists\n%swant %s", step.policy, got, want)
		}
		if _, err := flow.Ask(t.Context()); err != nil {
			t.Errorf("policy %s: the open connection: %v, want an answer", step.policy, err)
		}
	}
	ended.Store(true)
	all.Wait()
	t.Logf("%d connections", asked.Load())
}
