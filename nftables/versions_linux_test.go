package nftables_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/informer"
	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/proxiertest/history"
	"github.com/serviceplane/serviceplane/runner"
)

// What goes wrong in an Apply: the kernel has not changed, or it has, as if the answer was lost.
const (
	failsBefore = 1 + iota
	failsAfter
)

// kernel is what stands between the processes of a node and its kernel.
type kernel struct {
	mu      sync.Mutex // guards all below; no Apply runs under it
	fails   int
	refused map[changetracker.ServicePortName]bool
	// has is what the kernel was given, whatever the process was told; nil if that is unknown.
	has     map[changetracker.ServicePortName]*desired.Service
	globals desired.Globals
}

// flaky fails Applies, or service ports of them, which stay as they are.
type flaky struct {
	proxier.Engine

	kernel *kernel
}

func (e flaky) Apply(ctx context.Context, u desired.Update) (r proxier.Result, err error) {
	k := e.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.fails == failsBefore {
		return r, errors.New("no memory")
	}
	var failed []*proxier.ServiceError
	u.Changes, failed = k.withoutRefused(&u)
	if r, err = e.Engine.Apply(ctx, u); err != nil || len(r.Failed) > 0 {
		k.has = nil
		return r, err
	}
	k.take(&u)
	if k.fails == failsAfter {
		return proxier.Result{}, errors.New("no answer")
	}
	r.Failed = failed
	return r, nil
}

// withoutRefused returns the changes of an Update without service ports that are refused.
func (k *kernel) withoutRefused(u *desired.Update) (changes []desired.Change, failed []*proxier.ServiceError) {
	for _, c := range u.Changes {
		if k.refused[c.Name] && c.After != nil {
			failed = append(failed, &proxier.ServiceError{Name: c.Name, Err: errors.New("no room")})
			if c.After = k.has[c.Name]; !u.Full || c.After == nil {
				continue
			}
		}
		changes = append(changes, c)
	}
	return changes, failed
}

func (k *kernel) take(u *desired.Update) {
	if u.Full {
		k.has = map[changetracker.ServicePortName]*desired.Service{}
	}
	if k.has == nil {
		return
	}
	k.globals = u.Globals
	for _, c := range u.Changes {
		if k.has[c.Name] = c.After; c.After == nil {
			delete(k.has, c.Name)
		}
	}
}

// fail sets how all Applies fail.
func (k *kernel) fail(how int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.fails = how
}

// refuse refuses a service port from now on, or none any more for the zero name.
func (k *kernel) refuse(name changetracker.ServicePortName) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if name.Name == "" {
		clear(k.refused)
		return
	}
	k.refused[name] = true
}

// troubled reports whether something fails.
func (k *kernel) troubled() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.fails != 0 || len(k.refused) > 0
}

// sayer is a node that follows an API server with the nftables engine.
type sayer struct {
	t       *testing.T
	random  *rand.Rand
	api     *apitest.Server
	config  nftables.Config
	kernel  *kernel
	proxier *proxier.Proxier
	end     func()

	objects map[string]runtime.Object
	was     map[string][]valueAt // by object, oldest first
	last    [2]uint64            // version of the last change of Services and of EndpointSlices
	// checks counts the comparisons: with everything that the API server has, with an older version
	// that the node says, and those with service ports that failed.
	checks, older, failing int
}

// valueAt is what an object was from a version on; empty if there was none.
type valueAt struct {
	version uint64
	value   string
}

// may reports whether the kernel of a node that says a version may have this value: that of the
// version, or a later one.
func (s *sayer) may(object string, says uint64, value string) bool {
	allowed := []string{""}
	for _, v := range s.was[object] {
		if v.version <= says {
			allowed = allowed[:0]
		}
		allowed = append(allowed, v.value)
	}
	return slices.Contains(allowed, value)
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
	if s.proxier, err = proxier.New(config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: flaky{engine, s.kernel}}); err != nil {
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
	report := programmed.NewReport("", s.proxier, time.Time{})
	f := report.Families[v1.IPv4Protocol]
	return len(f.Failed) == 0 && report.Missing(programmed.ServiceChange{Versions: changetracker.Versions{
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
	s.expect(witness.Updates()[0])
}

// expect compares the kernel with a full Update.
func (s *sayer) expect(want desired.Update) {
	s.t.Helper()
	reader, err := nftables.NewEngine(s.config, v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = reader.Close() }()
	found, err := reader.Abilities().Verify(s.t.Context(), want)
	if err != nil || len(found.Differences) > 0 || found.Checked == 0 {
		s.t.Fatalf("of Services %d and EndpointSlices %d, the kernel, of %d objects: %v, %v", s.last[0], s.last[1], found.Checked, found.Differences, err)
	}
}

// checkWhatItSays compares the kernel with whatever the node says now, which may be an older
// version, and have service ports that failed. No Apply runs meanwhile.
func (s *sayer) checkWhatItSays() {
	s.t.Helper()
	k := s.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	status := s.proxier.Status().Families[v1.IPv4Protocol]
	ofServices, err1 := strconv.ParseUint(status.Versions.Services, 10, 64)
	ofSlices, err2 := strconv.ParseUint(status.Versions.EndpointSlices, 10, 64)
	if errors.Join(err1, err2) != nil || k.has == nil {
		return
	}
	full := desired.Update{Family: v1.IPv4Protocol, Full: true, Globals: k.globals}
	for name, service := range k.has {
		full.Changes = append(full.Changes, desired.Change{Name: name, After: service})
	}
	s.expect(full)
	if ofServices < s.last[0] || ofSlices < s.last[1] {
		s.older++
	}
	for i := range sayerServices {
		n := strconv.Itoa(1 + i)
		if slices.ContainsFunc(status.Failed, func(e *proxier.ServiceError) bool { return e.Name == sayerPort(n) }) {
			s.failing++
			continue
		}
		service, endpoints := valuesOf(k.has[sayerPort(n)])
		if !s.may("service-"+n, ofServices, service) || service != "" && !s.may("slice-"+n, ofSlices, endpoints) {
			s.t.Fatalf("the node says that it has Services %d and EndpointSlices %d, but its kernel has s%s as %q with endpoints %q: the Service was %v, its slice %v",
				ofServices, ofSlices, n, service, endpoints, s.was["service-"+n], s.was["slice-"+n])
		}
	}
}

// valuesOf returns a service port as valueAt has it.
func valuesOf(s *desired.Service) (service, endpoints string) {
	if s == nil {
		return "", ""
	}
	var all []string
	for _, e := range s.Cluster.Slice() {
		all = append(all, e.Addr().String())
	}
	return fmt.Sprintf("%s:%d", s.Frontends[0].VIP, s.Frontends[0].Port), listOf(all)
}

// listOf is a set of addresses as valueAt has it.
func listOf(addresses []string) string {
	slices.Sort(addresses)
	return strings.Join(slices.Compact(addresses), " ")
}

const sayerServices = 5

func sayerPort(n string) changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "test", Name: "s" + n}, Port: "web", Protocol: v1.ProtocolTCP}
}

// checkSoon waits for the node to say it: until it does if nothing fails, and else for a while in
// which it must not say it without a reason.
func (s *sayer) checkSoon() {
	s.t.Helper()
	s.checkWhatItSays()
	if s.random.IntN(2) == 0 {
		return // so that versions come faster than Applies
	}
	if !s.kernel.troubled() {
		poll.Until(s.t, "the node says that it has everything", s.says)
	}
	for range 20 {
		if s.says() {
			s.check()
			return
		}
		s.checkWhatItSays()
		<-time.After(time.Millisecond)
	}
}

// put creates, changes or deletes an object.
func (s *sayer) put(kind int, name string, o runtime.Object, value string, remove bool) {
	s.t.Helper()
	before := s.api.Version()
	if remove {
		s.api.Delete(s.t, o)
		delete(s.objects, name)
		value = ""
	} else {
		s.api.Put(s.t, o)
		s.objects[name] = o
	}
	if now := s.api.Version(); now != before {
		s.last[kind] = now
		s.was[name] = append(s.was[name], valueAt{now, value})
	}
}

// step changes an object, or what fails.
func (s *sayer) step() {
	s.t.Helper()
	n := strconv.Itoa(1 + s.random.IntN(sayerServices))
	switch s.random.IntN(12) {
	case 0:
		s.kernel.fail(failsBefore)
	case 1:
		s.kernel.fail(failsAfter)
	case 3, 4:
		s.works()
	case 2:
		s.kernel.refuse(sayerPort(n)) // and a change of it
		fallthrough
	case 5, 6, 7:
		vip, port := "10.96.0."+n, int32(80+s.random.IntN(2))
		s.put(0, "service-"+n, proxiertest.Service("test", "s"+n, proxiertest.ClusterIPs(vip), proxiertest.Port("web", v1.ProtocolTCP, port)),
			fmt.Sprintf("%s:%d", vip, port), s.random.IntN(3) == 0)
	default:
		options := []proxiertest.SliceOption{proxiertest.SlicePort("web", v1.ProtocolTCP, 8080)}
		var endpoints []string
		for range s.random.IntN(4) {
			endpoints = append(endpoints, "10.244.3."+strconv.Itoa(1+s.random.IntN(200)))
			options = append(options, proxiertest.Endpoint(endpoints[len(endpoints)-1]))
		}
		s.put(1, "slice-"+n, proxiertest.Slice("test", "s"+n, discovery.AddressTypeIPv4, options...), listOf(endpoints), s.random.IntN(4) == 0)
	}
}

// works ends all failures.
func (s *sayer) works() {
	s.kernel.fail(0)
	s.kernel.refuse(changetracker.ServicePortName{})
}

// A node that says a version has it in its kernel: through failures of the kernel and of single
// service ports, restarts, and an API server that is away or has lost its history.
func TestTheKernelHasWhatTheNodeSays(t *testing.T) {
	t.Parallel()
	first, count := history.Seeds(t, 3)
	for seed := first; seed < first+uint64(count) && !t.Failed(); seed++ {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) { kernelHasWhatTheNodeSays(t, seed) })
	}
}

func kernelHasWhatTheNodeSays(t *testing.T, seed uint64) {
	t.Helper()
	const rounds, steps = 8, 12
	s := &sayer{
		t: t, random: rand.New(rand.NewPCG(seed, 22)), api: apitest.New(t, apitest.Options{}), config: nftables.Config{Config: proxiertest.NewTopology(t).Config()},
		kernel: &kernel{refused: map[changetracker.ServicePortName]bool{}}, objects: map[string]runtime.Object{}, was: map[string][]valueAt{},
	}
	s.start()
	t.Cleanup(func() { s.end() })
	for round := range rounds {
		for range steps {
			s.step()
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
			s.put(1, "slice-9", proxiertest.Slice("test", "s9", discovery.AddressTypeIPv4), "", false)
			s.api.Start(t)
		}
		s.works()
		poll.Until(t, "the node says that it has everything", s.says)
		s.check()
	}
	t.Logf("%d checks, %d of older versions, %d service ports that failed", s.checks, s.older, s.failing)
	if s.checks < rounds || s.older == 0 {
		t.Errorf("%d checks and %d of older versions, want %d at least and some", s.checks, s.older, rounds)
	}
}
