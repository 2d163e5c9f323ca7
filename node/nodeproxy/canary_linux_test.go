package nodeproxy

import (
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/healthcheck"
)

// TestTheCanary: a drop by another program is in the log, in the metrics and in /healthz,
// which answers 503 with --canary=healthz; all end when the drop does. /livez does not change.
func TestTheCanary(t *testing.T) {
	for _, mode := range []string{canaryReports, canaryDecides} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c, d := newSmall(t), newDirectory(t)
			for prefix, via := range map[string]string{"0.0.0.0/0": "192.0.2.1", "::/0": "2001:db8::1"} {
				netnstest.Check(t, c.node.AddRoute(netip.MustParsePrefix(prefix), netip.MustParseAddr(via)))
			}
			p := start(t, c.node, "--state-dir="+t.TempDir(), "--manifests="+d.path, "--cluster-cidr=10.244.0.0/16,fd00:244::/32",
				"--canary="+mode, "--canary-interval=1s")
			p.waitHealthy()
			p.expectMetrics(`serviceplane_canary_passing{ip_family="IPv4"} 1`, `serviceplane_canary_passing{ip_family="IPv6"} 1`)
			c.nft("add table inet foreign; add chain inet foreign strict { type filter hook input priority 0; }; add rule inet foreign strict meta l4proto tcp ct state new iif lo tcp dport 32768-65535 drop")
			p.waitOutput("canary fails", "32768-65535 drop' with handle 2 of chain strict in table inet foreign")
			p.expectMetrics(`serviceplane_canary_passing{ip_family="IPv6"} 0`, `serviceplane_condition{ip_family="IPv4",type="Canary"} 1`)
			code := http.StatusOK
			if mode == canaryDecides {
				code = http.StatusServiceUnavailable
			}
			p.waitCode("127.0.0.1:10256", healthcheck.HealthzPath, code)
			p.waitCode("127.0.0.1:10256", healthcheck.LivezPath, http.StatusOK)
			if reasons := strings.Join(p.health().Reasons, ";"); !strings.Contains(reasons, "IPv4 Canary: a connection to the canary's VIP 192.0.0.7:9") {
				t.Errorf("reasons of /healthz %q lack the canary", reasons)
			}
			c.nft("delete", "table", "inet", "foreign")
			p.expectMetrics(`serviceplane_canary_passing{ip_family="IPv4"} 1`, `serviceplane_canary_passing{ip_family="IPv6"} 1`)
			p.waitCode("127.0.0.1:10256", healthcheck.HealthzPath, http.StatusOK)
		})
	}
}

// TestWithoutACanary: --canary=off and a second instance have none.
func TestWithoutACanary(t *testing.T) {
	for name, flags := range map[string][]string{
		"off": {"--canary=off"}, "instance": {"--instance=edge", "--nftables-masquerade-bit=15"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, d := newSmall(t), newDirectory(t)
			p := start(t, c.node, append(flags, "--state-dir="+t.TempDir(), "--manifests="+d.path, "--canary-interval=100ms")...)
			p.waitHealthy()
			if _, body := p.get("127.0.0.1:10249", "/metrics"); body == "" || strings.Contains(body, "serviceplane_canary") {
				t.Errorf("metrics are %d bytes and have those of a canary", len(body))
			}
		})
	}
}

// expectMetrics waits until /metrics has the lines.
func (p *proxyProcess) expectMetrics(lines ...string) {
	p.t.Helper()
	for _, line := range lines {
		if !poll.Soon(func() bool {
			_, body := p.get("127.0.0.1:10249", "/metrics")
			return strings.Contains(body, line+"\n")
		}) {
			p.t.Errorf("metrics lack %s", line)
		}
	}
}
