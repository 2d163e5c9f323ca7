package nftables_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/informer"
	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/programmed"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// flaky fails Applies: before the kernel has changed, or after, as if the answer was lost.
type flaky struct {
	*nftables.Engine
	fails *atomic.Int32
}

const (
	failsBefore = 1 + iota
	failsAfter
)

func (e flaky) Apply(ctx context.Context, u desired.Update) (proxier.Result, error) {
	switch e.fails.Load() {
	case failsBefore:
		return proxier.Result{}, errors.New("no memory")
	case failsAfter:
		_, err := e.Engine.Apply(ctx, u)
		return proxier.Result{}, errors.Join(err, errors.New("no answer"))
	}
	return e.Engine.Apply(ctx, u)
}

// sayer is a node that follows an API server with the nftables engine.
type sayer struct {
	t       *testing.T
	api     *apitest.Server
	config  nftables.Config
	fails   atomic.Int32
	proxier *proxier.Proxier
	end     func()

	objects map[string]runtime.Object
	last    [2]uint64 // version of the last change of Services and of EndpointSlices
	checks  int
}

// start starts a process on the node, which may have the tables of one before.
func (s *sayer) start() {
	s.t.Helper()
	engine, err := nftables.NewEngine(s.config, v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		s.t.Fatal(err)
	}
	config := s.config.Config
	config.Families, config.Runner = []v1.IPFamily{v1.IPv4Protocol}, runner.Options{
		MinInterval: runner.Unlimited, Retry: runner.Backoff{Initial: time.Millisecond, Max: 20 * time.Millisecond},
	}
	if s.proxier, err = proxier.New(config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: flaky{engine, &s.fails}}); err != nil {
		s.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(s.t.Context())
	var running sync.WaitGroup
	p := s.proxier
	running.Go(func() { _ = p.Run(ctx) })
	running.Go(func() { _ = informer.Run(ctx, &rest.Config{Host: s.api.URL()}, p, informer.Options{}) })
	s.end = func() { stop(); running.Wait() }
}

// says reports whether the node says that it has all changes.
func (s *sayer) says() bool {
	report := programmed.NewReport("", s.proxier.Status(), time.Time{})
	f := report.Families[v1.IPv4Protocol]
	return len(f.Failed) == 0 && report.Missing(programmed.Change{Versions: changetracker.Versions{
		Services: strconv.FormatUint(max(1, s.last[0]), 10), EndpointSlices: strconv.FormatUint(max(1, s.last[1]), 10),
	}}) == nil
}

// check compares the kernel with all that the API server has, if the node says that it has it. The
// witness has never seen the node, its Provider or its history.
func (s *sayer) check() {
	s.t.Helper()
	if !s.says() {
		return
	}
	s.checks++
	witness := &proxiertest.RecordingEngine{}
	config := s.config.Config
	config.NetNS, config.Families = "", []v1.IPFamily{v1.IPv4Protocol}
	p, err := proxier.New(config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: witness})
	if err != nil {
		s.t.Fatal(err)
	}
	for _, o := range s.objects {
		switch o := o.(type) {
		case *v1.Service:
			p.OnServiceAdd(o)
		case *discovery.EndpointSlice:
			p.OnEndpointSliceAdd(o)
		}
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	ctx, stop := context.WithCancel(s.t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = p.Run(ctx) })
	err = p.Sync(ctx)
	stop()
	running.Wait()
	if err != nil || len(witness.Updates()) == 0 {
		s.t.Fatalf("sync of the witness: %v", err)
	}
	reader, err := nftables.NewEngine(s.config, v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = reader.Close() }()
	found, err := reader.Verify(s.t.Context(), witness.Updates()[0])
	if err != nil || len(found.Differences) > 0 || found.Checked == 0 {
		s.t.Fatalf("the node says that it has Services %d and EndpointSlices %d, but its kernel, of %d objects: %v, %v", s.last[0], s.last[1], found.Checked, found.Differences, err)
	}
}

// checkSoon waits for the node to say it: until it does if nothing fails, and else for a while in
// which it must not say it without a reason.
func (s *sayer) checkSoon() {
	s.t.Helper()
	if s.fails.Load() == 0 {
		poll.Until(s.t, "the node says that it has everything", s.says)
	}
	for range 20 {
		if s.says() {
			s.check()
			return
		}
		<-time.After(time.Millisecond)
	}
}

// put creates, changes or deletes an object.
func (s *sayer) put(kind int, name string, o runtime.Object, remove bool) {
	s.t.Helper()
	before := s.api.Version()
	if remove {
		s.api.Delete(s.t, o)
		delete(s.objects, name)
	} else {
		s.api.Put(s.t, o)
		s.objects[name] = o
	}
	if now := s.api.Version(); now != before {
		s.last[kind] = now
	}
}

// A node that says a version has it in its kernel: through failures of the kernel, restarts, and an
// API server that is away or has lost its history.
func TestTheKernelHasWhatTheNodeSays(t *testing.T) {
	t.Parallel()
	const seed, rounds, steps, services = 22, 8, 12, 5
	random := rand.New(rand.NewPCG(seed, seed))
	s := &sayer{t: t, api: apitest.New(t, apitest.Options{}), config: nftables.Config{Config: proxiertest.NewTopology(t).Config()}, objects: map[string]runtime.Object{}}
	s.start()
	t.Cleanup(func() { s.end() })
	for round := range rounds {
		for range steps {
			n := strconv.Itoa(1 + random.IntN(services))
			switch random.IntN(10) {
			case 0:
				s.fails.Store(failsBefore)
			case 1:
				s.fails.Store(failsAfter)
			case 2:
				s.fails.Store(0)
			case 3, 4, 5:
				vip := "10.96.0." + n
				s.put(0, "service-"+n, proxiertest.Service("test", "s"+n, proxiertest.ClusterIPs(vip), proxiertest.Port("web", v1.ProtocolTCP, int32(80+random.IntN(2)))), random.IntN(3) == 0)
			default:
				options := []proxiertest.SliceOption{proxiertest.SlicePort("web", v1.ProtocolTCP, 8080)}
				for range random.IntN(4) {
					options = append(options, proxiertest.Endpoint("10.244.3."+strconv.Itoa(1+random.IntN(200))))
				}
				s.put(1, "slice-"+n, proxiertest.Slice("test", "s"+n, discovery.AddressTypeIPv4, options...), random.IntN(4) == 0)
			}
			s.checkSoon()
		}
		switch round % 4 {
		case 1:
			s.end()
			s.start()
		case 2:
			s.api.Compact()
		case 3:
			s.api.Stop()
			s.put(1, "slice-9", proxiertest.Slice("test", "s9", discovery.AddressTypeIPv4), false)
			s.api.Start(t)
		}
		s.fails.Store(0)
		poll.Until(t, "the node says that it has everything", s.says)
		s.check()
	}
	if s.checks < rounds {
		t.Errorf("%d checks, want %d at least", s.checks, rounds)
	}
	t.Logf("%d checks", s.checks)
}
