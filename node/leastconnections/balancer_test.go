package leastconnections_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/leastconnections"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// plane is a proxy that applies at once what it is told, and the connections that are open.
type plane struct {
	t        *testing.T
	tracker  *changetracker.Tracker
	balancer *leastconnections.Balancer
	logs     *observer.ObservedLogs
	stop     func()

	mu       sync.Mutex // guards all below
	states   map[v1.IPFamily]*changetracker.State
	triggers int
	readings int
	open     map[netip.AddrPort]int
	takes    time.Duration
	err      error
}

func (p *plane) Tracker() *changetracker.Tracker { return p.tracker }

func (p *plane) Programmed(family v1.IPFamily) *changetracker.State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.states[family]
}

func (p *plane) Trigger() {
	p.mu.Lock()
	p.triggers++
	p.mu.Unlock()
	p.sync()
}

func (p *plane) sync() {
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		_ = p.tracker.Apply(family, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.states[family] = delta.After
			return nil, nil
		})
	}
}

// list is an Options.List.
func (p *plane) list(_ context.Context, family v1.IPFamily, each func(id uint64, protocol v1.Protocol, server netip.AddrPort)) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.readings++
	time.Sleep(p.takes) // fake time
	for server, n := range p.open {
		for i := range n {
			if server.Addr().Is4() == (family == v1.IPv4Protocol) {
				each(uint64(i)<<8|uint64(server.Addr().As16()[15]), v1.ProtocolTCP, server)
			}
		}
	}
	return p.err
}

// opens sets how many connections are open to the endpoints of web.
func (p *plane) opens(counts ...int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = map[netip.AddrPort]int{}
	for i, n := range counts {
		p.open[addr(i+1)] = n
	}
}

func (p *plane) change(do func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	do()
}

func portName(service string) changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "default", Name: service}, Port: "http", Protocol: v1.ProtocolTCP}
}

func addr(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80)
}

// service gives a Service a policy, and endpoints of these weights.
func (p *plane) service(name string, policy changetracker.Balancing, weights ...uint16) {
	p.t.Helper()
	of := portName(name)
	_, err := p.tracker.Services.Set(of.NamespacedName, changetracker.ServicePort{
		Name: of, Family: v1.IPv4Protocol, ClusterIP: netip.AddrFrom4([4]byte{10, 96, 0, byte(len(name))}), Port: 80, Balancing: policy,
	})
	list := make([]changetracker.Endpoint, len(weights))
	for i, weight := range weights {
		list[i] = changetracker.Endpoint{Addr: addr(i + 1), Ready: true, Serving: true, Weight: weight}
	}
	_, errOfEndpoints := p.tracker.Endpoints.Set(of, list...)
	if err := errors.Join(err, errOfEndpoints); err != nil {
		p.t.Fatal(err)
	}
	p.sync()
}

// inBubble runs test with a Balancer in a synctest bubble.
func inBubble(t *testing.T, options leastconnections.Options, test func(p *plane)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		tracker, err := changetracker.New(changetracker.Options{Node: changetracker.Node{Name: "here"}})
		if err != nil {
			t.Fatal(err)
		}
		core, logs := observer.New(zap.WarnLevel)
		p := &plane{t: t, tracker: tracker, logs: logs, states: map[v1.IPFamily]*changetracker.State{}}
		options.List, options.Logger = p.list, zap.New(core)
		if p.balancer, err = leastconnections.New(options); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- p.balancer.Run(ctx, p) }()
		p.stop = sync.OnceFunc(func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
		test(p)
		p.stop()
	})
}

// after waits, and expects the weights of web's endpoints.
func (p *plane) after(wait time.Duration, want ...uint16) {
	p.t.Helper()
	time.Sleep(wait)
	synctest.Wait()
	if got := p.weights("web"); !slices.Equal(got, want) {
		p.t.Errorf("%v later: weights %v, want %v; %+v", wait, got, want, p.balancer.Readings())
	}
}

func (p *plane) weights(service string) (list []uint16) {
	for _, e := range p.Programmed(v1.IPv4Protocol).Endpoints(portName(service)) {
		list = append(list, max(e.Weight, 1))
	}
	return list
}

const reading = 1100 * time.Millisecond

// LCB-01, LCB-04: weights follow the counts. They go back to those of slices when counts are level, when the policy goes, and at the end.
func TestWeightsFollowTheCounts(t *testing.T) {
	least, random := changetracker.LeastConnections, changetracker.Random
	inBubble(t, leastconnections.Options{}, func(p *plane) {
		p.service("web", least, 1, 1, 3)
		p.after(reading, 1, 1, 3)
		p.opens(50, 50, 0)
		p.after(2*reading, 1, 1, 48)
		p.opens(50, 50, 150)
		p.after(reading, 1, 1, 3)
		p.opens(50, 10, 150)
		p.after(2*reading, 1, 16, 3)
		p.service("web", least, 1, 1, 3, 1)
		p.after(reading, 1, 1, 3, 16)
		p.service("web", random, 1, 1, 3, 1)
		p.after(reading, 1, 1, 3, 1)
		p.service("web", least, 1, 1, 3, 1)
		p.after(reading, 1, 1, 3, 16)
		p.stop()
		p.after(reading, 1, 1, 3, 1)
		if p.logs.Len() > 0 {
			t.Errorf("logs %v", p.logs.All())
		}
	})
}

// LCB-02: without a service port that has the policy, nothing is read, and a quiet Service costs no sync.
func TestNothingIsReadInVain(t *testing.T) {
	inBubble(t, leastconnections.Options{}, func(p *plane) {
		p.service("web", changetracker.Random, 1, 1)
		p.after(time.Hour, 1, 1)
		if p.readings > 0 {
			t.Errorf("%d readings", p.readings)
		}
		p.service("web", changetracker.LeastConnections, 1, 1)
		p.opens(100, 20)
		p.after(time.Hour, 1, 16)
		if p.triggers > 2 || p.readings < 3000 {
			t.Errorf("%d syncs and %d readings, want 2 at most and 3600", p.triggers, p.readings)
		}
	})
}

// An endpoint that was away has no Override any more.
func TestAnEndpointThatWasAway(t *testing.T) {
	inBubble(t, leastconnections.Options{}, func(p *plane) {
		p.service("web", changetracker.LeastConnections, 1, 1)
		p.opens(100, 20)
		p.after(2*reading, 1, 16)
		p.service("web", changetracker.LeastConnections, 1)
		p.after(reading, 1)
		p.service("web", changetracker.LeastConnections, 1, 1)
		p.after(reading, 1, 16)
		p.service("web", changetracker.LeastConnections, 1)
		p.service("web", changetracker.LeastConnections, 1, 1) // before the next reading
		p.after(reading, 1, 16)
	})
}

// LCB-02: a reading that takes long is not made more often than a twentieth of the time allows.
func TestReadingsAreBounded(t *testing.T) {
	inBubble(t, leastconnections.Options{}, func(p *plane) {
		p.change(func() { p.takes = 2 * time.Second })
		p.service("web", changetracker.LeastConnections, 1, 1)
		time.Sleep(time.Hour)
		if s := p.balancer.Readings(); s.Made < 80 || s.Made > 90 || s.Took < 2*time.Second {
			t.Errorf("%+v: want 3600 s / 42 s readings", s)
		}
	})
}

// LCB-03: of many Services whose counts change, so many weights change after a reading as Changes says, and all in turn.
func TestChangesAreBounded(t *testing.T) {
	inBubble(t, leastconnections.Options{Changes: 10}, func(p *plane) {
		names := make([]string, 20)
		for i := range names {
			names[i] = "web" + strings.Repeat("x", i)
			p.service(names[i], changetracker.LeastConnections, 1, 1, 1, 1)
		}
		p.service("wide", changetracker.LeastConnections, slices.Repeat([]uint16{1}, 12)...)
		p.opens(100, 100, 20, 20)
		before := uint64(0)
		time.Sleep(time.Second / 2) // between two readings
		for range 15 {
			time.Sleep(time.Second)
			synctest.Wait()
			now := p.balancer.Readings().Changes
			if now-before > 12 {
				t.Errorf("%d changes after a reading", now-before)
			}
			before = now
		}
		for _, name := range names {
			if got := p.weights(name); !slices.Equal(got, []uint16{1, 1, 16, 16}) {
				t.Errorf("%s: weights %v", name, got)
			}
		}
		if got := p.weights("wide"); got[0] != 1 || got[11] != 16 {
			t.Errorf("more endpoints than Changes: weights %v", got)
		}
	})
}

// LCB-04: weights stay when a reading fails, and go after some failures. A failure is logged once.
func TestReadingsThatFail(t *testing.T) {
	inBubble(t, leastconnections.Options{}, func(p *plane) {
		p.service("web", changetracker.LeastConnections, 1, 1)
		p.opens(100, 20)
		p.after(2*reading, 1, 16)
		p.change(func() { p.err = errors.New("refused") })
		p.after(2*reading, 1, 16)
		p.after(time.Hour, 1, 1)
		if p.logs.Len() != 1 || p.balancer.Readings().Failed < 3000 {
			t.Errorf("%d lines, %+v", p.logs.Len(), p.balancer.Readings())
		}
		p.change(func() { p.err = nil })
		p.after(reading, 1, 16)
	})
}

func TestRunTwice(t *testing.T) {
	inBubble(t, leastconnections.Options{}, func(p *plane) {
		synctest.Wait()
		if err := p.balancer.Run(t.Context(), p); err == nil || !strings.Contains(err.Error(), "twice") {
			t.Errorf("error %v", err)
		}
	})
}

func ExampleBalancer() {
	balancer, err := leastconnections.New(leastconnections.Options{
		List: func(_ context.Context, family v1.IPFamily, each func(id uint64, protocol v1.Protocol, server netip.AddrPort)) error {
			return nil // as conntrack.OpenConnections(netNS) does
		},
	})
	if err != nil {
		panic(err)
	}
	// In a goroutine: balancer.Run(ctx, provider)
	fmt.Println(balancer.Readings().Ports)
	// Output: 0
}
