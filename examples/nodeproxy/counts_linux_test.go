package main

import (
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns"
)

// TestConnectionsAreCounted on all ways: spctl and /metrics show the same numbers, exactly.
func TestConnectionsAreCounted(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	state := t.TempDir()
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+state, "--count-connections")
	p.waitHealthy()
	for to, n := range map[string]int{vip4: 7, nodePort: 5, vip6: 4} {
		for range n {
			if got := c.ask(netip.MustParseAddrPort(to), netns.AskOptions{}); !strings.HasPrefix(got, "pod-") {
				t.Errorf("%s: %s", to, got)
			}
		}
	}
	got := strings.Join(strings.Fields(spctlRuns(t, filepath.Join(state, "debug.sock"), "counts", "web")), " ")
	for _, row := range []string{"IPv4 all 12 ", "IPv4 10.244.1.2:8080 12 ", "IPv6 all 4 ", "IPv6 [fd00:244:1::2]:8080 4 "} {
		if !strings.Contains(got, row) {
			t.Errorf("spctl counts prints %s, want %q in it", got, row)
		}
	}
	p.expectMetrics(
		`serviceplane_service_new_connections_total{ip_family="IPv4",namespace="default",port="",protocol="TCP",service="web"} 12`,
		`serviceplane_service_new_connections_total{ip_family="IPv6",namespace="default",port="",protocol="TCP",service="web"} 4`)
}
