package nftrace_test

import (
	"context"
	"net/netip"
	"strings"
	"testing"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nftrace"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestMain(m *testing.M) {
	leaveATable() // in a process that a test kills
	goleak.VerifyTestMain(m)
}

// engines make Providers whose rules are rules of nf_tables.
var engines = map[string]func(proxier.Config) (*proxier.Proxier, error){
	"nftables": func(c proxier.Config) (*proxier.Proxier, error) {
		return nftables.New(nftables.Config{Config: c}, proxier.Deps{})
	},
	"iptables-nft": func(c proxier.Config) (*proxier.Proxier, error) {
		return iptables.New(iptables.Config{Config: c, Variant: iptables.VariantNFT}, proxier.Deps{})
	},
}

// world is a node with a proxy and one Service of both families, whose endpoint is a pod of the
// node: cluster IPs 10.96.0.10 and fd00:96::10, port 80 over TCP and UDP.
type world struct {
	*proxiertest.Topology

	t     *testing.T
	proxy *proxier.Proxier
}

// Service shop/host, at cluster IPs 10.96.0.11 and fd00:96::11, has the node itself as endpoint.
const hostPort = 31999

// newWorld runs a proxy until the test ends; without an engine there is none.
func newWorld(t *testing.T, engine func(proxier.Config) (*proxier.Proxier, error)) *world {
	t.Helper()
	w := &world{Topology: proxiertest.NewTopology(t), t: t}
	if engine == nil {
		return w
	}
	var err error
	w.proxy, err = engine(w.Config())
	netnstest.Check(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.proxy.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		netnstest.Check(t, <-ended)
	})
	w.proxy.OnServiceAdd(proxiertest.Service("shop", "web", proxiertest.ClusterIPs("10.96.0.10", "fd00:96::10"),
		proxiertest.Port("tcp", v1.ProtocolTCP, 80), proxiertest.Port("udp", v1.ProtocolUDP, 80)))
	for family, pod := range map[discovery.AddressType]string{discovery.AddressTypeIPv4: "10.244.1.2", discovery.AddressTypeIPv6: w.LocalPods[0].Addrs[1].String()} {
		w.proxy.OnEndpointSliceAdd(proxiertest.Slice("shop", "web", family,
			proxiertest.SlicePort("tcp", v1.ProtocolTCP, 8080), proxiertest.SlicePort("udp", v1.ProtocolUDP, 8080), proxiertest.Endpoint(pod)))
	}
	w.proxy.OnServiceAdd(proxiertest.Service("shop", "host", proxiertest.ClusterIPs("10.96.0.11", "fd00:96::11"), proxiertest.Port("tcp", v1.ProtocolTCP, 80)))
	for family, addrType := range map[v1.IPFamily]discovery.AddressType{v1.IPv4Protocol: discovery.AddressTypeIPv4, v1.IPv6Protocol: discovery.AddressTypeIPv6} {
		w.proxy.OnEndpointSliceAdd(proxiertest.Slice("shop", "host", addrType, proxiertest.SlicePort("tcp", v1.ProtocolTCP, hostPort), proxiertest.Endpoint(w.Node.Addr(family).String())))
	}
	w.proxy.OnServiceSynced()
	w.proxy.OnEndpointSlicesSynced()
	netnstest.Check(t, proxiertest.Sync(t.Context(), w.proxy))
	return w
}

// toService is a packet of the client to the Service.
func (w *world) toService(protocol desired.Protocol, family v1.IPFamily) desired.Packet {
	to := netip.MustParseAddrPort("10.96.0.10:80")
	if family == v1.IPv6Protocol {
		to = netip.MustParseAddrPort("[fd00:96::10]:80")
	}
	return desired.Packet{Protocol: protocol, Source: w.Client.Addr(family), Destination: to, Origin: desired.FromOutside}
}

// send sends a packet of a host, and traces it.
func (w *world) send(from *proxiertest.Host, p desired.Packet) nftrace.TraceResult {
	w.t.Helper()
	result, err := nftrace.Trace(w.t.Context(), nftrace.Options{NetNS: w.Node.NetNS(), Packet: p, Send: true, SendFrom: from.NetNS()})
	netnstest.Check(w.t, err)
	return result
}

// judge sends a packet of the client, and judges its way.
func (w *world) judge(p desired.Packet) nftrace.Judgement {
	w.t.Helper()
	return w.judgeFrom(w.Client, p)
}

func (w *world) judgeFrom(from *proxiertest.Host, p desired.Packet) nftrace.Judgement {
	w.t.Helper()
	result := w.send(from, p)
	explanation, err := w.proxy.Explain(w.t.Context(), p)
	netnstest.Check(w.t, err)
	return nftrace.Compare(&result, &explanation, proxier.DefaultNames())
}

// command runs a program on a host.
func (w *world) command(at *proxiertest.Host, args ...string) string {
	w.t.Helper()
	return netnstest.Run(w.t, at, args[0], args[1:]...)
}

// tables are the tables of traces on the node.
func (w *world) tables() (names []string) {
	w.t.Helper()
	for line := range strings.Lines(w.command(w.Node, "nft", "list", "tables")) {
		if _, name, found := strings.Cut(line, "serviceplane-trace-"); found {
			names = append(names, name)
		}
	}
	return names
}
