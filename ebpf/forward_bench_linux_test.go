package ebpf_test

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"

	discovery "k8s.io/api/discovery/v1"
)

// uplink is a node into whose device for clients frames are put.
type uplink struct {
	frames *bpftest.Frames
	engine *ebpf.Engine
	world  *proxiertest.Topology
	sent   uint64
}

// BenchmarkForward measures a datagram of an established flow from a frame at the client's device of the node
// until the pod's host drops it: with rules alone, with the fast path, with the fast path that gives
// packets to the pod's end of the veth, routed without a Service, and dropped at once, which is the price of the
// frame. The rounds take turns.
func BenchmarkForward(b *testing.B) {
	rounds, frames := 1, uint32(20_000)
	if os.Getenv("SERVICEPLANE_BENCH_FULL") == "1" {
		rounds, frames = 7, 400_000 // see Frames.Send
	}
	names := []string{"rules", "forward", "peer", "routed", "frame"}
	var nodes []*uplink
	for _, name := range names {
		nodes = append(nodes, newUplink(b, name))
	}
	all := make([][]float64, len(nodes))
	for range b.N {
		for range rounds {
			for i, n := range nodes {
				all[i] = append(all[i], n.send(b, frames))
			}
		}
	}
	for i, n := range nodes {
		n.check(b, names[i])
	}
	medians := make([]float64, len(all))
	for i, a := range all {
		slices.SortFunc(a, cmp.Compare[float64])
		medians[i] = a[len(a)/2]
		b.ReportMetric(medians[i], names[i]+"-ns/packet")
	}
	net := func(i int) float64 { return (medians[i] - medians[4]) / (medians[0] - medians[4]) }
	b.ReportMetric(net(1), "forward/rules")
	b.ReportMetric(net(2), "peer/rules")
	b.ReportMetric(0, "ns/op")
}

func newUplink(b *testing.B, name string) *uplink {
	b.Helper()
	n := &uplink{world: proxiertest.NewTopology(b)}
	config := ebpf.Config{Config: nftables.Config{Config: n.world.Config()}, Sockets: sockets(b)}
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, _ *v1.Service) { p.FastPath = true }
	every := func(string) bool { return true }
	if name == "forward" || name == "peer" {
		config.FastPathByBPF = true
	}
	if name == "peer" {
		config.FastPathPeer = every
	}
	config.Families = []v1.IPFamily{v1.IPv4Protocol}
	engine, err := ebpf.NewEngine(config, v1.IPv4Protocol, proxier.Deps{})
	netnstest.Check(b, err)
	n.engine = engine
	p, err := proxier.New(config.Config.Config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	netnstest.Check(b, err)
	vip, pod := netip.MustParseAddrPort("10.96.0.1:80"), n.world.LocalPods[0]
	p.OnServiceAdd(proxiertest.Service("default", "web", proxiertest.ClusterIPs(vip.Addr().String()), proxiertest.Port("udp", v1.ProtocolUDP, 80)))
	p.OnEndpointSliceAdd(proxiertest.Slice("default", "web", discovery.AddressTypeIPv4,
		proxiertest.SlicePort("udp", v1.ProtocolUDP, 8080), proxiertest.Endpoint(pod.Addr(v1.IPv4Protocol).String())))
	proxiertest.Run(b, p)
	netnstest.Check(b, proxiertest.Sync(b.Context(), p))
	to := vip
	if name == "routed" {
		to = netip.AddrPortFrom(pod.Addr(v1.IPv4Protocol), 8080)
	}
	n.establish(b, to)
	if name == "frame" {
		n.frames.DropAtOnce(b)
	}
	netnstest.Check(b, pod.Do(func() error {
		return exec.CommandContext(b.Context(), "nft", "add table inet sink; add chain inet sink in { type filter hook prerouting priority -300; policy drop; counter; }").Run()
	}))
	return n
}

// establish makes a flow, and its frame: connection tracking takes two seconds.
func (n *uplink) establish(b *testing.B, to netip.AddrPort) {
	b.Helper()
	flow, err := n.world.Client.Open(b.Context(), "udp", to, proxiertest.AskOptions{From: n.world.Client.Addr(v1.IPv4Protocol), FromPort: 12345})
	netnstest.Check(b, err)
	b.Cleanup(func() { _ = flow.Close() })
	start := time.Now()
	poll.Until(b, "the flow is established", func() bool {
		_, err := flow.Ask(b.Context())
		netnstest.Check(b, err)
		return time.Since(start) > 2500*time.Millisecond
	})
	n.frames = bpftest.NewFrames(b, bpftest.Device{Doer: n.world.Node, Name: "client"}, netip.AddrPortFrom(n.world.Client.Addr(v1.IPv4Protocol), 12345), to, false)
}

// check wants that each frame took its way to the end.
func (n *uplink) check(b *testing.B, name string) {
	b.Helper()
	packets, toPeer, _ := n.engine.ForwardCounts() // an error is 0
	if carried := name == "forward" || name == "peer"; carried != (packets >= n.sent) || (name == "peer") != (toPeer >= n.sent) {
		b.Errorf("%s: %d packets, %d of them to the peer, of %d frames", name, packets, toPeer, n.sent)
	}
	var text []byte
	netnstest.Check(b, n.world.LocalPods[0].Do(func() (err error) {
		text, err = exec.CommandContext(b.Context(), "nft", "list", "table", "inet", "sink").Output()
		return err
	}))
	var arrived uint64
	if at := strings.Index(string(text), "counter packets "); at >= 0 {
		_, _ = fmt.Sscanf(string(text[at:]), "counter packets %d", &arrived)
	}
	if (name == "frame") != (arrived < n.sent) {
		b.Errorf("%s: %d of %d frames arrive", name, arrived, n.sent)
	}
}

// send puts frames into the device, and returns nanoseconds of each.
func (n *uplink) send(b *testing.B, frames uint32) float64 {
	b.Helper()
	n.sent += uint64(frames)
	return n.frames.Send(b, frames)
}
