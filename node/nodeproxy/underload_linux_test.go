package nodeproxy

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/healthcheck"
)

const (
	loadVIP      = "10.96.0.1"
	stickyVIP    = "10.96.0.2"
	loadServices = 1000 // besides the two above
	loadClients  = 20   // addresses with session affinity
	loadFlows    = 20   // connections that stay open
	loadWorkers  = 4
)

// loaded is a node with three pods, a client network, and continuous traffic.
type loaded struct {
	client, node *netns.NS
	manifests    string // of the Services with traffic, and many others
	others       string // of as many other Services, for a second instance

	stop   context.CancelFunc
	wg     sync.WaitGroup
	counts counts
}

// counts are the results of the traffic so far.
type counts struct {
	connections, failed, resets, answers, moved atomic.Int64
}

func newLoaded(t *testing.T) *loaded {
	t.Helper()
	l := &loaded{client: netnstest.New(t), node: netnstest.New(t), manifests: t.TempDir(), others: t.TempDir()}
	netnstest.Check(t, l.node.Forward())
	var clients, pods []string
	for i := range loadClients {
		clients = append(clients, fmt.Sprintf("198.51.100.%d", 10+i))
	}
	l.cable(t, "client", "198.51.100.1", l.client, clients...)
	for i := range 3 {
		pod, addr := netnstest.New(t), fmt.Sprintf("10.244.%d.2", i)
		l.cable(t, fmt.Sprintf("pod%d", i), fmt.Sprintf("10.244.%d.1", i), pod, addr)
		netnstest.Serve(t, pod, fmt.Sprintf("pod-%d", i), 8080)
		pods = append(pods, addr)
	}
	l.writeManifests(t, pods)
	return l
}

// cable connects a namespace with the node.
func (l *loaded) cable(t *testing.T, link, gateway string, ns *netns.NS, addrs ...string) {
	t.Helper()
	far := netns.Plug{NS: ns, Link: "eth0"}
	for _, addr := range addrs {
		far.Addrs = append(far.Addrs, netip.MustParsePrefix(addr+"/24"))
	}
	near := netns.Plug{NS: l.node, Link: link, Addrs: []netip.Prefix{netip.MustParsePrefix(gateway + "/24")}}
	netnstest.Check(t, errors.Join(
		netns.Connect(near, far),
		ns.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr(gateway))))
}

func (l *loaded) writeManifests(t *testing.T, pods []string) {
	t.Helper()
	var used strings.Builder
	loadManifest(&used, "web", loadVIP, "", pods)
	loadManifest(&used, "sticky", stickyVIP, "  sessionAffinity: ClientIP\n", pods)
	write := func(dir, file, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(l.manifests, "used.yaml", used.String())
	for net, dir := range map[byte]string{97: l.manifests, 98: l.others} {
		var b strings.Builder
		for i := range loadServices {
			loadManifest(&b, fmt.Sprintf("other-%d", i), netip.AddrFrom4([4]byte{10, net, byte(i >> 8), byte(i)}).String(), "", pods)
		}
		write(dir, "others.yaml", b.String())
	}
}

func loadManifest(b *strings.Builder, name, vip, more string, pods []string) {
	fmt.Fprintf(b, `---
apiVersion: v1
kind: Service
metadata: {name: %[1]s, namespace: default}
spec:
  clusterIP: %[2]s
%[3]s  ports: [{name: http, port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s-a, namespace: default, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
`, name, vip, more)
	for _, pod := range pods {
		fmt.Fprintf(b, "- addresses: [%s]\n", pod)
	}
}

// begin starts the traffic: new connections, connections that stay open, and clients with
// session affinity.
func (l *loaded) begin(t *testing.T) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	l.stop = func() { stop(); l.wg.Wait() }
	t.Cleanup(l.stop)
	web := netip.AddrPortFrom(netip.MustParseAddr(loadVIP), 80)
	for range loadWorkers {
		l.wg.Go(func() { l.connectAgainAndAgain(ctx, web) })
	}
	for range loadFlows {
		flow, err := netns.Open(ctx, l.client, "tcp", web, netns.AskOptions{})
		if err != nil {
			t.Fatalf("open flow: %v", err)
		}
		l.wg.Go(func() { l.keepAsking(ctx, flow) })
	}
	sticky := netip.AddrPortFrom(netip.MustParseAddr(stickyVIP), 80)
	for i := range loadClients {
		from := netip.MustParseAddr(fmt.Sprintf("198.51.100.%d", 10+i))
		first, err := netns.Ask(ctx, l.client, "tcp", sticky, netns.AskOptions{From: from})
		if err != nil {
			t.Fatalf("first request of %v: %v", from, err)
		}
		l.wg.Go(func() { l.expect(ctx, sticky, from, first.Server) })
	}
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

func (l *loaded) connectAgainAndAgain(ctx context.Context, to netip.AddrPort) {
	for ; ctx.Err() == nil; wait(ctx, 4*time.Millisecond) {
		_, err := l.ask(ctx, to, netip.Addr{})
		l.note(ctx, err)
	}
}

// ask opens a connection. A SYN that is lost is an error: the kernel sends it again.
func (l *loaded) ask(ctx context.Context, to netip.AddrPort, from netip.Addr) (netns.Answer, error) {
	flow, err := netns.Open(ctx, l.client, "tcp", to, netns.AskOptions{From: from})
	if err != nil {
		return netns.Answer{}, err
	}
	again, lost := flow.SentAgain()
	if lost == nil && again > 0 {
		lost = fmt.Errorf("the SYN was sent %d times again", again)
	}
	a, err := flow.Ask(ctx)
	return a, errors.Join(lost, err, flow.Close())
}

// note counts a new connection.
func (l *loaded) note(ctx context.Context, err error) {
	switch {
	case ctx.Err() != nil:
	case err == nil:
		l.counts.connections.Add(1)
	default:
		l.counts.connections.Add(1)
		l.counts.failed.Add(1)
	}
}

func (l *loaded) keepAsking(ctx context.Context, flow *netns.Flow) {
	defer flow.Close()
	for ; ctx.Err() == nil; wait(ctx, 10*time.Millisecond) {
		_, err := flow.Ask(ctx)
		if ctx.Err() != nil {
			return
		}
		l.counts.answers.Add(1)
		if err != nil {
			l.counts.resets.Add(1)
			return
		}
	}
}

func (l *loaded) expect(ctx context.Context, to netip.AddrPort, from netip.Addr, server string) {
	for ; ctx.Err() == nil; wait(ctx, 50*time.Millisecond) {
		a, err := l.ask(ctx, to, from)
		l.note(ctx, err)
		if err == nil && a.Server != server {
			l.counts.moved.Add(1)
			server = a.Server
		}
	}
}

// row holds the results of the traffic during one event.
type row struct {
	what, note                                  string
	connections, failed, answers, resets, moved int64
}

// during runs an event, and returns the results of the traffic during it and two seconds
// after: a lost SYN is sent again after a second.
func (l *loaded) during(t *testing.T, what string, event func() (note string)) row {
	t.Helper()
	before := l.snapshot()
	note := event()
	wait(t.Context(), 2*time.Second)
	after := l.snapshot()
	return row{
		what: what, note: note,
		connections: after.connections - before.connections, failed: after.failed - before.failed,
		answers: after.answers - before.answers, resets: after.resets - before.resets, moved: after.moved - before.moved,
	}
}

func (l *loaded) snapshot() row {
	c := &l.counts
	return row{
		connections: c.connections.Load(), failed: c.failed.Load(),
		answers: c.answers.Load(), resets: c.resets.Load(), moved: c.moved.Load(),
	}
}

func table(rows []row) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "event\tnew connections\tfailed\tanswers on open ones\treset\tchanged affinities\t")
	for _, r := range rows {
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%d\t%s\n", r.what, r.connections, r.failed, r.answers, r.resets, r.moved, r.note)
	}
	_ = w.Flush()
	return b.String()
}

// Traffic is not affected by restarts of the proxy and by a second instance: no new connection fails, no open one
// is reset, and session affinity holds. Only a flush of the rules makes connections fail, until the proxy has
// restored them.
func TestTrafficIsNotAffected(t *testing.T) {
	l := newLoaded(t)
	flags := []string{"--manifests=" + l.manifests, "--cluster-cidr=10.244.0.0/16", "--state-dir=" + t.TempDir(), "--metrics-bind-address="}
	p := start(t, l.node, flags...)
	p.waitHealthy()
	l.begin(t)
	again := func(more ...string) string {
		p = start(t, l.node, append(flags, more...)...)
		p.waitHealthy()
		return ""
	}
	rows := []row{
		l.during(t, "nothing happens", func() string { return "" }),
		l.during(t, "kill -9, start", func() string { p.kill(); return again() }),
		l.during(t, "kill -9 while it starts, start", func() string {
			p.kill()
			p = start(t, l.node, flags...)
			wait(t.Context(), 50*time.Millisecond)
			p.kill()
			return again()
		}),
		l.during(t, "SIGTERM, start", func() string {
			if err := p.signal(syscall.SIGTERM); err != nil {
				t.Errorf("after SIGTERM: %v, want exit code 0", err)
			}
			return again()
		}),
		l.during(t, "restart with another masquerade bit", func() string { p.kill(); return again("--nftables-masquerade-bit=20") }),
		l.during(t, "restart with another --detect-local-mode", func() string {
			p.kill()
			return again("--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=pod")
		}),
		l.during(t, "second instance added and cleaned up", func() string { l.secondInstance(t); return "" }),
	}
	for _, r := range rows {
		if r.failed+r.resets+r.moved != 0 || r.connections < 100 || r.answers < 100 {
			t.Errorf("%s: %+v; want at least 100 connections and answers, and no failures", r.what, r)
		}
	}
	rows = append(rows, l.during(t, "nft flush ruleset", func() string {
		return fmt.Sprintf("new connections again after %v", l.flush(t).Round(time.Millisecond))
	}))
	t.Logf("\n%s", table(rows))
	l.stop()
}

// secondInstance starts, stops and cleans up another proxy with other Services.
func (l *loaded) secondInstance(t *testing.T) {
	t.Helper()
	second := []string{
		"--instance=other", "--nftables-masquerade-bit=15", "--manifests=" + l.others,
		"--state-dir=" + t.TempDir(), "--metrics-bind-address=",
	}
	q := start(t, l.node, append(second, "--healthz-bind-address=127.0.0.1:20256")...)
	q.waitCode("127.0.0.1:20256", healthcheck.HealthzPath, http.StatusOK)
	if err := q.signal(syscall.SIGTERM); err != nil {
		t.Errorf("the second instance ends with %v, want exit code 0", err)
	}
	cleanUp(t, l.node, second...)
}

// flush removes all rules, and returns when new connections work again.
func (l *loaded) flush(t *testing.T) time.Duration {
	t.Helper()
	err := l.node.Do(exec.Command("nft", "flush", "ruleset").Run)
	flushed := time.Now()
	if err != nil {
		t.Fatalf("nft flush ruleset: %v", err)
	}
	web := netip.AddrPortFrom(netip.MustParseAddr(loadVIP), 80)
	poll.Nil(t, "new connections after the flush", func() error {
		_, err := netns.Ask(t.Context(), l.client, "tcp", web, netns.AskOptions{Timeout: 20 * time.Millisecond})
		return err
	})
	return time.Since(flushed)
}
