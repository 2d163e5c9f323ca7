package nodeproxy

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// Connections are counted on all ways: spctl and /metrics show the same numbers, exactly.
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

// TestTrafficIsCounted: spctl and /metrics show it, and the kernel setting for it is put back.
func TestTrafficIsCounted(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	const setting = "net/netfilter/nf_conntrack_acct"
	netnstest.Check(t, c.node.SetSysctl(setting, "0"))
	expect := func(want string) {
		t.Helper()
		if got, err := c.node.Sysctl(setting); err != nil || got != want {
			t.Errorf("%s is %q, error %v, want %s", setting, got, err, want)
		}
	}
	state := t.TempDir()
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+state, "--count-traffic", "--canary=off")
	p.waitHealthy()
	expect("1")
	const connections = 5
	for range connections {
		answer, err := netns.Ask(t.Context(), c.client, "tcp", netip.MustParseAddrPort(vip4), netns.AskOptions{})
		if err != nil || answer.Server != "pod-1" {
			t.Errorf("%q, error %v, want pod-1", answer.Server, err)
		}
	}
	poll.Nil(t, "the traffic is counted", func() error {
		text := spctlRuns(t, filepath.Join(state, "debug.sock"), "counts", "web")
		var row []string // of all endpoints
		for line := range strings.Lines(text) {
			if row = strings.Fields(line); len(row) == 10 && row[4] == "all" {
				break
			}
		}
		if len(row) != 10 {
			return fmt.Errorf("spctl counts prints %s, want a row of all endpoints", text)
		}
		const packets, size = 4 * connections, 4 * 52 * connections // at least: handshake, question, end
		for column, least := range map[int]int{6: packets, 7: packets, 8: size, 9: size} {
			if n, err := strconv.Atoi(row[column]); err != nil || n < least || row[5] != "-" {
				return fmt.Errorf("spctl counts prints %s, want no connections, and at least %d in column %d of the first row", text, least, column)
			}
		}
		_, metrics := p.get("127.0.0.1:10249", "/metrics")
		for _, line := range []string{
			"serviceplane_traffic_losses_total 0",
			`serviceplane_service_traffic_bytes_total{direction="in",ip_family="IPv4",namespace="default",port="",protocol="TCP",service="web"} ` + row[8],
		} {
			if !strings.Contains(metrics, line+"\n") {
				return fmt.Errorf("no metric %s", line)
			}
		}
		return nil
	})
	p.kill()
	cleanUp(t, c.node, "--state-dir="+state)
	expect("0")
}
