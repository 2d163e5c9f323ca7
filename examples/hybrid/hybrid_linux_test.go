package main

import (
	"context"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stage is a proxy at work in a network of namespaces.
type stage struct {
	t     *testing.T
	world *proxiertest.Topology
	proxy *proxier.Proxier
	vip   netip.AddrPort
}

func newStage(t *testing.T, activate func(context.Context, changetracker.ServicePortName)) *stage {
	t.Helper()
	s := &stage{t: t, world: proxiertest.NewTopology(t), vip: netip.MustParseAddrPort("10.96.0.10:80")}
	config := s.world.Config()
	config.Runner = runner.Options{MinInterval: runner.Unlimited}
	var err error
	if s.proxy, err = newProxy(config, activate, zap.NewNop()); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		if err := s.proxy.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(func() {
		stop()
		running.Wait()
	})
	s.proxy.OnServiceCIDRsChanged([]netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")})
	return s
}

// web is a Service that one of the engines serves.
func web(name, vip, engine string) *v1.Service {
	s := proxiertest.Service("shop", name, proxiertest.ClusterIPs(vip), proxiertest.Port("http", v1.ProtocolTCP, 80))
	s.Annotations = map[string]string{engineAnnotation: engine}
	return s
}

func (s *stage) slice(service string, pods ...*proxiertest.Host) *discovery.EndpointSlice {
	options := []proxiertest.SliceOption{proxiertest.SlicePort("http", v1.ProtocolTCP, 8080)}
	for _, pod := range pods {
		options = append(options, proxiertest.Endpoint(pod.Addr(v1.IPv4Protocol).String(), proxiertest.OnNode("node")))
	}
	return proxiertest.Slice("shop", service, discovery.AddressTypeIPv4, options...)
}

func (s *stage) sync() {
	s.t.Helper()
	if err := s.proxy.Sync(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
}

func (s *stage) ask(to netip.AddrPort) (netns.Answer, error) {
	return s.world.Client.Ask(s.t.Context(), "tcp", to, proxiertest.AskOptions{Timeout: 5 * time.Second})
}

// TestASwitchOfEngineIsNotNoticed: connections are opened all the time while a
// Service moves there and back, and one stays open. Its neighbour in the kernel's
// engine is reached throughout, and an address that nobody has is not.
func TestASwitchOfEngineIsNotNoticed(t *testing.T) {
	s := newStage(t, nil)
	pod := s.world.LocalPods[0]
	s.proxy.OnServiceAdd(web("web", "10.96.0.10", kernel))
	s.proxy.OnEndpointSliceAdd(s.slice("web", pod))
	s.proxy.OnServiceAdd(web("neighbour", "10.96.0.11", ""))
	s.proxy.OnEndpointSliceAdd(s.slice("neighbour", s.world.LocalPods[1]))
	s.proxy.OnServiceSynced()
	s.proxy.OnEndpointSlicesSynced()
	s.sync()

	ctx, stop := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	asked := make(chan struct{})
	asking.Go(func() {
		for i := 0; ; i++ {
			if _, err := s.ask(s.vip); err != nil {
				t.Errorf("connection %d: %v", i, err)
			}
			select {
			case asked <- struct{}{}:
			case <-ctx.Done():
				return
			default: // nobody waits
			}
		}
	})
	engine := kernel
	for range 10 {
		other := map[string]string{kernel: sockets, sockets: kernel}[engine]
		s.proxy.OnServiceUpdate(web("web", "10.96.0.10", engine), web("web", "10.96.0.10", other))
		s.sync()
		for range 3 { // connections, some of them begun before the switch
			<-asked
		}
		engine = other
		answer, err := s.ask(s.vip)
		if err != nil {
			t.Fatal(err)
		}
		fromNode := answer.Source.Addr() != s.world.Client.Addr(v1.IPv4Protocol)
		if masqueraded := engine == kernel; !fromNode {
			t.Errorf("engine %s: the pod sees %v (masqueraded: %v), want an address of the node", engine, answer.Source, masqueraded)
		}
		if got, err := s.ask(netip.MustParseAddrPort("10.96.0.11:80")); err != nil || got.Server != s.world.LocalPods[1].Name {
			t.Errorf("engine %s: the neighbour: %v, %v", engine, got.Server, err)
		}
	}
	stop()
	asking.Wait()
	if _, err := s.world.Client.Ask(t.Context(), "tcp", netip.MustParseAddrPort("10.96.0.99:80"), proxiertest.AskOptions{Timeout: 300 * time.Millisecond}); err == nil {
		t.Error("an address of the Service range that nobody has answers")
	}
}

// TestAServiceIsWokenUp: the client connects, waits, and is answered by the endpoint
// that comes two seconds later.
func TestAServiceIsWokenUp(t *testing.T) {
	woken := make(chan changetracker.ServicePortName, 1)
	s := newStage(t, func(_ context.Context, name changetracker.ServicePortName) {
		select {
		case woken <- name:
		default:
		}
	})
	s.proxy.OnServiceAdd(web("web", "10.96.0.10", sockets))
	s.proxy.OnServiceSynced()
	s.proxy.OnEndpointSlicesSynced()
	s.sync()
	var starting sync.WaitGroup
	starting.Go(func() {
		if name := <-woken; name.Name != "web" {
			t.Errorf("woken is %v, want web", name)
		}
		<-time.After(2 * time.Second)
		s.proxy.OnEndpointSliceAdd(s.slice("web", s.world.LocalPods[0]))
	})
	began := time.Now()
	answer, err := s.ask(s.vip)
	if err != nil || answer.Server != s.world.LocalPods[0].Name {
		t.Errorf("answer of %q, %v, want the pod's", answer.Server, err)
	}
	if took := time.Since(began); took < 2*time.Second {
		t.Errorf("answered after %v, before there was anybody", took)
	}
	starting.Wait()
}
