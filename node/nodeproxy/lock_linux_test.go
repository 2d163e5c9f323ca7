package nodeproxy

import (
	"fmt"
	"strings"
	"testing"
)

// The second proxy waits, also in another mode: it logs the process of the first proxy, and takes over when the
// first proxy is killed. --cleanup is refused while a proxy runs.
func TestTheSecondProxyWaits(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	flags := []string{"--manifests=" + d.path, "--state-dir=" + t.TempDir(), "--metrics-bind-address="}
	first := start(t, c.node, flags...)
	first.waitHealthy()
	who := fmt.Sprintf("is programmed by process %d (nodeproxy)", first.cmd.Process.Pid)

	clean := start(t, c.node, append(flags, "--cleanup")...)
	if clean.wait(); clean.err == nil {
		t.Error("--cleanup succeeds while a proxy runs, want an error")
	}
	if said := clean.stderr(); strings.Count(said, who) != 1 || strings.Contains(said, "nothing is programmed") {
		t.Errorf("--cleanup prints\n%swant one error", said)
	}
	c.expectNow("pod-1")

	second := start(t, c.node, append(flags, "--proxy-mode=iptables", "--iptables-sync-period=1s", "--iptables-min-sync-period=0", "--healthz-bind-address=127.0.0.1:20256")...)
	second.waitOutput(who, "--instance")
	c.expectNow("pod-1")
	first.kill()
	d.write("endpoints.yaml", webSlices(2))
	second.waitOutput("the first sync is done")
	c.expectSoon("pod-2")
}
