package ebpf_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// sockets returns settings with a BPF file system of the test, and the cgroup of this process. All hosts
// of a test are network namespaces of one process, so those of the node are listed.
func sockets(tb testing.TB) ebpf.Sockets {
	tb.Helper()
	return ebpf.Sockets{BPFFS: bpftest.FileSystem(tb), Cgroups: []string{bpftest.OwnCgroup(tb)}, Namespaces: &ebpf.Namespaces{Only: true}}
}

func join(tb testing.TB, s ebpf.Sockets, netNSs ...string) {
	tb.Helper()
	for _, netNS := range netNSs {
		netnstest.Check(tb, s.Namespaces.Add(netNS))
	}
}

// factory returns Providers with these sockets, for a node. A Provider of another node of the test has
// its own file system and list.
func factory(tb testing.TB, s ebpf.Sockets, node *string) proxiertest.Factory {
	tb.Helper()
	return func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
		own := s
		if config.NetNS != *node {
			own = sockets(tb)
			join(tb, own, config.NetNS)
		}
		return ebpf.New(ebpf.Config{Config: nftables.Config{Config: config}, Sockets: own}, deps)
	}
}

// TestPackets sends real packets for the table of scenarios, in both modes, and with UDP too.
func TestPackets(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]func(*ebpf.Sockets){
		"strict": func(*ebpf.Sockets) {},
		"fast":   func(s *ebpf.Sockets) { s.Mode = ebpf.Fast },
		"UDP":    func(s *ebpf.Sockets) { s.UDP = ebpf.UDPTranslate },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := sockets(t)
			set(&s)
			var node string
			proxiertest.Conformance(t, proxiertest.Features{
				FirstPriorityLost: true, BySocket: true, UDPBySocket: s.UDP == ebpf.UDPTranslate, PodsKeepSource: s.Mode == ebpf.Fast,
				Prepare: func(netNS string, pods []string) {
					node = netNS
					join(t, s, append(pods, node)...)
				},
			}, factory(t, s, &node))
		})
	}
}
