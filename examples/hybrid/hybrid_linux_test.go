package main

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stage is a running proxy in a test network.
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

// web returns a Service with the annotation of an engine.
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
	if err := proxiertest.Sync(s.t.Context(), s.proxy); err != nil {
		s.t.Fatal(err)
	}
}

func (s *stage) ask(to netip.AddrPort) (proxiertest.Answer, error) {
	return s.world.Client.Ask(s.t.Context(), "tcp", to, proxiertest.AskOptions{Timeout: 5 * time.Second})
}

// TestAChangeOfEngineBreaksNoConnection: new connections work all the time while a Service
// moves between the engines. Another Service in the kernel's engine stays reachable, and an
// unused VIP unreachable.
func TestAChangeOfEngineBreaksNoConnection(t *testing.T) {
	s := newStage(t, nil)
	pod := s.world.LocalPods[0]
	s.proxy.OnServiceAdd(web("web", "10.96.0.10", kernel))
	s.proxy.OnEndpointSliceAdd(s.slice("web", pod))
	s.proxy.OnServiceAdd(web("other", "10.96.0.11", ""))
	s.proxy.OnEndpointSliceAdd(s.slice("other", s.world.LocalPods[1]))
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
			default: // the test is not waiting
			}
		}
	})
	engine := kernel
	for range 10 {
		other := map[string]string{kernel: sockets, sockets: kernel}[engine]
		s.proxy.OnServiceUpdate(web("web", "10.96.0.10", engine), web("web", "10.96.0.10", other))
		s.sync()
		for range 3 { // connections, some of them opened before the change
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
			t.Errorf("engine %s: the other Service: %v, %v", engine, got.Server, err)
		}
	}
	stop()
	asking.Wait()
	if _, err := s.world.Client.Ask(t.Context(), "tcp", netip.MustParseAddrPort("10.96.0.99:80"), proxiertest.AskOptions{Timeout: 300 * time.Millisecond}); err == nil {
		t.Error("an unused VIP answers")
	}
}

// A connection waits for an endpoint that is added after the proxy has called activate.
func TestAConnectionWaitsForAnEndpoint(t *testing.T) {
	activated := make(chan changetracker.ServicePortName, 1)
	s := newStage(t, func(_ context.Context, name changetracker.ServicePortName) {
		select {
		case activated <- name:
		default:
		}
	})
	s.proxy.OnServiceAdd(web("web", "10.96.0.10", sockets))
	s.proxy.OnServiceSynced()
	s.proxy.OnEndpointSlicesSynced()
	s.sync()
	answered := make(chan string, 1)
	go func() {
		answer, err := s.ask(s.vip)
		answered <- fmt.Sprint(answer.Server, err)
	}()
	if name := <-activated; name.Name != "web" {
		t.Errorf("activated is %v, want web", name)
	}
	select {
	case got := <-answered:
		t.Errorf("%q before there is an endpoint, want the client to wait", got)
	default:
	}
	s.proxy.OnEndpointSliceAdd(s.slice("web", s.world.LocalPods[0]))
	if got, want := <-answered, fmt.Sprint(s.world.LocalPods[0].Name, nil); got != want {
		t.Errorf("%q answers, want %q", got, want)
	}
}
