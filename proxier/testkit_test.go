package proxier_test

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeEngine records its Updates.
type fakeEngine struct {
	part            int        // of Abilities
	mu              sync.Mutex // guards all below
	seen            []desired.Update
	apply           func(desired.Update) (proxier.Result, error) // nil: always succeeds
	closed, cleaned int
	damaged         func(proxier.Damage) // while Watch runs
	watchErr        error                // if set, Watch returns it at once
	watches         int
}

// Watch waits for the end of ctx, unless watchErr is set.
func (e *fakeEngine) Watch(ctx context.Context, damaged func(proxier.Damage)) error {
	e.mu.Lock()
	e.damaged = damaged
	e.watches++
	watchErr := e.watchErr
	e.mu.Unlock()
	if watchErr == nil {
		<-ctx.Done()
		time.Sleep(time.Second) // Run must wait for it
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.damaged = nil
	return watchErr
}

func (e *fakeEngine) watched() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.damaged != nil
}

// damage makes Watch report a damage.
func (e *fakeEngine) damage(d proxier.Damage) {
	e.mu.Lock()
	damaged := e.damaged
	e.mu.Unlock()
	damaged(d)
}

func (e *fakeEngine) Apply(_ context.Context, u desired.Update) (proxier.Result, error) {
	e.mu.Lock()
	e.seen = append(e.seen, u)
	apply := e.apply
	e.mu.Unlock()
	if apply == nil {
		return proxier.Result{}, nil
	}
	return apply(u)
}

func (e *fakeEngine) Traits(*desired.Service) desired.Traits { return desired.Traits{} }

// someError makes failWith report failures of single service ports.
type someError []*proxier.ServiceError

func (e someError) Error() string { return fmt.Sprint([]*proxier.ServiceError(e)) }

func resultOf(err error) (proxier.Result, error) {
	if some, ok := err.(someError); ok { //nolint:errorlint // it is never wrapped
		return proxier.Result{Failed: some}, nil
	}
	return proxier.Result{}, err
}

func (e *fakeEngine) Abilities() proxier.Abilities {
	return proxier.Abilities{Watch: e.Watch, Part: e.part}
}

func (e *fakeEngine) Cleanup(context.Context) error { e.cleaned++; return nil }

func (e *fakeEngine) Close() error { e.closed++; return nil }

// failWith makes every following Apply return the error of fail; nil stops that.
func (e *fakeEngine) failWith(fail func(desired.Update) error) {
	if fail == nil {
		e.become(nil)
		return
	}
	e.become(func(u desired.Update) (proxier.Result, error) { return resultOf(fail(u)) })
}

// become replaces every following Apply.
func (e *fakeEngine) become(apply func(desired.Update) (proxier.Result, error)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.apply = apply
}

func (e *fakeEngine) updates() []desired.Update {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.seen)
}

func (e *fakeEngine) last() desired.Update {
	all := e.updates()
	return all[len(all)-1]
}

func namesIn(u desired.Update) string {
	var names []string
	for s := range u.Services() {
		names = append(names, s.Name.Name)
	}
	return strings.Join(names, " ")
}

// fixture is a Proxier with two fake engines, in a synctest bubble.
type fixture struct {
	*proxier.Proxier
	v4, v6 *fakeEngine
}

// run calls test in a synctest bubble with a running Proxier.
func run(t *testing.T, config proxier.Config, test func(t *testing.T, f *fixture)) {
	t.Helper()
	runWith(t, config, proxier.Deps{}, test)
}

func runWith(t *testing.T, config proxier.Config, deps proxier.Deps, test func(t *testing.T, f *fixture)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { newFixture(t, config, deps).run(t, test) })
}

// newFixture returns one that does not run yet.
func newFixture(t *testing.T, config proxier.Config, deps proxier.Deps) *fixture {
	t.Helper()
	return newFixtureWith(t, config, deps, &fakeEngine{}, &fakeEngine{})
}

func newFixtureWith(t *testing.T, config proxier.Config, deps proxier.Deps, v4, v6 *fakeEngine) *fixture {
	t.Helper()
	f := &fixture{v4: v4, v6: v6}
	config.Runner.Gather = cmp.Or(config.Runner.Gather, runner.Immediately)
	p, err := proxier.New(config, deps, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: f.v4, v1.IPv6Protocol: f.v6})
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	f.Proxier = p
	return f
}

// run runs the Proxier during a test.
func (f *fixture) run(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel() // also if the test ends early
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	test(t, f)
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run = %v, want nil when ctx ends", err)
	}
	if f.v4.closed == 0 || f.v6.closed == 0 {
		t.Error("an engine is not closed after Run")
	}
	if f.v4.watched() || f.v6.watched() {
		t.Error("Watch still runs after Run")
	}
}

func (f *fixture) synced() {
	f.OnServiceSynced()
	f.OnEndpointSlicesSynced()
}

// pass lets time pass in a bubble, and waits until everything that was due has happened.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// newProxier is an IPv4 Proxier that does not run.
func newProxier(t *testing.T, deps proxier.Deps, engine proxier.Engine) *proxier.Proxier {
	t.Helper()
	p, err := proxier.New(proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}, deps, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// service is a Service in namespace test with TCP port 80, called "web".
func service(name, clusterIP string, options ...proxiertest.ServiceOption) *v1.Service {
	return proxiertest.Service("test", name, append([]proxiertest.ServiceOption{
		proxiertest.ClusterIPs(clusterIP), proxiertest.Port("web", v1.ProtocolTCP, 80),
	}, options...)...)
}

// slice is the IPv4 EndpointSlice of a service, with target port 8080.
func slice(name string, addrs ...string) *discovery.EndpointSlice {
	options := []proxiertest.SliceOption{proxiertest.SlicePort("web", v1.ProtocolTCP, 8080)}
	for _, a := range addrs {
		options = append(options, proxiertest.Endpoint(a))
	}
	return proxiertest.Slice("test", name, discovery.AddressTypeIPv4, options...)
}

// withoutRetries is a Config with which only the test causes syncs.
func withoutRetries() proxier.Config {
	return proxier.Config{Runner: runner.Options{Retry: runner.Backoff{Initial: time.Hour, Max: time.Hour}}}
}

type observed struct {
	mu      sync.Mutex // guards reports
	reports []proxier.SyncReport
}

func (o *observed) ObserveSync(r proxier.SyncReport) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.reports = append(o.reports, r)
}

func nameOf(name string) (n changetracker.ServicePortName) {
	n.Name = name
	return n
}
