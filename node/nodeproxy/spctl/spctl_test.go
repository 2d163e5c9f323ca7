package spctl_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/canary"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/node/nodeproxy/spctl"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var update = flag.Bool("update", false, "write what the commands print to testdata")

// newProxy returns a Proxier with one Service of two ports in both IP families. It runs
// until the test ends.
func newProxy(t *testing.T, change ...func(*proxier.Proxier)) *proxier.Proxier {
	t.Helper()
	config := proxier.Config{
		Node: changetracker.Node{
			Name: "node-1", Zone: "zone-a",
			Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")},
			PodCIDRs:  []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")},
		},
		Masquerade: proxier.Masquerade{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}},
	}
	p, err := proxier.New(config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{
		v1.IPv4Protocol: &proxiertest.RecordingEngine{}, v1.IPv6Protocol: &proxiertest.RecordingEngine{},
	})
	if err != nil {
		t.Fatal(err)
	}
	p.OnServiceAdd(proxiertest.Service("shop", "web",
		proxiertest.ClusterIPs("10.96.0.10", "fd00:96::10"), proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30080),
		proxiertest.LoadBalancer("198.51.100.10"), proxiertest.SourceRanges("203.0.113.0/24"), proxiertest.ExternalPolicyLocal(),
		proxiertest.ClientAffinity(time.Hour)))
	p.OnServiceAdd(proxiertest.Service("shop", "idle", proxiertest.ClusterIPs("10.96.0.11"), proxiertest.Port("dns", v1.ProtocolUDP, 53)))
	p.OnEndpointSliceAdd(proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
		proxiertest.Endpoint("10.244.1.5", proxiertest.OnNode("node-1"), proxiertest.InZone("zone-a")),
		proxiertest.Endpoint("10.244.2.5", proxiertest.OnNode("node-2"), proxiertest.InZone("zone-b")),
		proxiertest.Endpoint("10.244.2.6", proxiertest.OnNode("node-2"), proxiertest.NotServing())))
	for _, c := range change {
		c(p)
	}
	proxiertest.Run(t, p)
	if err := proxiertest.Sync(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	return p
}

// serve serves a handler on a loopback address until the test ends.
func serve(t *testing.T, handler http.Handler) (address string) {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.URL
}

// run executes a command and returns what it prints.
func run(t *testing.T, address string, args ...string) (string, error) {
	t.Helper()
	return runWith(t, spctl.Options{Address: address}, args...)
}

func runWith(t *testing.T, options spctl.Options, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	command := spctl.New(options)
	command.SetArgs(args)
	command.SetOut(&out)
	command.SetErr(&out)
	err := command.ExecuteContext(t.Context())
	return out.String(), err
}

var (
	addresses = regexp.MustCompile(`http://127\.0\.0\.1:\d+`)
	times     = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z`)
	ages      = regexp.MustCompile(`\b\d+[smhd] ago\b`)
	durations = regexp.MustCompile(`\b[0-9.]+(ns|µs|ms)\b`)
	variable  = regexp.MustCompile(`(?m)^.*(TIME|AGO|DURATION|STARTED|LAST-SYNC|SINCE).*$`)
	gaps      = regexp.MustCompile(` {2,}`)
)

// normalized replaces what differs from run to run, and the width of columns with it.
func normalized(text string) string {
	text = addresses.ReplaceAllString(text, "ADDRESS")
	text = durations.ReplaceAllString(ages.ReplaceAllString(times.ReplaceAllString(text, "TIME"), "AGO"), "DURATION")
	return variable.ReplaceAllStringFunc(text, func(line string) string { return gaps.ReplaceAllString(line, "  ") })
}

// transcript runs commands and returns what they print, with their errors.
func transcript(t *testing.T, options spctl.Options, lines ...string) string {
	t.Helper()
	var all strings.Builder
	for _, line := range lines {
		out, err := runWith(t, options, strings.Fields(line)...)
		all.WriteString("$ spctl " + line + "\n" + out)
		if err != nil {
			fmt.Fprintf(&all, "exit status %d: %v\n", spctl.ExitStatus(err), err)
		}
		all.WriteString("\n")
	}
	return normalized(all.String())
}

// TestCommands compares what commands print with testdata/commands.txt.
func TestCommands(t *testing.T) {
	t.Parallel()
	address := serve(t, debughttp.Handler(newProxy(t), debughttp.Title("test"), debughttp.Version("v1")))
	golden(t, "commands.txt", transcript(t, spctl.Options{Address: address},
		"services", "services web", "services 10.244.2.6", "services nothing", "services --limit 1", "services -n none", "services --no-endpoints", "services --filter affinity,external --no-endpoints", "services --filter fast",
		"services web -o yaml",
		"services idle -o json", "get shop/web", "get shop/idle", "status",
		"explain 10.244.1.5 10.96.0.10:80", "explain 10.244.1.5 10.96.0.11:53/udp", "explain 192.0.2.10 192.0.2.10:30080",
		"explain --from 203.0.113.1 --to 198.51.100.10:80 --origin outside --interface eth0", "explain 10.244.1.5 10.96.0.99:80 -o yaml",
		"__complete get shop/w", "__complete services --output t",
	))
}

// otherProxy has one endpoint more and a Service less than newProxy, and another node port.
func otherProxy(p *proxier.Proxier) {
	p.OnServiceDelete(proxiertest.Service("shop", "idle"))
	p.OnServiceAdd(proxiertest.Service("shop", "web", proxiertest.ClusterIPs("10.96.0.10", "fd00:96::10"), proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30081),
		proxiertest.LoadBalancer("198.51.100.10"), proxiertest.SourceRanges("203.0.113.0/24"), proxiertest.ExternalPolicyLocal(), proxiertest.ClientAffinity(time.Hour)))
	p.OnEndpointSliceAdd(proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, proxiertest.SliceName("more"), proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
		proxiertest.Endpoint("10.244.3.5", proxiertest.OnNode("node-3"))))
}

// TestNodes compares what commands print about several nodes with testdata/nodes.txt. node-4
// does not answer.
func TestNodes(t *testing.T) {
	t.Parallel()
	same, other := serve(t, debughttp.Handler(newProxy(t), debughttp.Version("v1"))), serve(t, debughttp.Handler(newProxy(t, otherProxy), debughttp.Version("v2")))
	nodes := []spctl.NodeProxy{{Name: "node-1", Address: same}, {Name: "node-2", Address: same}, {Name: "node-3", Address: other}}
	options := spctl.Options{Nodes: func(context.Context) ([]spctl.NodeProxy, error) {
		return append(nodes, spctl.NodeProxy{Name: "node-4", Err: errors.New("the pod is not ready")}), nil
	}}
	golden(t, "nodes.txt", transcript(t, options,
		"services", "services web --node node-1,node-2", "status", "diff", "diff --node node-1,node-2", "diff -o yaml --node node-1,node-3",
		"get shop/web", "get shop/idle --node node-1", "status --node node-9"))
}

// TestDiffWithAFile compares with what command state printed before a change.
func TestDiffWithAFile(t *testing.T) {
	t.Parallel()
	same, other := serve(t, debughttp.Handler(newProxy(t))), serve(t, debughttp.Handler(newProxy(t, otherProxy)))
	for _, format := range []string{"json", "yaml"} {
		before, err := run(t, same, "state", "-o", format)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "before")
		if err := os.WriteFile(file, []byte(before), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := run(t, same, "diff", file); err != nil || !strings.HasPrefix(out, "no differences") {
			t.Errorf("diff of nothing prints\n%s%v, want no differences", out, err)
		}
		out, err := run(t, other, "diff", file)
		if spctl.ExitStatus(err) != spctl.StatusDifferent || !strings.Contains(out, "endpoint 10.244.3.5:8080") {
			t.Errorf("diff prints\n%s%v, want the endpoint and ErrDifferent", out, err)
		}
	}
	services := filepath.Join(t.TempDir(), "services")
	if err := os.WriteFile(services, []byte(`{"services": []}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := run(t, same, "diff", services); err == nil || !strings.Contains(err.Error(), "want the output of command state") {
		t.Errorf("diff with another file = %v, want an error that says which", err)
	}
	if _, err := run(t, same, "diff"); err == nil || !strings.Contains(err.Error(), "--with ADDRESS") {
		t.Errorf("diff with nothing = %v, want an error that says what is missing", err)
	}
}

// TestDiffLeavesOutTheCanary: its Service has another endpoint on each node.
func TestDiffLeavesOutTheCanary(t *testing.T) {
	t.Parallel()
	of := func(endpoint string) (address string) {
		return serve(t, debughttp.Handler(newProxy(t, func(p *proxier.Proxier) {
			p.OnServiceAdd(proxiertest.Service(canary.Namespace, "canary-ipv4", proxiertest.ClusterIPs("192.0.0.7"), proxiertest.Port("test", v1.ProtocolTCP, 80)))
			p.OnEndpointSliceAdd(proxiertest.Slice(canary.Namespace, "canary-ipv4", discovery.AddressTypeIPv4,
				proxiertest.SlicePort("test", v1.ProtocolTCP, 8080), proxiertest.Endpoint(endpoint)))
		})))
	}
	if out, err := run(t, of("192.0.2.1"), "diff", "--with", of("192.0.2.2")); err != nil || !strings.HasPrefix(out, "no differences") {
		t.Errorf("diff prints\n%s%v, want no differences", out, err)
	}
}

// A slice that fits no port is shown with its ports: without it nothing says why there are no endpoints.
func TestASliceThatFitsNoPortIsShown(t *testing.T) {
	t.Parallel()
	address := serve(t, debughttp.Handler(newProxy(t, func(p *proxier.Proxier) {
		p.OnEndpointSliceAdd(proxiertest.Slice("shop", "idle", discovery.AddressTypeIPv4, proxiertest.SliceName("typo"),
			proxiertest.SlicePort("dsn", v1.ProtocolUDP, 5353), proxiertest.Endpoint("10.244.1.7")))
	})))
	out, err := run(t, address, "get", "shop/idle")
	if text := gaps.ReplaceAllString(out, " "); err != nil || !strings.Contains(text, "EndpointSlices that fit no port of the Service") || !strings.Contains(text, "typo IPv4 dsn/UDP 1") {
		t.Errorf("get prints\n%s%v, want the slice with its port", out, err)
	}
}

// golden compares a text with a file of testdata, which -update writes.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got), -update writes it:\n%s", path, diff)
	}
}

// Errors say what failed, why, and what to do.
func TestErrors(t *testing.T) {
	t.Parallel()
	working := serve(t, debughttp.Handler(newProxy(t)))
	other := serve(t, http.NotFoundHandler())
	folder := t.TempDir()
	left := filepath.Join(folder, "left.sock")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: left, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		address string
		args    string
		want    []string
	}{
		"no socket":            {"unix://" + folder + "/debug.sock", "status", []string{"ask unix://" + folder, "--debug-socket=off", "--address"}},
		"a socket of the dead": {"unix://" + left, "status", []string{"connection refused", "has ended"}},
		"no such scheme":       {"ftp://127.0.0.1", "status", []string{"--address=ftp://127.0.0.1: want http"}},
		"another server":       {other, "status", []string{"404 Not Found", "debug handler"}},
		"no such Service":      {working, "get shop/none", []string{"no programmed Service has this name: shop/none"}},
		"bad name":             {working, "get a/b/c", []string{"want NAMESPACE/NAME"}},
		"bad packet":           {working, "explain 10.0.0.1 10.96.0.10", []string{"parameter destination"}},
		"no packet":            {working, "explain 10.0.0.1", []string{"want SOURCE DESTINATION"}},
		"bad format":           {working, "status -o xml", []string{"want table, json, yaml"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, err := run(t, test.address, strings.Fields(test.args)...)
			if err == nil || spctl.ExitStatus(err) != spctl.StatusFailed || out != "" {
				t.Fatalf("prints %q, error %v, want an error only", out, err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q lacks %q", err, want)
				}
			}
		})
	}
}

// An interrupt ends a request that gets no answer.
func TestAnInterruptEndsARequest(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(t.Context())
	release := make(chan struct{})
	address := serve(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		stop()
		<-release
	}))
	t.Cleanup(func() { close(release) }) // before the server closes
	command := spctl.New(spctl.Options{Address: address})
	command.SetArgs([]string{"status"})
	if err := command.ExecuteContext(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v, want context.Canceled", err)
	}
}

// Command syncs lists the first sync of each IP family. Their order differs from run to run.
func TestSyncs(t *testing.T) {
	t.Parallel()
	out, err := run(t, serve(t, debughttp.Handler(newProxy(t))), "syncs")
	out = normalized(out)
	for _, want := range []string{
		"STARTED  FAMILY  KIND  DURATION  KERNEL  CHANGES  FAILED  WRITES  FLOWS-DELETED  ERROR\n",
		"TIME  IPv4  full  DURATION  0s  2  0  0  0  -\n", "TIME  IPv6  full  DURATION  0s  1  0  0  0  -\n",
	} {
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("syncs prints\n%s%v, want %q in it", out, err, want)
		}
	}
}

// TestPages: a list is complete if it is longer than one response may be.
func TestPages(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	for i := range 2500 {
		vip := netip.AddrFrom4([4]byte{10, 97, byte(i >> 8), byte(i)})
		p.OnServiceAdd(proxiertest.Service("many", fmt.Sprint("s", i), proxiertest.ClusterIPs(vip.String()), proxiertest.Port("", v1.ProtocolTCP, 80)))
	}
	if err := proxiertest.Sync(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	address := serve(t, debughttp.Handler(p))
	out, err := run(t, address, "services", "many/")
	if lines := strings.Count(out, "\n"); err != nil || lines != 1+2500 {
		t.Errorf("services prints %d lines, %v, want 2501", lines, err)
	}
	if out, err = run(t, address, "services", "many/", "--limit", "1200"); !strings.HasSuffix(out, "and 1300 more\n") {
		t.Errorf("services --limit ends with %q, %v, want the number of the others", out[max(0, len(out)-100):], err)
	}
}

// TestATextCannotMoveTheCursor: names and errors come from other programs.
func TestATextCannotMoveTheCursor(t *testing.T) {
	t.Parallel()
	address := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"title": "a\u001b[2Jb\tc\nd", "families": [], "node": {"addresses": []}}`))
	}))
	out, err := run(t, address, "status")
	if first, _, _ := strings.Cut(out, "\n"); err != nil || first != "Proxy:    a [2Jb c d" {
		t.Errorf("status prints %q, %v, want spaces for control characters", first, err)
	}
}

// noticing tells when a response has its first bytes.
type noticing struct {
	http.ResponseWriter
	begun func()
}

func (n *noticing) Write(p []byte) (int, error) {
	defer n.begun()
	return n.ResponseWriter.Write(p)
}

func (n *noticing) Unwrap() http.ResponseWriter { return n.ResponseWriter }

// Command watch prints changes as they are programmed, of one Service if asked for.
func TestWatch(t *testing.T) {
	t.Parallel()
	for format, want := range map[string]string{
		"table": "changed shop/web http 80/TCP IPv6: 1/1 endpoints, +[fd00:244:2::1]:8080 (ready)",
		"json":  `"endpointsAdded":[{"address":"[fd00:244:2::1]:8080","state":"ready"`,
		"yaml":  "endpointsAdded:\n  - address: '[fd00:244:2::1]:8080'\n    state: ready\n",
	} {
		t.Run(format, func(t *testing.T) {
			t.Parallel()
			p := newProxy(t)
			watched := make(chan struct{})
			begun, handler := sync.OnceFunc(func() { close(watched) }), debughttp.Handler(p)
			address := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				handler.ServeHTTP(&noticing{w, begun}, r)
			}))
			var changes sync.WaitGroup
			changes.Go(func() {
				<-watched
				p.OnServiceAdd(proxiertest.Service("shop", "other", proxiertest.ClusterIPs("10.96.0.12"), proxiertest.Port("", v1.ProtocolTCP, 80)))
				p.OnEndpointSliceAdd(proxiertest.Slice("shop", "web", discovery.AddressTypeIPv6, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
					proxiertest.Endpoint("fd00:244:2::1")))
			})
			out, err := run(t, address, "watch", "shop/web", "--count=1", "-o", format)
			changes.Wait()
			if err != nil || !strings.Contains(out, want) || strings.Contains(out, "other") {
				t.Errorf("watch prints\n%s%v, want %q", out, err, want)
			}
		})
	}
}
