package ebpf_test

import (
	"context"
	"encoding/binary"
	"net/netip"
	"testing"

	bpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/bpfx"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// instance is one of several Providers on one node, with the same cgroup and BPF file system.
type instance struct {
	*proxier.Proxier
	vip    netip.AddrPort
	engine *ebpf.Engine
	end    func()
}

func newInstance(t *testing.T, n *node, names proxier.Names, mark uint32, vip string, endpoint *proxiertest.Host) *instance {
	t.Helper()
	config := n.world.Config()
	config.Families, config.Names, config.Masquerade.Mark = []v1.IPFamily{v1.IPv4Protocol}, names, mark
	config.Runner = runner.Options{MinInterval: runner.Unlimited}
	engine, err := ebpf.NewEngine(ebpf.Config{Config: nftables.Config{Config: config}, Sockets: n.sockets}, v1.IPv4Protocol, proxier.Deps{})
	netnstest.Check(t, err)
	p, err := proxier.New(config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	netnstest.Check(t, err)
	p.OnServiceAdd(proxiertest.Service("default", "web", proxiertest.ClusterIPs(vip), proxiertest.Port("http", v1.ProtocolTCP, 80)))
	p.OnEndpointSliceAdd(proxiertest.Slice("default", "web", discovery.AddressTypeIPv4,
		proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint(endpoint.Addr(v1.IPv4Protocol).String())))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	i := &instance{Proxier: p, vip: netip.AddrPortFrom(netip.MustParseAddr(vip), 80), engine: engine}
	i.end = func() {
		cancel()
		netnstest.Check(t, <-done)
		done <- nil
	}
	t.Cleanup(i.end)
	netnstest.Check(t, proxiertest.Sync(t.Context(), p))
	return i
}

// mustTranslate checks that a pod reaches the endpoint, and that a socket of this instance did it.
func (i *instance) mustTranslate(t *testing.T, from, endpoint *proxiertest.Host) {
	t.Helper()
	before, err := i.engine.SocketCounts()
	netnstest.Check(t, err)
	answer, err := from.Ask(t.Context(), "tcp", i.vip, proxiertest.AskOptions{})
	if err != nil || answer.Server != endpoint.Name {
		t.Errorf("%v: answer %+v, error %v; want %s", i.vip, answer, err, endpoint.Name)
	}
	if after, err := i.engine.SocketCounts(); err != nil || after.Translated != before.Translated+1 {
		t.Errorf("%v: counts %+v, error %v, %+v before; want one more translated", i.vip, after, err, before)
	}
}

func otherNames() proxier.Names {
	names := proxier.DefaultNames()
	names.Instance, names.Table, names.ChainPrefix, names.Device = "other", "other", "OTHER", "other"
	return names
}

// Two instances on one cgroup each translate their own Services, and one may go without the other.
func TestTwoInstances(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods, pod := n.world.RemotePods, n.world.LocalPods[0]
	first := newInstance(t, n, proxier.DefaultNames(), 0x4000, "10.96.0.21", pods[0])
	second := newInstance(t, n, otherNames(), 0x8000, "10.96.0.22", pods[1])
	first.mustTranslate(t, pod, pods[0])
	second.mustTranslate(t, pod, pods[1])
	first.end()
	second.mustTranslate(t, pod, pods[1])
	netnstest.Check(t, first.Cleanup(t.Context()))
	second.mustTranslate(t, pod, pods[1])
	results, err := second.Verify(t.Context())
	if v := results[v1.IPv4Protocol]; err != nil || !v.Agrees() {
		t.Errorf("after the other instance has gone: %+v, error %v", v, err)
	}
	first = newInstance(t, n, proxier.DefaultNames(), 0x4000, "10.96.0.21", pods[2])
	first.mustTranslate(t, pod, pods[2])
	second.mustTranslate(t, pod, pods[1])
}

// Programs of others on the cgroup, attached before and after ours, see each connect(2) and stay when ours are
// replaced, damaged, and removed. They are no damage and no difference.
func TestProgramsOfOthers(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods, pod := n.world.RemotePods, n.world.LocalPods[0]
	early := newCounter(t, n.sockets.Cgroups[0])
	first := newInstance(t, n, proxier.DefaultNames(), 0x4000, "10.96.0.31", pods[0])
	late := newCounter(t, n.sockets.Cgroups[0])
	mustSee := func(when string) {
		t.Helper()
		for name, c := range map[string]*counter{"before ours": early, "after ours": late} {
			if got := c.calls(t, first.vip, pods[0].Addr(v1.IPv4Protocol)); got == 0 {
				t.Errorf("%s: the program attached %s saw no connect", when, name)
			}
		}
	}
	first.mustTranslate(t, pod, pods[0])
	mustSee("at first")
	results, err := first.Verify(t.Context())
	if v := results[v1.IPv4Protocol]; err != nil || !v.Agrees() || len(first.Status().Families[v1.IPv4Protocol].LastDamage.Object) > 0 {
		t.Errorf("beside programs of others: %+v, error %v", v, err)
	}
	first.end()
	n.sockets.RealPeer = true // the programs are replaced
	first = newInstance(t, n, proxier.DefaultNames(), 0x4000, "10.96.0.31", pods[0])
	first.mustTranslate(t, pod, pods[0])
	mustSee("after an upgrade")
	first.end()
	netnstest.Check(t, first.Cleanup(t.Context()))
	if _, err := pod.Ask(t.Context(), "tcp", netip.AddrPortFrom(pods[0].Addr(v1.IPv4Protocol), 8080), proxiertest.AskOptions{}); err != nil {
		t.Error(err)
	}
	mustSee("after Cleanup")
}

// counter is a program of others that remembers the last destinations of connects, also those of other tests.
type counter struct{ seen *bpf.Map }

func newCounter(t *testing.T, cgroup string) *counter {
	t.Helper()
	seen, err := bpf.NewMap(&bpf.MapSpec{Type: bpf.LRUHash, KeySize: 4, ValueSize: 8, MaxEntries: 65536})
	netnstest.Check(t, err)
	t.Cleanup(func() { _ = bpfx.Close(seen) })
	const userIP4 = 4 // in struct bpf_sock_addr of linux/bpf.h
	program, err := bpf.NewProgram(&bpf.ProgramSpec{
		Type: bpf.CGroupSockAddr, AttachType: bpf.AttachCGroupInet4Connect, License: "GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R2, asm.R1, userIP4, asm.Word),
			asm.StoreMem(asm.RFP, -4, asm.R2, asm.Word),
			asm.Mov.Imm(asm.R2, 1),
			asm.StoreMem(asm.RFP, -16, asm.R2, asm.DWord),
			asm.LoadMapPtr(asm.R1, seen.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
			asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, -16),
			asm.Mov.Imm(asm.R4, 0),
			asm.FnMapUpdateElem.Call(),
			asm.Mov.Imm(asm.R0, 1),
			asm.Return(),
		},
	})
	netnstest.Check(t, err)
	attached, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: bpf.AttachCGroupInet4Connect, Program: program})
	netnstest.Check(t, err)
	t.Cleanup(func() {
		_ = bpfx.Close(attached)
		_ = bpfx.Close(program)
	})
	return &counter{seen}
}

// calls returns how many of these addresses were seen since the last call: which of them depends on the order of
// the programs.
func (c *counter) calls(t *testing.T, vip netip.AddrPort, endpoint netip.Addr) (n int) {
	t.Helper()
	for _, addr := range []netip.Addr{vip.Addr(), endpoint} {
		raw := addr.As4()
		if key := binary.NativeEndian.Uint32(raw[:]); c.seen.Delete(key) == nil {
			n++
		}
	}
	return n
}
