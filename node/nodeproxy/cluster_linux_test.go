package nodeproxy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/internal/manifest"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// Service web of both IP families, and its manifests. The pods are pod-1 and pod-2.
const (
	vip4, vip6 = "10.96.0.10:80", "[fd00:96::10]:80"
	nodePort   = "192.0.2.10:30080"

	webService = `apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  clusterIPs: [10.96.0.10, "fd00:96::10"]
  ports: [{port: 80, targetPort: 8080, nodePort: 30080}]
`
	thisNode = `apiVersion: v1
kind: Node
metadata: {name: node-1}
spec: {podCIDRs: [10.244.1.0/24, "fd00:244:1::/64"]}
status: {addresses: [{type: InternalIP, address: 192.0.2.10}, {type: InternalIP, address: "2001:db8::10"}]}
`
)

// webSlices returns EndpointSlices with one pod as the only endpoint.
func webSlices(pod int) string {
	one := `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-%s, labels: {kubernetes.io/service-name: web}}
addressType: %s
ports: [{port: 8080}]
endpoints: [{addresses: ["%s"], nodeName: node-1}]
---
`
	return fmt.Sprintf(one, "v4", "IPv4", podAddr(pod, 4)) + fmt.Sprintf(one, "v6", "IPv6", podAddr(pod, 6))
}

// podAddr returns the address of a pod.
func podAddr(pod, family int) string {
	if family == 4 {
		return fmt.Sprintf("10.244.%d.2", pod)
	}
	return fmt.Sprintf("fd00:244:%d::2", pod)
}

// small is a node with two pods, and a client outside.
type small struct {
	t            testing.TB
	node, client *netns.NS
	pods         []*netns.NS
}

// newSmall builds the network, without any proxy. It skips without root.
func newSmall(tb testing.TB) *small {
	tb.Helper()
	c := &small{t: tb, node: netnstest.New(tb), client: netnstest.New(tb)}
	netnstest.Check(tb, c.node.Forward())
	c.connect("client", c.client, []string{"192.0.2.10/24", "2001:db8::10/64"}, []string{"192.0.2.1/24", "2001:db8::1/64"})
	for n := 1; n <= 2; n++ {
		pod := netnstest.New(tb)
		gateway := []string{fmt.Sprintf("10.244.%d.1/24", n), fmt.Sprintf("fd00:244:%d::1/64", n)}
		c.connect(fmt.Sprintf("pod%d", n), pod, gateway, []string{podAddr(n, 4) + "/24", podAddr(n, 6) + "/64"})
		netnstest.Serve(tb, pod, fmt.Sprintf("pod-%d", n), 8080)
		c.pods = append(c.pods, pod)
	}
	return c
}

// connect connects a namespace with the node, and adds default routes through it.
func (c *small) connect(link string, ns *netns.NS, nodeEnd, farEnd []string) {
	c.t.Helper()
	parse := func(texts []string) (prefixes []netip.Prefix) {
		for _, text := range texts {
			prefixes = append(prefixes, netip.MustParsePrefix(text))
		}
		return prefixes
	}
	node := parse(nodeEnd)
	netnstest.Check(c.t, errors.Join(
		netns.Connect(netns.Plug{NS: c.node, Link: link, Addrs: node}, netns.Plug{NS: ns, Link: "eth0", Addrs: parse(farEnd)}),
		ns.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), node[0].Addr()),
		ns.AddRoute(netip.MustParsePrefix("::/0"), node[1].Addr())))
}

// flows returns the frontends of the Service.
func flows() []netip.AddrPort {
	return []netip.AddrPort{netip.MustParseAddrPort(vip4), netip.MustParseAddrPort(vip6), netip.MustParseAddrPort(nodePort)}
}

// ask opens one connection, and returns the server that answered, or the error.
func (c *small) ask(to netip.AddrPort, opts netns.AskOptions) string {
	c.t.Helper()
	answer, err := netns.Ask(c.t.Context(), c.client, "tcp", to, opts)
	if err != nil {
		return err.Error()
	}
	return answer.Server
}

// expectNow wants new connections to all frontends to reach a server.
func (c *small) expectNow(server string) {
	c.t.Helper()
	for _, to := range flows() {
		if got := c.ask(to, netns.AskOptions{}); got != server {
			c.t.Errorf("%s: %s answers, want %s", to, got, server)
		}
	}
}

// expectSoon waits until new connections to all frontends reach a server.
func (c *small) expectSoon(server string) {
	c.t.Helper()
	again := netns.AskOptions{Timeout: 2 * time.Second} // for connections to an endpoint that is gone
	for _, to := range flows() {
		got := ""
		if !poll.Soon(func() bool { got = c.ask(to, again); return got == server }) {
			c.t.Fatalf("%s: %s answers, want %s", to, got, server)
		}
	}
}

// open opens a connection that stays open.
func (c *small) open(to string) *netns.Flow {
	c.t.Helper()
	flow, err := netns.Open(c.t.Context(), c.client, "tcp", netip.MustParseAddrPort(to), netns.AskOptions{})
	if err != nil {
		c.t.Fatalf("open flow to %s: %v", to, err)
	}
	c.t.Cleanup(func() { _ = flow.Close() })
	return flow
}

// expectOpen wants an open connection to work.
func (c *small) expectOpen(flow *netns.Flow, server string) {
	c.t.Helper()
	if answer, err := flow.Ask(c.t.Context()); err != nil || answer.Server != server {
		c.t.Errorf("the open connection gets %q, %v, want a response of %s", answer.Server, err, server)
	}
}

// nft runs nft in the node, and returns its output.
func (c *small) nft(args ...string) string {
	c.t.Helper()
	return nftIn(c.t, c.node, args...)
}

// nftIn runs nft in a namespace, and returns its output.
func nftIn(tb testing.TB, ns *netns.NS, args ...string) string {
	tb.Helper()
	return netnstest.Run(tb, ns, "nft", args...)
}

// state returns the rules, addresses and settings of the node.
func (c *small) state() string {
	c.t.Helper()
	text := c.nft("list", "ruleset") + "\n"
	var addrs []string
	err := c.node.Do(func() error {
		links, err := net.Interfaces()
		for _, link := range links {
			own, addrErr := link.Addrs()
			err = errors.Join(err, addrErr)
			addrs = append(addrs, fmt.Sprint(link.Name, " ", own))
		}
		return err
	})
	if err != nil {
		c.t.Fatalf("list addresses: %v", err)
	}
	slices.Sort(addrs)
	return text + strings.Join(addrs, "\n") + "\n" + c.sysctls()
}

// sysctls returns the conntrack settings of the node.
func (c *small) sysctls() string {
	c.t.Helper()
	var text strings.Builder
	err := c.node.Do(func() error {
		files, err := filepath.Glob("/proc/sys/net/netfilter/nf_conntrack_*")
		for _, file := range files {
			if filepath.Base(file) == "nf_conntrack_count" {
				continue
			}
			value, readErr := os.ReadFile(file)
			err = errors.Join(err, readErr)
			fmt.Fprintf(&text, "%s = %s", filepath.Base(file), value)
		}
		return err
	})
	if err != nil {
		c.t.Fatalf("read settings: %v", err)
	}
	return text.String()
}

// directory is a directory of manifests.
type directory struct {
	t    *testing.T
	path string
}

func newDirectory(t *testing.T) *directory {
	t.Helper()
	d := &directory{t, t.TempDir()}
	d.write("node.yaml", thisNode)
	d.write("service.yaml", webService)
	d.write("endpoints.yaml", webSlices(1))
	return d
}

func (d *directory) write(name, text string) {
	d.t.Helper()
	if err := os.WriteFile(filepath.Join(d.path, name), []byte(text), 0o600); err != nil {
		d.t.Fatal(err)
	}
}

func (d *directory) remove(name string) {
	d.t.Helper()
	if err := os.Remove(filepath.Join(d.path, name)); err != nil {
		d.t.Fatal(err)
	}
}

// objects parses manifests for an API server.
func objects(tb testing.TB, text string) []manifest.Object {
	tb.Helper()
	read, errs := manifest.Parse("test.yaml", []byte(text))
	for _, err := range errs {
		tb.Fatal(err)
	}
	return read
}
