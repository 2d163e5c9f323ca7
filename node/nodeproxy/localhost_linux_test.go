package nodeproxy

import (
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// TestNodePortsAtLocalhost: the word localhost in --nodeport-addresses has node ports at
// 127.0.0.1 and ::1 in every mode, with iptables also without route_localnet. Without the word
// the kernel refuses clients there, also after a start with it.
func TestNodePortsAtLocalhost(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	flags := []string{"--manifests=" + d.path, "--state-dir=" + t.TempDir(), "--cluster-cidr=10.244.0.0/16,fd00:244::/32"}
	localhost := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:30080"), netip.MustParseAddrPort("[::1]:30080")}
	expect := c.expectNow
	within := func(args ...string) {
		t.Helper()
		p := start(t, c.node, append(flags, args...)...)
		p.waitHealthy()
		asked := strings.Contains(strings.Join(args, " "), "localhost,")
		for _, to := range localhost {
			poll.Until(t, strings.Join(args, " ")+": "+to.String(), func() bool {
				_, err := netns.Ask(t.Context(), c.node, "tcp", to, netns.AskOptions{})
				return (err == nil) == asked
			})
		}
		expect("pod-1")
		if err := p.signal(syscall.SIGTERM); err != nil {
			t.Errorf("the proxy ends with %v, want exit code 0", err)
		}
	}
	within("--nodeport-addresses=localhost,all")
	within("--nodeport-addresses=all")
	within("--nodeport-addresses=primary,localhost,192.0.2.0/24")
	within("--proxy-mode=userspace", "--nodeport-addresses=localhost,all")
	expect = c.expectSoon // until the portals that mode userspace has left are removed, after the first sync, they lead nowhere
	within("--proxy-mode=iptables", "--nodeport-addresses=localhost,all", "--iptables-localhost-nodeports=false")
	got, err := c.node.Sysctl("net/ipv4/conf/all/route_localnet")
	netnstest.Check(t, err)
	if strings.TrimSpace(got) != "0" {
		t.Errorf("route_localnet = %q, want 0", got)
	}
	cleanUp(t, c.node, flags...)
}
