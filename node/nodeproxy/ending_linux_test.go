package nodeproxy

import (
	"strings"
	"syscall"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// A client hears nothing while its endpoint goes and the mode changes. The new process leaves the table that ends
// its connection, although it removes all else of the old mode; --cleanup removes it.
func TestAChangeOfModeLeavesConnectionsThatMustEnd(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	d.write("service.yaml", strings.Replace(webService, "{name: web}", `{name: web, annotations: {`+endAnnotation+`: "true"}}`, 1))
	flags := []string{"--manifests=" + d.path, "--state-dir=" + t.TempDir()}
	p := start(t, c.node, append(flags, "--proxy-mode=iptables")...)
	p.waitHealthy()
	_ = c.open(vip4)
	netnstest.Run(t, c.client, "nft", "add table ip lost; add chain ip lost in { type filter hook input priority 0; policy drop; }")
	d.write("endpoints.yaml", webSlices(2))
	listed := func() bool { return strings.Contains(c.nft("list", "ruleset"), "192.0.2.1 . ") }
	poll.Until(t, "the connection is listed", listed)
	netnstest.Check(t, p.signal(syscall.SIGTERM))
	p = start(t, c.node, append(flags, "--proxy-mode=nftables")...)
	p.waitHealthy()
	poll.Until(t, "the rules of the old mode are gone", func() bool { return !strings.Contains(netnstest.Run(t, c.node, "iptables-save"), "KUBE-") })
	if !listed() {
		t.Errorf("want the connection listed:\n%s", c.nft("list", "ruleset"))
	}
	netnstest.Check(t, p.signal(syscall.SIGTERM))
	cleanUp(t, c.node, flags...)
	if rules := c.nft("list", "ruleset"); strings.Contains(rules, ".ending") {
		t.Errorf("after --cleanup the kernel has\n%s", rules)
	}
}
