package leastconnections_test

import (
	"context"
	"errors"
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

	mu        sync.Mutex // guards all below
	states    map[v1.IPFamily]*changetracker.State
	syncs     int
	syncTakes time.Duration
	frozen    map[v1.IPFamily]bool // their syncs fail
	readings  int
	open      map[netip.AddrPort]int
	takes     time.Duration
	err       error
}

func (p *plane) Tracker() *changetracker.Tracker { return p.tracker }

func (p *plane) Programmed(family v1.IPFamily) *changetracker.State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.states[family]
}

func (p *plane) Trigger() {
	p.mu.Lock()
	p.syncs++
	takes := p.syncTakes
	p.mu.Unlock()
	time.AfterFunc(takes, p.sync) // fake time
}

func (p *plane) sync() {
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		_ = p.tracker.Apply(family, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.frozen[family] {
				return nil, errTest
			}
			p.states[family] = delta.After
			return nil, nil
		})
	}
}

// list is an Options.List.
func (p *plane) list(_ context.Context, family v1.IPFamily, each func(id uint64, protocol v1.Protocol, server netip.AddrPort)) error {
	p.mu.Lock()
	p.readings++
	takes, open, err := p.takes, p.open, p.err
	p.mu.Unlock()
	time.Sleep(takes) // fake time
	for server, n := range open {
		for i := range n {
			if server.Addr().Is4() == (family == v1.IPv4Protocol) {
				each(uint64(i)<<8|uint64(server.Addr().As16()[15]), v1.ProtocolTCP, server)
			}
		}
	}
	return err
}

// opens sets how many connections are open to the endpoints of web.
func (p *plane) opens(counts ...int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = map[netip.AddrPort]int{}
	for i, n := range counts {
		p.open[addr(i+1)], p.open[addr6(i+1)] = n, n
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

func addr6(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte{0xfd, 0, 15: byte(i)}), 80)
}

var errTest = errors.New("refused")

func addr(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80)
}

// service gives a Service a policy, and endpoints of these weights: of IPv6 if its name is six.
func (p *plane) service(name string, policy changetracker.Balancing, weights ...uint16) {
	p.t.Helper()
	of := portName(name)
	family, vip, at := v1.IPv4Protocol, netip.AddrFrom4([4]byte{10, 96, 0, byte(len(name))}), addr
	if name == "six" {
		family, vip, at = v1.IPv6Protocol, netip.MustParseAddr("fd00:96::1"), addr6
	}
	_, err := p.tracker.Services.Set(of.NamespacedName, changetracker.ServicePort{Name: of, Family: family, ClusterIP: vip, Port: 80, Balancing: policy})
	list := make([]changetracker.Endpoint, len(weights))
	for i, weight := range weights {
		list[i] = changetracker.Endpoint{Addr: at(i + 1), Ready: true, Serving: true, Weight: weight}
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
	inBubbleWith(t, changetracker.Options{}, options, test)
}

func inBubbleWith(t *testing.T, trackers changetracker.Options, options leastconnections.Options, test func(p *plane)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		trackers.Node.Name = "here"
		tracker, err := changetracker.New(trackers)
		if err != nil {
			t.Fatal(err)
		}
		core, logs := observer.New(zap.WarnLevel)
		p := &plane{t: t, tracker: tracker, logs: logs, states: map[v1.IPFamily]*changetracker.State{}, frozen: map[v1.IPFamily]bool{}}
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

func (p *plane) weights(service string) []uint16 { return p.weightsOf(v1.IPv4Protocol, service) }

func (p *plane) weightsOf(family v1.IPFamily, service string) (list []uint16) {
	for _, e := range p.Programmed(family).Endpoints(portName(service)) {
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
		if p.syncs > 2 || p.readings < 3000 {
			t.Errorf("%d syncs and %d readings, want 2 at most and 3600", p.syncs, p.readings)
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
		p.after(4*reading, 1, 16)
	})
}

// LCB-02: readings that take long take a tenth of the time.
func TestReadingsAreBounded(t *testing.T) {
	inBubble(t, leastconnections.Options{}, func(p *plane) {
		p.change(func() { p.takes = 2 * time.Second })
		p.service("web", changetracker.LeastConnections, 1, 1)
		time.Sleep(time.Hour)
		if s := p.balancer.Readings(); s.Passed < 155 || s.Passed > 170 || s.Took < 2*time.Second {
			t.Errorf("%+v: want 3600 s / 22 s readings", s)
		}
	})
}

// LCB-03: of many Services with counts that change, so many weights change after a reading as Changes says, and all in
// turn. What would be more stays at random.
func TestChangesAreBounded(t *testing.T) {
	inBubble(t, leastconnections.Options{Changes: 20}, func(p *plane) {
		names := make([]string, 20)
		for i := range names {
			names[i] = "web" + strings.Repeat("x", i)
			p.service(names[i], changetracker.LeastConnections, 1, 1, 1, 1)
		}
		p.service("wide", changetracker.LeastConnections, slices.Repeat([]uint16{1}, 11)...)
		p.opens(100, 100, 20, 20)
		before := uint64(0)
		time.Sleep(time.Second / 2) // between two readings
		for range 25 {
			time.Sleep(time.Second)
			synctest.Wait()
			now := p.balancer.Readings().Overrides
			if now-before > 10 {
				t.Errorf("%d changes after a reading, each for two frontends", now-before)
			}
			before = now
		}
		for _, name := range names {
			if got := p.weights(name); got[0] != 1 || got[2] != 16 {
				t.Errorf("%s: weights %v", name, got)
			}
		}
		if got := p.weights("wide"); slices.Max(got) != 1 || p.balancer.Readings().AtRandom != 1 {
			t.Errorf("22 weights: %v, %+v", got, p.balancer.Readings())
		}
	})
}

// LCB-01: few connections more than others have, or as many as chance gives, change nothing.
func TestChanceChangesNothing(t *testing.T) {
	inBubble(t, leastconnections.Options{}, func(p *plane) {
		p.service("web", changetracker.LeastConnections, 1, 1, 1)
		for i := range 100 {
			p.opens(i%8, 0, i%3)
			p.after(time.Second, 1, 1, 1)
			p.opens(400+i%8, 410, 395)
			p.after(time.Second, 1, 1, 1)
		}
		if p.syncs > 0 {
			t.Errorf("%d syncs", p.syncs)
		}
	})
}

// A Service with too many endpoints stays at random, also when it grows.
func TestManyEndpointsStayAtRandom(t *testing.T) {
	inBubble(t, leastconnections.Options{}, func(p *plane) {
		p.service("web", changetracker.LeastConnections, 1, 1, 1)
		p.opens(100, 100, 0)
		p.after(2*reading, 1, 1, 16)
		p.service("web", changetracker.LeastConnections, slices.Repeat([]uint16{1}, 129)...)
		p.after(2*reading, slices.Repeat([]uint16{1}, 129)...)
	})
}

// Weights that another part of the program scales are left alone until it ends.
func TestOthersScaleTheWeights(t *testing.T) {
	inBubble(t, leastconnections.Options{}, func(p *plane) {
		p.service("web", changetracker.LeastConnections, 1, 1)
		p.opens(100, 20)
		p.after(2*reading, 1, 16)
		p.tracker.Override(portName("web"), addr(1), changetracker.Override{By: "another", Scale: 4})
		p.sync()
		p.after(10*reading, 4, 1)
		p.tracker.Override(portName("web"), addr(1), changetracker.Override{By: "another"})
		p.sync()
		p.after(4*reading, 1, 16)
	})
}

// LCB-04: weights that are not programmed go back, and are tried again now and then. The other family goes on.
func TestSyncsThatFail(t *testing.T) {
	inBubble(t, leastconnections.Options{}, func(p *plane) {
		p.service("web", changetracker.LeastConnections, 1, 1)
		p.service("six", changetracker.LeastConnections, 1, 1)
		p.opens(100, 20)
		p.after(2*reading, 1, 16)
		p.change(func() { p.frozen[v1.IPv6Protocol] = true })
		before := p.balancer.Readings().Overrides
		served := 0
		for i := range 60 {
			p.opens(20, 100+i)
			time.Sleep(30 * time.Second)
			served += count(slices.Equal(p.weights("web"), []uint16{16, 1}))
			p.opens(100, 20)
			time.Sleep(30 * time.Second)
			served += count(slices.Equal(p.weights("web"), []uint16{1, 16}))
		}
		if now := p.balancer.Readings().Overrides; served < 90 || now-before > 60*2*4+10*4 {
			t.Errorf("the other family follows in %d of 120 cases; %d Overrides and %d syncs in an hour", served, now-before, p.syncs)
		}
		p.change(func() { p.frozen[v1.IPv6Protocol] = false })
		time.Sleep(12 * time.Minute)
		if got := p.weightsOf(v1.IPv6Protocol, "six"); !slices.Equal(got, []uint16{1, 16}) {
			t.Errorf("weights of IPv6 %v, when its syncs pass again", got)
		}
	})
}

func count(is bool) int {
	if is {
		return 1
	}
	return 0
}

// A hook that overwrites weights is no reason to try for ever.
func TestAHookOverwritesWeights(t *testing.T) {
	overwrite := func(_ *changetracker.ServicePort, list []changetracker.Endpoint) []changetracker.Endpoint {
		list = slices.Clone(list)
		for i := range list {
			list[i].Weight = min(list[i].Weight, 2)
		}
		return list
	}
	inBubbleWith(t, changetracker.Options{ObjectOptions: changetracker.ObjectOptions{EditEndpoints: overwrite}}, leastconnections.Options{}, func(p *plane) {
		p.service("web", changetracker.LeastConnections, 1, 1)
		p.opens(100, 20)
		time.Sleep(time.Hour)
		if n := p.balancer.Readings().Overrides; n > 60 {
			t.Errorf("%d Overrides in an hour", n)
		}
	})
}

// A dual-stack Service: the changes of one family leave the other its own.
func TestFamiliesDoNotShareChanges(t *testing.T) {
	inBubble(t, leastconnections.Options{Changes: 5}, func(p *plane) {
		p.service("web", changetracker.LeastConnections, 1, 1)
		p.service("six", changetracker.LeastConnections, 1, 1)
		for i := range 60 {
			p.opens(20+80*(i%2), 100-80*(i%2))
			time.Sleep(2 * reading)
			want := []uint16{16, 1}
			if i%2 == 1 {
				want = []uint16{1, 16}
			}
			if got := p.weightsOf(v1.IPv6Protocol, "six"); !slices.Equal(got, want) {
				t.Fatalf("round %d: weights of IPv6 %v, want %v", i, got, want)
			}
		}
	})
}

// LCB-02: where it takes long until weights are programmed, they change seldom.
func TestSyncsThatTakeLong(t *testing.T) {
	inBubble(t, leastconnections.Options{}, func(p *plane) {
		p.change(func() { p.syncTakes = 2 * time.Second })
		p.service("web", changetracker.LeastConnections, 1, 1)
		for i := range 3600 {
			p.opens(20+80*(i%2), 100-80*(i%2))
			time.Sleep(time.Second)
		}
		if p.syncs < 100 || p.syncs > 180 {
			t.Errorf("%d syncs in an hour, want one in 20 s or somewhat more", p.syncs)
		}
	})
}

// Weights that may grow too large for a weight are left alone.
func TestHeavyEndpointsStayAtRandom(t *testing.T) {
	inBubble(t, leastconnections.Options{}, func(p *plane) {
		for _, heavy := range []uint16{4096, 65535} {
			p.service("web", changetracker.LeastConnections, heavy, heavy)
			p.opens(100, 20)
			p.after(10*reading, heavy, heavy)
		}
		p.service("web", changetracker.LeastConnections, 4095, 4095)
		p.after(2*reading, 4095, 65520)
	})
}

// LCB-04: weights stay when a reading fails, and go after some failures. A failure that lasts is logged every ten minutes.
func TestReadingsThatFail(t *testing.T) {
	inBubble(t, leastconnections.Options{}, func(p *plane) {
		p.service("web", changetracker.LeastConnections, 1, 1)
		p.opens(100, 20)
		p.after(2*reading, 1, 16)
		p.change(func() { p.err, p.takes = errors.New("refused"), 10*time.Second })
		p.after(2*reading, 1, 16)
		p.after(3*time.Minute, 1, 1)
		p.after(time.Hour, 1, 1)
		if n := p.logs.Len(); n < 6 || n > 8 || p.balancer.Readings().Failed < 30 {
			t.Errorf("%d lines, %+v", n, p.balancer.Readings())
		}
		p.change(func() { p.err, p.takes = nil, 0 })
		p.after(2*time.Minute, 1, 16)
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
