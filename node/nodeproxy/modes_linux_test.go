package nodeproxy

import (
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// rules returns the chains and tables of all modes in the node.
func (c *small) rules() string {
	c.t.Helper()
	var out []byte
	netnstest.Check(c.t, c.node.Do(func() (err error) {
		out, err = exec.Command("sh", "-c", "nft list tables; for v in nft legacy; do iptables-$v-save; ip6tables-$v-save; done").Output()
		return err
	}))
	var ours []string
	for line := range strings.Lines(string(out)) {
		if strings.HasPrefix(line, "table") && strings.Contains(line, "kube-proxy") || strings.Contains(line, "KUBE-") {
			ours = append(ours, line)
		}
	}
	return strings.Join(ours, "")
}

// TestAChangeOfMode: a proxy in another mode takes over without a gap, then removes the
// rules of the previous mode. --cleanup removes the rules of all modes.
func TestAChangeOfMode(t *testing.T) {
	t.Parallel()
	c, d, b := newSmall(t), newDirectory(t), newBPFWorld(t)
	flags := append(b.flags(), []string{"--manifests=" + d.path, "--state-dir=" + t.TempDir(), "--cluster-cidr=10.244.0.0/16,fd00:244::/32", "--nodeport-addresses=0.0.0.0/0,::/0"}...)
	serves := false // whether the rules of the previous proxy work without it
	for _, mine := range [][]string{{"iptables"}, {"nftables"}, {"ebpf"}, {"iptables"}, {"ebpf"}, {"userspace"}, {"userspace", "--userspace-portals=iptables"}, {"ebpf"}, {"nftables"}} {
		m := mode(mine[0])
		p := start(t, c.node, append(append(flags, "--proxy-mode="+mine[0]), mine[1:]...)...)
		p.waitHealthy()
		if serves {
			c.expectNow("pod-1")
		}
		c.expectSoon("pod-1")
		if _, got := p.get("127.0.0.1:10249", "/proxyMode"); got != string(m) {
			t.Errorf("/proxyMode = %q, want %s", got, m)
		}
		gone, stays := "table ", "KUBE-SERVICES"
		if m == modeNFTables || m == modeEBPF || m == modeUserspace && len(mine) == 1 {
			gone, stays = stays, gone
		}
		if !poll.Soon(func() bool { return !strings.Contains(c.rules(), gone) }) || !strings.Contains(c.rules(), stays) {
			t.Errorf("%s: rules are\n%swant none of the other mode", m, c.rules())
		}
		if !poll.Soon(func() bool { return b.isClean() != (m == modeEBPF) }) || m == modeEBPF && len(b.links()) != bpfLinks {
			t.Errorf("%s: links are %v, want %d in mode ebpf, and nothing in others", m, b.links(), bpfLinks)
		}
		c.expectNow("pod-1")
		d.write("endpoints.yaml", webSlices(2))
		c.expectSoon("pod-2")
		d.write("endpoints.yaml", webSlices(1))
		c.expectSoon("pod-1")
		if err := p.signal(syscall.SIGTERM); err != nil {
			t.Errorf("the proxy ends with %v, want exit code 0", err)
		}
		if serves = m != modeUserspace; serves { // a userspace proxy serves only while it runs
			c.expectNow("pod-1")
		}
	}
	cleanUp(t, c.node, flags...) // in mode nftables
	if got := c.rules(); got != "" {
		t.Errorf("after --cleanup, rules are\n%swant none", got)
	}
}
