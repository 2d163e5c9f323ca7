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
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+state, "--count-connections", "--nodeport-addresses=primary,localhost")
	p.waitHealthy()
	ask := func(from *netns.NS, to string, n int) {
		for range n {
			answer, err := netns.Ask(t.Context(), from, "tcp", netip.MustParseAddrPort(to), netns.AskOptions{})
			if err != nil || answer.Server != "pod-1" {
				t.Errorf("%s: %q, error %v, want pod-1", to, answer.Server, err)
			}
		}
	}
	ask(c.client, vip4, 7)
	ask(c.client, nodePort, 5)
	ask(c.client, vip6, 4)
	ask(c.node, "127.0.0.1:30080", 3)
	ask(c.pods[0], vip4, 1) // which comes back to the pod itself
	got := strings.Join(strings.Fields(spctlRuns(t, filepath.Join(state, "debug.sock"), "counts", "web")), " ")
	for _, row := range []string{"IPv4 all 16 ", "IPv4 10.244.1.2:8080 16 ", "IPv6 all 4 ", "IPv6 [fd00:244:1::2]:8080 4 "} {
		if !strings.Contains(got, row) {
			t.Errorf("spctl counts prints %s, want %q in it", got, row)
		}
	}
	p.expectMetrics(
		`serviceplane_service_new_connections_total{ip_family="IPv4",namespace="default",port="",protocol="TCP",service="web"} 16`,
		`serviceplane_service_new_connections_total{ip_family="IPv6",namespace="default",port="",protocol="TCP",service="web"} 4`)
}
