package endpointhealth_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
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
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/endpointhealth"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// plane is a proxy that applies at once what it is told, and the servers of its endpoints.
type plane struct {
	tracker *changetracker.Tracker

	mu       sync.Mutex // guards all below
	states   map[v1.IPFamily]*changetracker.State
	triggers []time.Time
	late     bool // the State that is programmed is always one sync behind
	// broken are the endpoints that do not answer. checked has the times of their checks.
	broken  map[string]error
	checked map[string][]time.Time
	running int // checks
	most    int // of them at once
	takes   time.Duration
}

func (p *plane) Tracker() *changetracker.Tracker { return p.tracker }

func (p *plane) Programmed(family v1.IPFamily) *changetracker.State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.states[family]
}

// Trigger is the only sync that a Checker causes.
func (p *plane) Trigger() {
	p.mu.Lock()
	p.triggers = append(p.triggers, time.Now())
	p.mu.Unlock()
	p.sync()
}

func (p *plane) sync() {
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		_ = p.tracker.Apply(family, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.late && delta.Before.Len() > 0 {
				p.states[family] = delta.Before
				return nil, nil
			}
			p.states[family] = delta.After
			return nil, nil
		})
	}
}

// Check is the Probe.
func (p *plane) Check(ctx context.Context, target endpointhealth.Target) error {
	p.mu.Lock()
	at := target.Addr.String()
	p.checked[at] = append(p.checked[at], time.Now())
	p.running++
	p.most = max(p.most, p.running)
	err, takes := p.broken[at], p.takes
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.running--
	}()
	if errors.Is(err, errHangs) {
		<-ctx.Done()
		return ctx.Err()
	}
	time.Sleep(takes) // fake time
	return err
}

var (
	errHangs = errors.New("hangs")
	errSick  = errors.New("sick")
)

// breaks makes an endpoint fail, or heals it.
func (p *plane) breaks(endpoint string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.broken[endpoint] = err
}

// kit is a Checker on a plane in a synctest bubble.
type kit struct {
	*plane
	t       *testing.T
	checker *endpointhealth.Checker
	logs    *observer.ObservedLogs
	options endpointhealth.Options
	stop    func()
}

func webName() changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "default", Name: "web"}, Port: "http", Protocol: v1.ProtocolTCP}
}

// inBubble runs test with a Checker that checks every service port by the policy, and whose
// Service web has the endpoints 10.0.0.1 to 10.0.0.n.
func inBubble(t *testing.T, policy endpointhealth.CheckPolicy, n int, test func(k *kit)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		tracker, err := changetracker.New(changetracker.Options{Node: changetracker.Node{Name: "here"}})
		if err != nil {
			t.Fatal(err)
		}
		k := &kit{t: t, plane: &plane{
			tracker: tracker, states: map[v1.IPFamily]*changetracker.State{}, broken: map[string]error{}, checked: map[string][]time.Time{},
		}}
		core, logs := observer.New(zap.InfoLevel)
		k.logs = logs
		if policy.Probe == nil {
			policy.Probe = k.plane
		}
		k.options = endpointhealth.Options{Logger: zap.New(core), Choose: always(policy)}
		k.service("web")
		k.endpoints("web", n)
		test(k)
		if k.stop != nil {
			k.stop()
		}
	})
}

func always(policy endpointhealth.CheckPolicy) func(*changetracker.ServicePort) (endpointhealth.CheckPolicy, bool, error) {
	return func(*changetracker.ServicePort) (endpointhealth.CheckPolicy, bool, error) { return policy, true, nil }
}

// weighted gives web endpoints of these weights.
func (k *kit) weighted(weights ...uint16) {
	k.t.Helper()
	var list []changetracker.Endpoint
	for i, weight := range weights {
		list = append(list, changetracker.Endpoint{Addr: endpoint(i + 1), Ready: true, Serving: true, Weight: weight})
	}
	k.set(list...)
}

// set gives web these endpoints.
func (k *kit) set(list ...changetracker.Endpoint) {
	k.t.Helper()
	if _, err := k.tracker.Endpoints.Set(webName(), list...); err != nil {
		k.t.Fatal(err)
	}
	k.sync()
}

func (k *kit) service(service string, options ...proxiertest.ServiceOption) {
	ip := fmt.Sprintf("10.96.0.%d", 10+len(service))
	k.tracker.Services.Update(nil, proxiertest.Service("default", service, append([]proxiertest.ServiceOption{
		proxiertest.ClusterIPs(ip), proxiertest.Port("http", v1.ProtocolTCP, 80),
	}, options...)...))
}

func (k *kit) endpoints(service string, n int) {
	parts := []proxiertest.SliceOption{proxiertest.SlicePort("http", v1.ProtocolTCP, 80)}
	for i := range n {
		parts = append(parts, proxiertest.Endpoint(endpoint(i+1).Addr().String()))
	}
	k.tracker.Endpoints.EndpointSliceUpdate(proxiertest.Slice("default", service, discovery.AddressTypeIPv4, parts...), false)
	k.sync()
}

func endpoint(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 80)
}

func at(i int) string { return endpoint(i).String() }

// run starts the Checker.
func (k *kit) run() {
	k.t.Helper()
	var err error
	if k.checker, err = endpointhealth.New(k.options); err != nil {
		k.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(k.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.checker.Run(ctx, k.plane) }()
	k.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			k.t.Error(err)
		}
	})
}

// after waits, and expects the endpoints of web that are not as slices say, as text.
func (k *kit) after(wait time.Duration, want ...string) {
	k.t.Helper()
	time.Sleep(wait)
	synctest.Wait()
	if got := k.unusual(); !slices.Equal(got, want) {
		k.t.Errorf("%v later: %q, want %q; %+v", wait, got, want, k.checker.Status())
	}
}

func (k *kit) unusual() (list []string) {
	for _, e := range k.Programmed(v1.IPv4Protocol).Endpoints(webName()) {
		if text := e.String(); text != e.Addr.String() {
			list = append(list, text)
		}
	}
	return list
}

// until waits until an endpoint of web has that text, and returns how long it took.
func (k *kit) until(limit time.Duration, want string) time.Duration {
	k.t.Helper()
	began := time.Now()
	for !slices.Contains(k.texts(), want) {
		if time.Since(began) > limit {
			k.t.Fatalf("not %q within %v: %q", want, limit, k.texts())
		}
		time.Sleep(limit / 1000)
		synctest.Wait()
	}
	return time.Since(began)
}

func (k *kit) texts() (list []string) {
	for _, e := range k.Programmed(v1.IPv4Protocol).Endpoints(webName()) {
		list = append(list, e.String())
	}
	return list
}

// syncs counts the syncs that the Checker has caused.
func (k *kit) syncs() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.triggers)
}

// checks returns and forgets the times of the checks.
func (k *kit) checks() map[string][]time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer func() { k.checked = map[string][]time.Time{} }()
	return maps.Clone(k.checked)
}

func (k *kit) expectLog(want ...string) {
	k.t.Helper()
	var got []string
	for _, entry := range k.logs.TakeAll() {
		got = append(got, entry.Message+" "+fmt.Sprint(entry.ContextMap()["endpoint"]))
	}
	if !slices.Equal(got, want) {
		k.t.Errorf("log\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
