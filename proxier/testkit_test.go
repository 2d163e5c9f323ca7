package proxier

import (
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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/runner"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeEngine remembers what it was given.
type fakeEngine struct {
	mu              sync.Mutex // guards all below
	seen            []desired.Update
	apply           func(desired.Update) (Result, error) // nil: all goes well
	closed, cleaned int
	damaged         func(Damage) // while it is watched
	deaf            error        // what Watch returns at once
	watches         int
}

// Watch waits, unless it is deaf.
func (e *fakeEngine) Watch(ctx context.Context, damaged func(Damage)) error {
	e.mu.Lock()
	e.damaged = damaged
	e.watches++
	deaf := e.deaf
	e.mu.Unlock()
	if deaf == nil {
		<-ctx.Done()
		time.Sleep(time.Second) // Run must wait for it
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.damaged = nil
	return deaf
}

func (e *fakeEngine) watched() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.damaged != nil
}

// damage makes the engine notice a damage.
func (e *fakeEngine) damage(d Damage) {
	e.mu.Lock()
	damaged := e.damaged
	e.mu.Unlock()
	damaged(d)
}

func (e *fakeEngine) Apply(_ context.Context, u desired.Update) (Result, error) {
	e.mu.Lock()
	e.seen = append(e.seen, u)
	apply := e.apply
	e.mu.Unlock()
	if apply == nil {
		return Result{}, nil
	}
	return apply(u)
}

func (e *fakeEngine) Traits(*desired.Service) desired.Traits { return desired.Traits{} }

// someError is what a fake engine fails with for some service ports only.
type someError []*ServiceError

func (e someError) Error() string { return fmt.Sprint([]*ServiceError(e)) }

func resultOf(err error) (Result, error) {
	if some, ok := err.(someError); ok { //nolint:errorlint // it is never wrapped
		return Result{Failed: some}, nil
	}
	return Result{}, err
}

func (e *fakeEngine) Cleanup(context.Context) error { e.cleaned++; return nil }

func (e *fakeEngine) Close() error { e.closed++; return nil }

// failWith makes every Apply from now on return what fail does; nil stops that.
func (e *fakeEngine) failWith(fail func(desired.Update) error) {
	if fail == nil {
		e.become(nil)
		return
	}
	e.become(func(u desired.Update) (Result, error) { return resultOf(fail(u)) })
}

// become makes apply the engine's Apply from now on.
func (e *fakeEngine) become(apply func(desired.Update) (Result, error)) {
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

// fixture is a Proxier of two fake engines, in a bubble of fake time.
type fixture struct {
	*Proxier
	v4, v6 *fakeEngine
}

// run calls test in a synctest bubble with a running Proxier.
func run(t *testing.T, config Config, test func(t *testing.T, f *fixture)) {
	t.Helper()
	runWith(t, config, Deps{}, test)
}

func runWith(t *testing.T, config Config, deps Deps, test func(t *testing.T, f *fixture)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := &fixture{v4: &fakeEngine{}, v6: &fakeEngine{}}
		p, err := New(config, deps, map[v1.IPFamily]Engine{v1.IPv4Protocol: f.v4, v1.IPv6Protocol: f.v6})
		if err != nil {
			t.Fatalf("New: %v", err)
		}
		f.Proxier = p
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel() // also when the test ends early
		done := make(chan error, 1)
		go func() { done <- p.Run(ctx) }()
		test(t, f)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v, want nil when ctx ends", err)
		}
		if f.v4.closed == 0 || f.v6.closed == 0 {
			t.Error("Run returned and left an engine open")
		}
		if f.v4.watched() || f.v6.watched() {
			t.Error("Run returned and left an engine watched")
		}
	})
}

func (f *fixture) synced() {
	f.OnServiceSynced()
	f.OnEndpointSlicesSynced()
}

func service(name, clusterIP string, change ...func(*v1.Service)) *v1.Service {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "test", Name: name},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeClusterIP, ClusterIP: clusterIP,
			Ports: []v1.ServicePort{{Name: "web", Protocol: v1.ProtocolTCP, Port: 80}},
		},
	}
	for _, c := range change {
		c(s)
	}
	return s
}

func externalIP(ip string) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, ip) }
}

func slice(name string, addrs ...string) *discovery.EndpointSlice {
	port, number, tcp := "web", int32(8080), v1.ProtocolTCP
	s := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "test", Name: name, Labels: map[string]string{discovery.LabelServiceName: name}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: &port, Port: &number, Protocol: &tcp}},
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{a}})
	}
	return s
}

// withoutRetries leaves it to Sync when there is a sync.
func withoutRetries() Config {
	return Config{Runner: runner.Options{Retry: runner.Backoff{Initial: time.Hour, Max: time.Hour}}}
}

type observed struct {
	mu      sync.Mutex // guards reports
	reports []SyncReport
}

func (o *observed) ObserveSync(r SyncReport) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.reports = append(o.reports, r)
}

func nameOf(name string) (n changetracker.ServicePortName) {
	n.Name = name
	return n
}
