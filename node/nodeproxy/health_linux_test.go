package nodeproxy

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// An endpoint that stops answering leaves, by checks that get no answer and by connections that are refused, and
// returns when it answers again.
func TestAnEndpointThatStopsAnswering(t *testing.T) {
	const silent, refusing = "drop", "reject with tcp reset"
	for title, c := range map[string]struct {
		flags              []string
		annotation, broken string
	}{
		"nftables, checks":       {[]string{"--proxy-mode=nftables"}, "tcp interval=1s eject-for=1s", silent},
		"iptables, by default":   {[]string{"--proxy-mode=iptables", "--endpoint-health-default=tcp interval=200ms eject-for=1s"}, "", silent},
		"nftables, connections":  {[]string{"--proxy-mode=nftables"}, "connections connections=2 eject-for=5s", refusing},
		"userspace, connections": {[]string{"--proxy-mode=userspace"}, "connections connections=2 eject-for=5s", refusing},
	} {
		t.Run(title, func(t *testing.T) {
			t.Parallel()
			n, d := newSmall(t), newDirectory(t)
			if c.annotation != "" {
				d.write("service.yaml", strings.Replace(webService, "{name: web}", "{name: web, annotations: {"+healthAnnotation+": "+c.annotation+"}}", 1))
			}
			d.write("more.yaml", strings.ReplaceAll(webSlices(2), "{name: web-", "{name: more-"))
			p := start(t, n.node, append(c.flags, "--endpoint-health", "--state-dir="+t.TempDir(), "--manifests="+d.path,
				"--cluster-cidr=10.244.0.0/16,fd00:244::/32", "--nodeport-addresses=0.0.0.0/0,::/0")...)
			p.waitHealthy()
			n.expectSoon("pod-2")
			n.expectSoon("pod-1")

			nftIn(t, n.pods[1], "add table inet broken; add chain inet broken in { type filter hook input priority 0; }; add rule inet broken in tcp dport 8080 "+c.broken)
			ejected := `serviceplane_endpoint_health_service_endpoints{state="ejected"} `
			n.expectMetricUnderLoad(p, ejected+"2") // one of each IP family
			p.waitNothingPending()
			n.expectNow("pod-1")
			nftIn(t, n.pods[1], "delete", "table", "inet", "broken")
			p.expectMetrics(ejected + "0")
			n.expectSoon("pod-2")
		})
	}
}

// expectMetricUnderLoad waits until /metrics has the line, while clients connect.
func (c *small) expectMetricUnderLoad(p *proxyProcess, line string) {
	c.t.Helper()
	if !poll.Soon(func() bool {
		for _, vip := range []string{vip4, vip6} {
			c.ask(netip.MustParseAddrPort(vip), netns.AskOptions{Timeout: 100 * time.Millisecond})
		}
		_, body := p.get("127.0.0.1:10249", "/metrics")
		return strings.Contains(body, line+"\n")
	}) {
		c.t.Fatalf("metrics lack %s", line)
	}
}

// A bad health check is logged and counted, and the Service works.
func TestABadHealthCheck(t *testing.T) {
	t.Parallel()
	n, d := newSmall(t), newDirectory(t)
	d.write("service.yaml", strings.Replace(webService, "{name: web}", "{name: web, annotations: {"+healthAnnotation+": ping}}", 1))
	p := start(t, n.node, "--endpoint-health", "--state-dir="+t.TempDir(), "--manifests="+d.path, "--cluster-cidr=10.244.0.0/16,fd00:244::/32")
	p.waitHealthy()
	p.expectMetrics("serviceplane_endpoint_health_refused 2", `serviceplane_endpoint_health_endpoints{state="checked"} 0`) // of each IP family
	p.waitOutput("health check of a Service is invalid", "ping is no kind of check")
	n.expectNow("pod-1")
}
