package decide

import (
	"cmp"
	_ "embed"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// constant is all that the node's rules are: chains of NAT make the kernel translate, and no packet
// matches.
const constant = `table ip study {
chain pre { type nat hook prerouting priority -100; ip daddr 0.0.0.1 dnat to 0.0.0.2; }
chain post { type nat hook postrouting priority 100; ip daddr 0.0.0.1 masquerade; }
}`

var vip = netip.MustParseAddrPort("10.96.0.1:80") // read-only

const endpointPort = 8080

// The compiled program, for both byte orders.
var (
	//go:embed decide_bpfel.o
	little string // read-only
	//go:embed decide_bpfeb.o
	big string // read-only
)

// node is a network whose Service leads to the first pod.
type node struct {
	world  *proxiertest.Topology
	pod    netip.AddrPort
	client *bpftest.Frames // of flows that begin
	open   *bpftest.Frames // of one flow
}

func newNode(tb testing.TB) *node {
	tb.Helper()
	n := &node{world: proxiertest.NewTopology(tb)}
	n.pod = netip.AddrPortFrom(n.world.LocalPods[0].Addr(v1.IPv4Protocol), endpointPort)
	return n
}

// byRules has the engine's rules.
func (n *node) byRules(tb testing.TB) {
	tb.Helper()
	config := n.world.Config()
	config.Families = []v1.IPFamily{v1.IPv4Protocol}
	p, err := nftables.New(nftables.Config{Config: config}, proxier.Deps{})
	netnstest.Check(tb, err)
	p.OnServiceAdd(proxiertest.Service("default", "web", proxiertest.ClusterIPs(vip.Addr().String()), proxiertest.Port("udp", v1.ProtocolUDP, int32(vip.Port()))))
	p.OnEndpointSliceAdd(proxiertest.Slice("default", "web", discovery.AddressTypeIPv4,
		proxiertest.SlicePort("udp", v1.ProtocolUDP, endpointPort), proxiertest.Endpoint(n.pod.Addr().String())))
	proxiertest.Run(tb, p)
	netnstest.Check(tb, proxiertest.Sync(tb.Context(), p))
}

// byConstant has the rules that know no Service.
func (n *node) byConstant(tb testing.TB) {
	tb.Helper()
	n.nft(tb, n.world.Node, constant)
}

func (n *node) nft(tb testing.TB, host *proxiertest.Host, commands string) {
	tb.Helper()
	netnstest.Check(tb, host.Do(func() error {
		out, err := exec.CommandContext(tb.Context(), "nft", commands).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("nft: %w: %s", err, out)
		}
		return err
	}))
}

// decide attaches the program to the client's device of the node.
func (n *node) decide(tb testing.TB) {
	tb.Helper()
	objects := bpftest.Load(tb, map[bool]string{true: big, false: little}[binary.NativeEndian.Uint16([]byte{0, 1}) == 1])
	to := n.pod.Addr().As4()
	for _, protocol := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		addr := vip.Addr().As4()
		key := append(binary.BigEndian.AppendUint16(addr[:], vip.Port()), protocol, 0)
		value := binary.NativeEndian.AppendUint16(to[:], n.pod.Port())
		netnstest.Check(tb, objects.Maps["frontends"].Put(key, append(value, 0, 0)))
	}
	n.client.Attach(tb, objects.Programs["decide"])
}

// frames prepares what the client sends.
func (n *node) frames(tb testing.TB, to netip.AddrPort) {
	tb.Helper()
	device := bpftest.Device{Doer: n.world.Node, Name: "client"}
	n.client = bpftest.NewFrames(tb, device, netip.MustParseAddrPort("198.18.0.0:1"), to, true)
	n.open = bpftest.NewFrames(tb, device, netip.AddrPortFrom(n.world.Client.Addr(v1.IPv4Protocol), 12345), to, false)
}

// TestDecide: the kernel translates both directions of flows whose entry the program has made.
func TestDecide(t *testing.T) {
	n := newNode(t)
	n.byConstant(t)
	n.frames(t, vip)
	ask := func(network string) (string, error) {
		answer, err := n.world.Client.Ask(t.Context(), network, vip, proxiertest.AskOptions{Timeout: time.Second})
		return answer.Server, err
	}
	if name, err := ask("tcp"); err == nil {
		t.Errorf("without the program, %s answers", name)
	}
	n.decide(t)
	for _, network := range []string{"tcp", "udp"} {
		for range 3 {
			if name, err := ask(network); name != n.world.LocalPods[0].Name {
				t.Errorf("%s: answer %q, %v, want %s", network, name, err, n.world.LocalPods[0].Name)
			}
		}
	}
}

// BenchmarkDecide measures a datagram from a frame at the client's device of the node until the pod's host
// drops it, of a flow that begins and of one that is open: by the engine's rules; by the program, with
// rules that know no Service; routed without a Service, without and with the program; and dropped at once,
// which is the price of the frame. The rounds take turns, and the price of the frame is subtracted.
func BenchmarkDecide(b *testing.B) {
	rounds, fresh := 1, uint32(5_000)
	if os.Getenv("SERVICEPLANE_BENCH_FULL") == "1" {
		rounds, fresh = 30, 40_000
	}
	names := []string{"rules", "decide", "routed", "routed-with-program", "frame"}
	var nodes []*node
	for _, name := range names {
		n := newNode(b)
		if name == "rules" {
			n.byRules(b)
		} else {
			n.byConstant(b)
		}
		to := vip
		if strings.HasPrefix(name, "routed") {
			to = n.pod
		}
		n.frames(b, to)
		switch name {
		case "decide", "routed-with-program":
			n.decide(b)
		case "frame":
			n.client.DropAtOnce(b)
		}
		n.nft(b, n.world.LocalPods[0], "add table inet sink; add chain inet sink in { type filter hook prerouting priority -300; policy drop; counter; }")
		nodes = append(nodes, n)
	}
	begins, opens := make([][]float64, len(nodes)), make([][]float64, len(nodes))
	for range rounds {
		for i, n := range nodes {
			begins[i] = append(begins[i], n.client.Send(b, fresh))
			n.forget(b, names[i], fresh)
			opens[i] = append(opens[i], n.open.Send(b, 4*fresh))
		}
	}
	for i, name := range names {
		b.ReportMetric(middle(begins[i])-middle(begins[len(names)-1]), name+"-begins-ns/packet")
		b.ReportMetric(middle(opens[i])-middle(opens[len(names)-1]), name+"-open-ns/packet")
	}
	b.ReportMetric(0, "ns/op")
}

// middle is the mean of the middle half.
func middle(all []float64) float64 {
	slices.SortFunc(all, cmp.Compare[float64])
	all = all[len(all)/4 : len(all)-len(all)/4]
	sum := 0.0
	for _, x := range all {
		sum += x
	}
	return sum / float64(len(all))
}

// forget wants an entry of each flow that has begun, but for some of the same addresses and ports, and
// deletes them.
func (n *node) forget(b *testing.B, name string, flows uint32) {
	b.Helper()
	netnstest.Check(b, n.world.Node.Do(func() error {
		found, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		if err != nil {
			return err
		}
		translated := 0
		for _, f := range found {
			if to, _ := netip.AddrFromSlice(f.Reverse.SrcIP); to.Unmap() == n.pod.Addr() {
				translated++
			}
		}
		if (name == "frame") != (translated < int(flows)*99/100) {
			b.Errorf("%s: %d of %d flows lead to the pod", name, translated, flows)
		}
		return netlink.ConntrackTableFlush(netlink.ConntrackTable)
	}))
	poll.Until(b, "the entries are gone", func() bool {
		left := -1
		netnstest.Check(b, n.world.Node.Do(func() error {
			found, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
			left = len(found)
			return err
		}))
		return left == 0
	})
}
