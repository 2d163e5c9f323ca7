package nftables_test

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

const accounting = "/proc/sys/net/netfilter/nf_conntrack_acct"

// account makes the kernel count in a host's namespace, or not.
func account(tb testing.TB, host *proxiertest.Host, on bool) {
	tb.Helper()
	value := map[bool]string{false: "0", true: "1"}[on]
	netnstest.Check(tb, host.Do(func() error { return os.WriteFile(accounting, []byte(value), 0) }))
}

// TestInstancesCountTheirOwnTraffic: two Providers in one namespace hear of the same connections.
func TestInstancesCountTheirOwnTraffic(t *testing.T) {
	t.Parallel()
	world := proxiertest.NewTopology(t)
	account(t, world.Node, true)
	names, err := proxier.NamesFor("edge")
	netnstest.Check(t, err)
	first := nftables.Config{Config: world.Config()}
	first.CountTraffic = true
	second := nftables.Config{Config: first.Config, DNATPriority: -90, SNATPriority: 110}
	second.Names, second.Masquerade = names, proxier.Masquerade{Mark: 1 << 20, All: true}
	pod, remote := world.LocalPods[0], world.RemotePods[0]
	a, b := startInstance(t, first, "10.96.0.10", remote), startInstance(t, second, "10.97.0.10", remote)
	packets := func(i *instance) (n uint64) {
		counts, err := i.Counts(t.Context(), v1.IPv4Protocol)
		if err != nil || !counts.Traffic || len(counts.ServicePorts) > 1 {
			t.Errorf("counts %+v, error %v", counts, err)
		}
		for _, p := range counts.ServicePorts {
			n += p.Traffic.PacketsIn
		}
		return n
	}
	const atLeast = 5 // handshake, question and end
	a.mustAnswer(t, pod, remote, pod.Addr(v1.IPv4Protocol))
	poll.Until(t, "the first one counts", func() bool { return packets(a) >= atLeast })
	if n := packets(b); n != 0 {
		t.Errorf("the second one counts %d packets of the first one", n)
	}
	before := packets(a)
	for range 10 {
		b.mustAnswer(t, pod, remote, world.Node.Addr(v1.IPv4Protocol))
	}
	poll.Until(t, "the second one counts", func() bool { return packets(b) >= 10*atLeast })
	if n := packets(a); n >= before+10 {
		t.Errorf("the first one counts %d packets, and %d before those of the second one", n, before)
	}
}

// BenchmarkTraffic measures what the kernel's accounting costs: the CPU time of a datagram of an open
// flow through a Service, from the client to the endpoint, without and with it in turn.
func BenchmarkTraffic(b *testing.B) {
	const datagrams, runs = 20_000, 15
	world := proxiertest.NewTopology(b)
	config := nftables.Config{Config: world.Config()}
	config.CountTraffic = true
	p, err := nftables.New(config, proxier.Deps{})
	netnstest.Check(b, err)
	p.OnServiceAdd(proxiertest.Service("default", "dns", proxiertest.ClusterIPs("10.96.0.10"), proxiertest.Port("dns", v1.ProtocolUDP, 53)))
	p.OnEndpointSliceAdd(proxiertest.Slice("default", "dns", discovery.AddressTypeIPv4,
		proxiertest.SlicePort("dns", v1.ProtocolUDP, 9), proxiertest.Endpoint(world.LocalPods[1].Addr(v1.IPv4Protocol).String())))
	proxiertest.Run(b, p)
	netnstest.Check(b, proxiertest.Sync(b.Context(), p))
	netnstest.Check(b, world.LocalPods[1].Do(func() error { // which reads nothing
		conn, err := net.ListenUDP("udp4", &net.UDPAddr{Port: 9})
		if err == nil {
			b.Cleanup(func() { _ = conn.Close() })
		}
		return err
	}))
	var flows [2]*net.UDPConn
	for on := range flows {
		account(b, world.Node, on == 1)
		netnstest.Check(b, world.LocalPods[0].Do(func() (err error) {
			flows[on], err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.MustParseAddrPort("10.96.0.10:53")))
			return errors.Join(err, send(flows[on], 1)) // the flow begins
		}))
		b.Cleanup(func() { _ = flows[on].Close() })
	}
	compareSending(b, datagrams, runs, flows, "off-cpu-ns/packet")
	counts, err := p.Counts(b.Context(), v1.IPv4Protocol)
	if want := uint64(b.N*runs*datagrams + 1); err != nil || len(counts.ServicePorts) != 1 || counts.ServicePorts[0].Traffic.PacketsIn != want {
		b.Errorf("counts %+v, error %v, want %d packets", counts, err, want)
	}
}

// compareSending sends datagrams through both flows in turn, and reports the time of the processor for one: name is
// that of the first flow.
func compareSending(b *testing.B, datagrams, runs int, flows [2]*net.UDPConn, name string) {
	b.Helper()
	var cpus [2][]time.Duration
	for range b.N * runs {
		for i, flow := range flows {
			before := cpuTime()
			netnstest.Check(b, send(flow, datagrams))
			cpus[i] = append(cpus[i], (cpuTime()-before)/time.Duration(datagrams))
		}
	}
	median := func(all []time.Duration) float64 {
		slices.SortFunc(all, cmp.Compare[time.Duration])
		return float64(all[len(all)/2])
	}
	b.ReportMetric(median(cpus[0]), name)
	b.ReportMetric(median(cpus[1]), "cpu-ns/packet")
	b.ReportMetric(median(cpus[1])/median(cpus[0]), "ratio")
	b.ReportMetric(0, "ns/op")
}

// send sends datagrams without waiting for anything.
func send(conn *net.UDPConn, n int) error {
	for range n {
		if _, err := conn.Write([]byte("x")); err != nil {
			return fmt.Errorf("send: %w", err)
		}
	}
	return nil
}

func cpuTime() time.Duration {
	var used unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &used) // fails only if its arguments are wrong
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
