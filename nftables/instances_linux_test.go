package nftables_test

import (
	"context"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// instance is one of several Providers in this process.
type instance struct {
	*proxier.Proxier
	vip  netip.AddrPort
	stop func()
}

// startInstance runs a Provider with one Service of one endpoint.
func startInstance(t *testing.T, config nftables.Config, vip string, endpoint *proxiertest.Host) *instance {
	t.Helper()
	p, err := nftables.New(config, proxier.Deps{})
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	p.OnServiceAdd(proxiertest.Service("default", "web", proxiertest.ClusterIPs(vip), proxiertest.Port("http", v1.ProtocolTCP, 80)))
	addr := netip.MustParseAddr(vip)
	p.OnEndpointSliceAdd(proxiertest.Slice("default", "web", addressType(addr),
		proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
		proxiertest.Endpoint(endpoint.Addr(v1.IPFamily(addressType(addr))).String())))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	i := &instance{Proxier: p, vip: netip.AddrPortFrom(addr, 80)}
	i.stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		done <- nil
	}
	t.Cleanup(i.stop)
	if err := proxiertest.Sync(t.Context(), p); err != nil {
		t.Fatalf("sync: %v", err)
	}
	return i
}

// addressType is the type of slices for a Service with this address.
func addressType(vip netip.Addr) discovery.AddressType {
	if vip.Is6() {
		return discovery.AddressTypeIPv6
	}
	return discovery.AddressTypeIPv4
}

// mustAnswer connects to the instance's Service.
func (i *instance) mustAnswer(t *testing.T, from, endpoint *proxiertest.Host, source netip.Addr) {
	t.Helper()
	a, err := from.Ask(t.Context(), "tcp", i.vip, proxiertest.AskOptions{})
	if err != nil || a.Server != endpoint.Name || a.Source.Addr() != source {
		t.Errorf("%s asks %s: %+v, %v; want %s to see %v", from.Name, i.vip, a, err, endpoint.Name, source)
	}
}

// TestInstancesShareANodeAndAProcess runs two Providers with different names, marks and
// priorities in one namespace, and a third one in another namespace. Each has its own
// Service. One of them stops, and the others are not affected.
func TestInstancesShareANodeAndAProcess(t *testing.T) {
	t.Parallel()
	net := proxiertest.NewTopology(t)
	pod, remote := net.LocalPods[0], net.RemotePods[0]
	names, err := proxier.NamesFor("edge")
	if err != nil {
		t.Fatal(err)
	}
	first := nftables.Config{Config: net.Config()}
	first.Names = proxier.KubeProxyNames()
	second := nftables.Config{Config: net.Config(), DNATPriority: -90, SNATPriority: 110}
	second.Names, second.Masquerade = names, proxier.Masquerade{Mark: 1 << 20, All: true}
	third := nftables.Config{Config: proxier.Config{NetNS: net.Client.NetNS()}}

	a := startInstance(t, first, "10.96.0.10", remote)
	b := startInstance(t, second, "10.97.0.10", remote)
	c := startInstance(t, third, "10.98.0.10", remote)
	podAddr, nodeAddr := pod.Addr(v1.IPv4Protocol), net.Node.Addr(v1.IPv4Protocol)
	a.mustAnswer(t, pod, remote, podAddr)
	a.mustAnswer(t, net.Client, remote, nodeAddr)
	b.mustAnswer(t, pod, remote, nodeAddr) // this one masquerades everything
	c.mustAnswer(t, net.Client, remote, net.Client.Addr(v1.IPv4Protocol))
	if _, err := pod.Ask(t.Context(), "tcp", c.vip, proxiertest.AskOptions{Timeout: time.Second}); err == nil {
		t.Error("the Service of the client's namespace answers on the node")
	}

	b.stop()
	if err := b.Cleanup(t.Context()); err != nil {
		t.Fatalf("clean up: %v", err)
	}
	if _, err := pod.Ask(t.Context(), "tcp", b.vip, proxiertest.AskOptions{Timeout: time.Second}); err == nil {
		t.Error("a Service answers after its instance is cleaned up")
	}
	a.mustAnswer(t, pod, remote, podAddr)
	a.mustAnswer(t, net.Client, remote, nodeAddr)
	c.mustAnswer(t, net.Client, remote, net.Client.Addr(v1.IPv4Protocol))
	for _, i := range []*instance{a, c} {
		status := i.Status()
		for family, s := range status.Families {
			if s.Damaged != 0 || s.LastError != nil {
				t.Errorf("%s: damaged %d times, last error %v; want the instance to be left alone", family, s.Damaged, s.LastError)
			}
		}
		if len(status.Conditions) != 0 {
			t.Errorf("conditions %+v, want none", status.Conditions)
		}
	}
}
