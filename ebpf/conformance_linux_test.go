package ebpf_test

import (
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
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

// factory returns Providers of a config, for a node. A Provider of another node of the test has
// its own file system and list.
func factory(tb testing.TB, c ebpf.Config, node *string) proxiertest.Factory {
	tb.Helper()
	return func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
		own := c
		own.Config.Config = config
		if config.NetNS != *node {
			own.Sockets = sockets(tb)
			join(tb, own.Sockets, config.NetNS)
		}
		if c.FastPathByBPF {
			own.Tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) {
				if config.Tracker.DecorateService != nil {
					config.Tracker.DecorateService(p, s)
				}
				p.FastPath = true
			}
		}
		return ebpf.New(own, deps)
	}
}

// carried counts the sockets that the engines of a test have translated, and the packets that they have forwarded
// past the rules.
type carried struct {
	mu               sync.Mutex
	sockets, packets uint64
}

// closing adds the numbers of an engine when it closes.
type closing struct {
	*ebpf.Engine

	total *carried
}

func (c closing) Close() error {
	sockets, _ := c.SocketCounts() // none after an error
	packets, _, _ := c.ForwardCounts()
	c.total.mu.Lock()
	c.total.sockets, c.total.packets = c.total.sockets+sockets.Translated, c.total.packets+packets
	c.total.mu.Unlock()
	return c.Engine.Close()
}

// TestPackets sends real packets for the table of scenarios: in both modes, with UDP too, and with a fast path
// between all devices of the node, one of these by chance.
func TestPackets(t *testing.T) {
	t.Parallel()
	settings := map[string]func(*ebpf.Config){
		"fast": func(c *ebpf.Config) { c.Sockets.PodsKeepSource = true },
		"UDP":  func(c *ebpf.Config) { c.Sockets.UDP = true },
		"forward": func(c *ebpf.Config) {
			c.FastPathByBPF, c.FastPathPeer = true, func(name string) bool { return strings.HasPrefix(name, "pod") }
		},
	}
	if udpIsForbidden(t) || netnstest.KernelBefore(t, 6, 5) {
		delete(settings, "UDP")
	}
	settings["strict"] = func(*ebpf.Config) {}
	for _, name := range chance.Some(t, 1, slices.Sorted(maps.Keys(settings))...) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := sockets(t)
			c := ebpf.Config{Sockets: s}
			settings[name](&c)
			total := &carried{}
			t.Cleanup(func() {
				t.Logf("%d sockets translated, %d packets forwarded past the rules", total.sockets, total.packets)
				if total.sockets == 0 || (total.packets > 0) != c.FastPathByBPF {
					t.Error("want sockets, and packets with a fast path alone")
				}
			})
			var node string
			proxiertest.Conformance(t, proxiertest.Features{
				FirstPriorityLost: true, ClientLimits: true, BySocket: true, UDPBySocket: c.Sockets.UDP, PodsKeepSource: c.Sockets.PodsKeepSource,
				Prepare: func(netNS string, pods []string) {
					node = netNS
					join(t, s, append(pods, node)...)
					netnstest.Check(t, namespace.Visit(node, func() error { return os.WriteFile(liberalFile, []byte("1"), 0) })) // for TCP on the fast path
				},
			}, func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
				deps.Wrap = func(_ v1.IPFamily, e proxier.Engine) (proxier.Engine, error) {
					return closing{e.(*ebpf.Engine), total}, nil
				}
				return factory(t, c, &node)(config, deps)
			})
		})
	}
}
