package ebpf

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/bpfx"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// The configuration has one fast path at a time, and a peer only with the one by BPF.
func TestForwardConfig(t *testing.T) {
	t.Parallel()
	config := Config{Sockets: Sockets{Cgroups: []string{"/a"}}, FastPathByBPF: true, FastPathPeer: func(string) bool { return true }}
	if err := config.Validate(); err != nil {
		t.Error(err)
	}
	config.FastPathAfter = 20
	if err := config.Validate(); !errors.Is(err, proxier.ErrInvalidConfig) || !strings.Contains(err.Error(), "FastPathAfter") {
		t.Errorf("%v, want an error about FastPathAfter", err)
	}
	config.FastPathAfter, config.FastPathByBPF = 0, false
	if err := config.Validate(); !errors.Is(err, proxier.ErrInvalidConfig) || !strings.Contains(err.Error(), "FastPathPeer") {
		t.Errorf("%v, want an error about FastPathPeer", err)
	}
}

// Flows need the VIPs and each endpoint of a node port, with all ports, also the ports of answers.
func TestWhatFlowsNeed(t *testing.T) {
	t.Parallel()
	at := netip.MustParseAddrPort
	s := &desired.Service{
		Protocol: desired.UDP,
		Cluster:  desired.EndpointsOf(at("10.244.0.1:8080"), at("10.244.0.2:9090")), Local: desired.EndpointsOf(at("10.244.0.1:8080")),
		Frontends: []desired.Frontend{{Kind: desired.ClusterIP, VIP: netip.MustParseAddr("10.96.0.1"), Port: 80}, {Kind: desired.NodePort, Port: 30080}},
	}
	need := needOf(s)
	slices.Sort(need.ports)
	if want := []uint16{80, 8080, 9090, 30080}; !slices.Equal(need.ports, want) {
		t.Errorf("ports %v, want %v", need.ports, want)
	}
	want := []flowKey{
		{at("10.96.0.1:80"), 0, desired.UDP},
		{at("10.244.0.1:8080"), 30080, desired.UDP},
		{at("10.244.0.2:9090"), 30080, desired.UDP},
		{at("10.244.0.1:8080"), 30080, desired.UDP},
	}
	if !slices.Equal(need.keys, want) {
		t.Errorf("keys %v, want %v", need.keys, want)
	}
}

// TestFlowIndexHasNoHistory: after any sets, the index is what a new one would be.
func TestFlowIndexHasNoHistory(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // a test
	x := newFlowIndex()
	last := map[changetracker.ServicePortName]flowNeed{}
	for range 2000 {
		var name changetracker.ServicePortName
		name.Port = strconv.Itoa(r.IntN(6))
		var need flowNeed
		for range r.IntN(4) {
			port := uint16(r.IntN(8))
			need.keys = append(need.keys, flowKey{to: netip.AddrPortFrom(netip.MustParseAddr("10.96.0.1"), port), nodePort: uint16(r.IntN(2)), protocol: desired.TCP})
			need.ports = append(need.ports, port)
		}
		x.set(name, need)
		last[name] = need
		fresh := newFlowIndex()
		for name, need := range last {
			fresh.set(name, need)
		}
		if diff := cmp.Diff(fresh, x, cmp.AllowUnexported(flowIndex{}, flowNeed{}, flowKey{}), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
			t.Fatal(diff)
		}
	}
}

// Flow keys are read as they were written.
func TestFlowKeysAreRead(t *testing.T) {
	t.Parallel()
	for _, k := range []flowKey{
		{netip.MustParseAddrPort("192.0.2.1:258"), 0, desired.TCP}, {netip.MustParseAddrPort("[2001:db8::1]:258"), 30080, desired.UDP},
	} {
		if got := parseFlowKey(k.bytes()); got != k {
			t.Errorf("%v, want %v", got, k)
		}
	}
}

// TestAFailedFlowIsWrittenLater: what a map refuses, to add or to remove, does not keep others back, and
// is written again without another event.
func TestAFailedFlowIsWrittenLater(t *testing.T) {
	t.Parallel()
	netnstest.New(t) // or the test is skipped
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		for _, refuses := range []string{mapFlows, mapPorts} {
			f := newForwarder(Config{}, family, zap.NewNop())
			objects, err := loadObject("forward", addrLenOf(f.family))
			netnstest.Check(t, err)
			f.index, f.held, f.maps, f.program = newFlowIndex(), map[flowKey]bool{}, map[string]*ebpf.Map{}, new(ebpf.Program)
			for _, name := range []string{mapFlows, mapPorts} {
				f.maps[name], err = ebpf.NewMap(objects.Maps[name])
				netnstest.Check(t, err)
			}
			works := f.maps[refuses]
			broken, err := works.Clone()
			netnstest.Check(t, errors.Join(err, bpfx.Close(broken)))
			to := netip.MustParseAddrPort("10.96.0.1:80")
			if family == v1.IPv6Protocol {
				to = netip.MustParseAddrPort("[fd00::1]:80")
			}
			for _, need := range []flowNeed{{keys: []flowKey{{to, 0, desired.UDP}}, ports: []uint16{80}}, {}} {
				f.maps[refuses] = broken
				if _, err := f.write(f.index.set(changetracker.ServicePortName{}, need), false); err == nil {
					t.Errorf("%s, %s: no error, want that of a closed map", family, refuses)
				}
				f.maps[refuses] = works
				f.retry()
				netnstest.Check(t, f.read())
				var words [portWords]uint64
				for _, port := range need.ports {
					words[port/64] |= 1 << (port % 64)
				}
				if len(f.held) != len(need.keys) || f.words != words || len(f.missed) > 0 {
					t.Errorf("%s, %s: the kernel has %v, and the ports of %v, want %v; missed %v", family, refuses, f.held, f.words, need, f.missed)
				}
			}
			netnstest.Check(t, f.maps.close())
		}
	}
}
