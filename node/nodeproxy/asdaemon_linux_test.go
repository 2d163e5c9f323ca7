package nodeproxy

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// The log says why the mode is what it is, unless a flag or the file sets one.
func TestTheLogSaysWhyTheMode(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+t.TempDir(), "--proxy-mode=")
	p.waitOutput("mode is chosen\t{\"mode\": \"nftables\"", "kube-proxy's is iptables before 1.40; node ports are accepted at the node's primary addresses only")
	p.waitHealthy()
	p.kill()
	p = start(t, c.node, "--manifests="+d.path, "--state-dir="+t.TempDir(), "--proxy-mode=nftables")
	p.waitHealthy()
	if strings.Contains(p.stderr(), "mode is chosen") {
		t.Error("the log explains a mode that was set")
	}
}

// TestTheLogAsJSON: every line is an object, client-go's too.
func TestTheLogAsJSON(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+t.TempDir(), "--logging-format=json", "--vmodule=a=1")
	p.waitOutput(`"msg":"the first sync is done"`, `"msg":"setting has no effect: remove it, or see why"`)
	if err := p.signal(os.Interrupt); err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(p.stderr()) {
		if !json.Valid([]byte(line)) {
			t.Errorf("%q is no JSON", line)
		}
	}
}

// The OOM score is kube-proxy's by default: SYS-13, OPT-14. Without CAP_SYS_RESOURCE it stays, which is a warning
// only if the flag is set.
func TestTheOOMScore(t *testing.T) {
	t.Parallel()
	const kept, warning = "3\n", "WARN\t--oom-score-adj has no effect"
	for _, c := range []struct {
		flag, want, without string
		warns               bool
	}{
		{"--oom-score-adj=7", "7\n", "7\n", false}, // raising it needs no capability
		{"--oom-score-adj=-7", "-7\n", kept, true},
		{"--v=0", "-999\n", kept, false},
	} {
		p := startWithScore(t, newSmall(t), strings.TrimSpace(kept), "--manifests="+newDirectory(t).path, "--state-dir="+t.TempDir(), c.flag)
		p.waitHealthy()
		if !mayLowerScore(t) {
			c.want = c.without
		} else {
			c.warns = false
		}
		got, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", p.cmd.Process.Pid))
		netnstest.Check(t, err)
		if warned := strings.Contains(p.stderr(), warning); string(got) != c.want || warned != c.warns {
			t.Errorf("%s: the score is %q, want %q; warned: %t, want %t", c.flag, got, c.want, warned, c.warns)
		}
	}
}

// startWithScore starts the program with an OOM score.
func startWithScore(t *testing.T, c *small, score string, args ...string) *proxyProcess {
	t.Helper()
	binary, err := build()
	netnstest.Check(t, err)
	args = append([]string{"-c", "echo $1 >/proc/self/oom_score_adj; shift; exec \"$@\"", "sh", score, binary, "--hostname-override=node-1", "--conntrack-max-per-core=0"}, args...)
	p := &proxyProcess{t: t, ns: c.node, cmd: exec.Command("sh", args...), ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	netnstest.Check(t, c.node.Do(p.cmd.Start))
	p.watch()
	return p
}

// mayLowerScore reports whether this process has CAP_SYS_RESOURCE.
func mayLowerScore(t *testing.T) bool {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	netnstest.Check(t, err)
	effective := regexp.MustCompile(`CapEff:\t([0-9a-f]+)`).FindSubmatch(status)
	bits, err := strconv.ParseUint(string(effective[1]), 16, 64)
	netnstest.Check(t, err)
	return bits&(1<<unix.CAP_SYS_RESOURCE) != 0
}

// A server that cannot listen ends the program with --bind-address-hard-fail (HC-32).
func TestAServerThatCannotListenEndsTheProgram(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	busy, err := c.node.Listen(t.Context(), "tcp", "127.0.0.1:10249")
	netnstest.Check(t, err)
	flags := []string{"--manifests=" + d.path, "--state-dir=" + t.TempDir(), "--bind-address-hard-fail"}
	p := start(t, c.node, flags...)
	p.wait()
	p.waitOutput("nodeproxy: run metrics server: listen tcp 127.0.0.1:10249", "(--bind-address-hard-fail)")
	if got := p.cmd.ProcessState.ExitCode(); got != 1 {
		t.Errorf("exit code %d, want 1", got)
	}
	netnstest.Check(t, busy.Close())
	p = start(t, c.node, flags...)
	p.waitHealthy()
	if err := p.signal(os.Interrupt); err != nil {
		t.Errorf("after SIGINT: %v, want exit code 0", err)
	}
}

// With --init-only, the program changes kernel settings and ends. It needs no source of Services and programs
// nothing. A setting that cannot be changed is an error.
func TestInitOnly(t *testing.T) {
	t.Parallel()
	c, state := newSmall(t), "--state-dir="+t.TempDir()
	rules := c.nft("list", "ruleset")
	p := start(t, c.node, state, "--init-only", "--conntrack-tcp-timeout-close-wait=11s", "--conntrack-udp-timeout=77s")
	if p.wait(); p.err != nil {
		t.Errorf("--init-only: %v, want exit code 0", p.err)
	}
	settings := c.sysctls()
	for _, want := range []string{"close_wait = 11\n", "udp_timeout = 77\n", "established = 86400\n"} {
		if !strings.Contains(settings, want) {
			t.Errorf("settings are\n%swant %s", settings, want)
		}
	}
	if diff := cmp.Diff(rules, c.nft("list", "ruleset")); diff != "" {
		t.Errorf("rules (-before +after):\n%s", diff)
	}
	// Only the first network namespace may change the maximum.
	p = start(t, c.node, state, "--init-only", "--conntrack-max-per-core=2000000")
	if p.wait(); p.err == nil {
		t.Error("--init-only succeeds although a setting cannot be changed")
	}
	p.waitOutput("nodeproxy: change kernel settings: ", "nf_conntrack_max")
}

// With --write-config-to, the program runs no proxy and needs no privilege.
func TestWriteConfigTo(t *testing.T) {
	netnstest.Unprivileged(t, func(t *testing.T) {
		file := t.TempDir() + "/config.yaml"
		if err := execute(t.Context(), []string{"--write-config-to=" + file}, nil); err != nil {
			t.Fatal(err)
		}
		if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), "mode: nftables\n") {
			t.Errorf("the file is %q, %v, want the default mode in it", text, err)
		}
	})
}

// The page /flagz has the flags of the command line and of the file.
func TestFlagzOfTheProcess(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	d.write("config.conf", "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: iptables\n")
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+t.TempDir(), "--config="+d.path+"/config.conf", "--vmodule=a=1")
	page := ""
	if !poll.Soon(func() bool { _, page = p.get("127.0.0.1:10249", "/flagz"); return page != "" }) {
		t.Fatal("/flagz does not answer")
	}
	for _, want := range []string{"\nproxy-mode=iptables\n", "\nvmodule=a=1\n", "\nhostname-override=node-1\n", "\nconntrack-min=131072\n"} {
		if !strings.Contains(page, want) {
			t.Errorf("/flagz is\n%swant %q in it", page, want)
		}
	}
	if _, status := p.get("127.0.0.1:10249", "/statusz"); !strings.Contains(status, "Up: 0 hr 0") {
		t.Errorf("/statusz is\n%s", status)
	}
	_, metrics := p.get("127.0.0.1:10249", "/metrics")
	if !strings.Contains(metrics, "kubernetes_build_info{build_date=") || !strings.Contains(metrics, `go_version="go1`) {
		t.Error("/metrics lack kubernetes_build_info")
	}
}

// Localhost node ports are measured in mode iptables, as far as the kernel has nfacct. In other modes the metric is
// missing (MET-23).
func TestLocalhostNodePortsAreMeasured(t *testing.T) {
	t.Parallel()
	const metric = "kubeproxy_iptables_localhost_nodeports_accepted_packets_total"
	for _, m := range []mode{modeIPTables, modeNFTables} {
		c, d := newSmall(t), newDirectory(t)
		p := start(t, c.node, "--manifests="+d.path, "--state-dir="+t.TempDir(), "--proxy-mode="+string(m))
		p.waitHealthy()
		_, before := p.get("127.0.0.1:10249", "/metrics")
		if m != modeIPTables {
			if strings.Contains(before, metric) {
				t.Errorf("mode %s has the metric", m)
			}
			continue
		}
		if _, err := netns.Ask(t.Context(), c.node, "tcp", netip.MustParseAddrPort("127.0.0.1:30080"), netns.AskOptions{}); err != nil {
			t.Errorf("connect to the node port: %v", err)
		}
		_, after := p.get("127.0.0.1:10249", "/metrics")
		if !strings.Contains(before, "\n"+metric+" 0\n") || !strings.Contains(after, "\n"+metric+" 1\n") {
			t.Errorf("%s is %q, and %q after a connection, want 0 and 1", metric, lineOf(before, metric), lineOf(after, metric))
		}
	}
}

// lineOf returns the line of a metric.
func lineOf(text, metric string) string {
	return regexp.MustCompile(`(?m)^` + metric + `.*$`).FindString(text)
}
