package chaos

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/bpfx"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// flush is a command of another program that deletes what connections need, unless the process
// keeps it.
type flush struct {
	name, command string
	kept          bool
}

// engine is a mode of nodeproxy.
type engine struct {
	name    string
	variant string // of iptables, that the node has
	flags   []string
	flushes []flush // what another program may do to the rules
	// lingers means that connections are those of the process: after SIGTERM it goes on with
	// them, while the next one starts.
	lingers bool
	// tellsRepairs means that no repair goes unnoticed, and so all flows are checked after it.
	// The engine ipvs also repairs while it applies a full update, and does not say so.
	tellsRepairs bool
	// lossy means that a datagram of the node fails with EPERM when its endpoint went just now, and
	// the next one does not (TestADatagramAfterItsServerWentIsLost of ipvs). Rules of the other
	// engines drop no datagram of the clients: for them, EPERM is a failure.
	lossy bool
	// sockets means that those of pods are translated when they connect.
	sockets bool
	// bit is the flag of the mark's bit.
	bit string
}

func engines() []engine {
	ruleset := flush{name: "`nft flush ruleset`", command: "nft flush ruleset"}
	tables := flush{name: "`nft delete table` of ours", command: "nft delete table ip kube-proxy; nft delete table ip6 kube-proxy"}
	nat := flush{name: "`iptables -t nat -F`", command: "iptables -t nat -F; ip6tables -t nat -F"}
	all := flush{name: "`iptables -F`, `-X` in all tables", command: "for i in iptables ip6tables; do for t in nat filter mangle; do $i -t $t -F; $i -t $t -X; done; done"}
	servers := flush{name: "`ipvsadm -C`", command: "ipvsadm -C"}
	device := flush{name: "`ip link delete kube-ipvs0`", command: "ip link delete kube-ipvs0"}
	pins := flush{name: "`rm -r` of our BPF pins", command: "rm -rf $BPFFS/serviceplane", kept: true}
	return []engine{
		{
			name: "nftables", variant: "nft", flags: []string{"--proxy-mode=nftables", "--nftables-min-sync-period=0s"},
			flushes: []flush{ruleset, tables}, tellsRepairs: true, bit: "--nftables-masquerade-bit=20",
		},
		{
			name: "iptables-nft", variant: "nft", flags: []string{"--proxy-mode=iptables", "--iptables-min-sync-period=0s"},
			flushes: []flush{ruleset, nat, all}, tellsRepairs: true, bit: "--iptables-masquerade-bit=20",
		},
		{
			name: "iptables-legacy", variant: "legacy", flags: []string{"--proxy-mode=iptables", "--iptables-min-sync-period=0s"},
			flushes: []flush{nat, all}, tellsRepairs: true, bit: "--iptables-masquerade-bit=20",
		},
		{
			name: "userspace", variant: "nft", lingers: true,
			flags:   []string{"--proxy-mode=userspace", "--nftables-min-sync-period=0s", "--userspace-linger=10m", "--udp-timeout=2s"},
			flushes: []flush{ruleset, tables}, tellsRepairs: true, bit: "--nftables-masquerade-bit=20",
		},
		{
			name: "ebpf", variant: "nft", flags: []string{"--proxy-mode=ebpf", "--nftables-min-sync-period=0s"},
			flushes: []flush{ruleset, tables, pins}, tellsRepairs: true, sockets: true, bit: "--nftables-masquerade-bit=20",
		},
		{
			name: "ipvs", variant: "nft", flags: []string{"--proxy-mode=ipvs", "--ipvs-min-sync-period=0s"},
			flushes: []flush{ruleset, servers, device}, lossy: true, bit: "--iptables-masquerade-bit=20",
		},
	}
}

// missing says why the engine does not work here.
func (e engine) missing() string {
	if e.name != "ipvs" {
		return ""
	}
	if notInVM() == "" || exists("/proc/net/ip_vs") {
		return ""
	}
	return "this kernel has no IPVS: run it in a virtual machine"
}

// steady reports whether connections do not need the process.
func (e engine) steady() bool { return !e.lingers }

// layOut makes what the engine's sockets need: a BPF file system, and a folder of the network namespaces
// where sockets are translated, as all hosts of the test are in one process.
func (g *game) layOut(pods []*proxiertest.Host) {
	g.t.Helper()
	if !g.engine.sockets {
		return
	}
	g.bpffs = bpftest.FileSystem(g.t)
	namespaces := g.t.TempDir()
	for _, pod := range pods {
		netnstest.Check(g.t, os.Symlink(pod.NetNS(), filepath.Join(namespaces, pod.Name)))
	}
	g.flags = []string{"--ebpf-bpffs=" + g.bpffs, "--ebpf-cgroups=" + bpftest.OwnCgroup(g.t), "--ebpf-only-namespaces=" + namespaces}
}

// mustHaveTranslated wants sockets to have carried connections of both IP families, as soon as the
// counts are pinned again, if somebody has removed them.
func mustHaveTranslated(t *testing.T, bpffs string) {
	t.Helper()
	var sums []uint64
	poll.Nil(t, "sockets are translated", func() error {
		paths, err := filepath.Glob(filepath.Join(bpffs, "serviceplane/*/ip?/v*/counts"))
		if err != nil || len(paths) != len(families()) {
			return fmt.Errorf("counts are pinned at %v, error %w; want both IP families", paths, err)
		}
		sums = nil
		for _, path := range paths {
			sum, err := sumOf(path)
			if err != nil || sum == 0 {
				return fmt.Errorf("%s: %d, error %w", path, sum, err)
			}
			sums = append(sums, sum)
		}
		return nil
	})
	t.Logf("sockets translated since the counts were pinned: %v", sums)
}

// sumOf adds the first count of all processors.
func sumOf(path string) (sum uint64, err error) {
	counts, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return 0, err
	}
	defer func() { _ = bpfx.Close(counts) }()
	var perCPU []uint64
	err = counts.Lookup(uint32(0), &perCPU)
	for _, n := range perCPU {
		sum += n
	}
	return sum, err
}
