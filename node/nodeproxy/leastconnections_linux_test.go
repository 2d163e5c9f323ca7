package nodeproxy

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// In modes that choose endpoints by chance, the annotation lets an endpoint without connections get nearly all new ones.
func TestLeastConnections(t *testing.T) {
	for _, m := range []string{"nftables", "iptables", "ebpf"} {
		t.Run(m, func(t *testing.T) {
			t.Parallel()
			n, d := newSmall(t), newDirectory(t)
			d.write("service.yaml", strings.Replace(webService, "{name: web}", "{name: web, annotations: {"+balancingAnnotation+": least-connections}}", 1))
			p := start(t, n.node, "--proxy-mode="+m, "--state-dir="+t.TempDir(), "--manifests="+d.path, "--cluster-cidr=10.244.0.0/16,fd00:244::/32")
			p.waitHealthy()
			n.expectSoon("pod-1")
			for _, vip := range []string{vip4, vip6} {
				for range 60 {
					n.expectOpen(n.open(vip), "pod-1")
				}
			}
			d.write("more.yaml", strings.ReplaceAll(webSlices(2), "{name: web-", "{name: more-"))
			for _, vip := range []string{vip4, vip6} {
				if !poll.Soon(func() bool { return n.allReach("pod-2", vip) }) {
					t.Errorf("%s: pod-2 has no connection open and does not get 30 in a row", vip)
				}
			}
			p.expectMetrics(`serviceplane_least_connections_service_ports{state="balanced"} 2`, `serviceplane_least_connections_readings_total{result="failed"} 0`) // of each IP family
		})
	}
}

// allReach reports whether 30 connections in a row reach a server: by chance, half of them would.
func (c *small) allReach(server, vip string) bool {
	c.t.Helper()
	for range 30 {
		if c.ask(netip.MustParseAddrPort(vip), netns.AskOptions{}) != server {
			return false
		}
	}
	return true
}
