package flows_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/flows"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	historyServices = 5
	nodeAddr        = "192.0.2.1"
	otherNode       = "192.0.2.2"
	loopback        = "127.0.0.5" // not on an interface by itself
	friend          = "198.51.100.101"
	stranger        = "198.51.100.102"
)

// history is a Provider with random Services, and a table of the flows that clients have
// opened.
type history struct {
	t      *testing.T
	rand   *rand.Rand
	p      *proxier.Proxier
	engine *loopbackEngine

	model  map[int]*modelled
	flows  map[flows.Flow]bool
	broken bool // Clean fails
	checks int
}

// loopbackEngine accepts node ports on 127.0.0.0/8.
type loopbackEngine struct{ proxiertest.RecordingEngine }

func (*loopbackEngine) Traits(*desired.Service) desired.Traits {
	return desired.Traits{LoopbackNodePorts: true}
}

// modelled is a Service: its frontends and its pods.
type modelled struct {
	external bool
	guarded  bool                               // its source ranges allow the friend only
	pods     map[int]proxiertest.EndpointOption // nil is ready
}

func startHistory(t *testing.T, seed uint64) *history {
	t.Helper()
	h := &history{t: t, rand: rand.New(rand.NewPCG(seed, 0)), model: map[int]*modelled{}, flows: map[flows.Flow]bool{}}
	h.start()
	return h
}

// start creates a new Provider, as after a restart.
func (h *history) start() {
	h.engine = &loopbackEngine{}
	// Only the test causes syncs and retries: time passes only while it waits for a sync.
	never := runner.Backoff{Initial: time.Hour, Max: time.Hour}
	p, err := proxier.New(proxier.Config{
		Families: []v1.IPFamily{v1.IPv4Protocol},
		Runner:   runner.Options{MinInterval: time.Second, Burst: 1, Retry: never},
	}, proxier.Deps{Conntrack: h.conntrack()}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: h.engine})
	if err != nil {
		h.t.Fatal(err)
	}
	h.p = p
	p.OnServiceCIDRsChanged([]netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")})
	for n := range h.model {
		h.update(n, nil)
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
}

func (h *history) conntrack() *proxier.Conntrack {
	return &proxier.Conntrack{Tracks: func(p desired.Protocol) bool { return p == desired.UDP }, Clean: h.Clean}
}

// Clean is for proxier.Conntrack on the table of the history.
func (h *history) Clean(_ context.Context, _ v1.IPFamily, check desired.FlowCheck) (deleted int, err error) {
	h.checks++
	judge := flows.NewJudge(check, []netip.Addr{netip.MustParseAddr(nodeAddr), netip.MustParseAddr("127.0.0.1")})
	for f := range h.flows {
		if f.Protocol != desired.UDP || !judge.Stale(f) {
			continue
		}
		if h.broken && h.rand.IntN(2) == 0 {
			return deleted, errors.New("broken")
		}
		if h.valid(f) {
			h.t.Errorf("valid flow %+v deleted", f)
		}
		delete(h.flows, f)
		deleted++
	}
	if h.broken {
		return deleted, errors.New("broken")
	}
	return deleted, nil
}

func vip(n int) netip.Addr      { return netip.AddrFrom4([4]byte{10, 96, 0, byte(n)}) }
func external(n int) netip.Addr { return netip.AddrFrom4([4]byte{198, 51, 100, byte(n)}) }
func balancer(n int) netip.Addr { return netip.AddrFrom4([4]byte{203, 0, 113, byte(n)}) }
func pod(n int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, byte(n)}), 5353)
}

// frontends returns the addresses that clients may dial.
func (m *modelled) frontends(n int) []netip.AddrPort {
	all := []netip.AddrPort{netip.AddrPortFrom(vip(n), 53)}
	if m.external {
		all = append(all, netip.AddrPortFrom(external(n), 53), netip.AddrPortFrom(balancer(n), 53))
		for _, addr := range []string{nodeAddr, loopback} {
			all = append(all, netip.AddrPortFrom(netip.MustParseAddr(addr), 30000+uint16(n)))
		}
	}
	return all
}

func (m *modelled) serves(server netip.AddrPort) bool {
	for n, condition := range m.pods {
		if pod(n) == server {
			return condition == nil || !isNotServing(condition)
		}
	}
	return false
}

func (m *modelled) anyServes() bool {
	for n := range m.pods {
		if m.serves(pod(n)) {
			return true
		}
	}
	return false
}

func isNotServing(option proxiertest.EndpointOption) bool {
	var e discovery.Endpoint
	option(&e)
	return e.Conditions.Serving != nil && !*e.Conditions.Serving
}

// valid decides by the model alone whether a flow may exist.
func (h *history) valid(f flows.Flow) bool {
	translated := f.Dialled != f.Server
	for n, m := range h.model {
		if !slices.Contains(m.frontends(n), f.Dialled) {
			continue
		}
		if refused := m.guarded && f.Dialled.Addr() == balancer(n) && f.Client.Addr().String() != friend; refused && !f.Answered {
			return false
		}
		if m.anyServes() {
			return m.serves(f.Server)
		}
		return !translated && f.Answered
	}
	return !translated || !couldBeOurs(f.Dialled)
}

// couldBeOurs reports whether an address may have been a frontend of any Service.
func couldBeOurs(dialled netip.AddrPort) bool {
	for n := range historyServices {
		if slices.Contains((&modelled{external: true}).frontends(n), dialled) {
			return true
		}
	}
	return false
}

// change makes a random change of one Service.
func (h *history) change() {
	n := h.rand.IntN(historyServices)
	before := h.object(n)
	m := h.model[n]
	switch {
	case m == nil:
		h.model[n] = &modelled{external: h.rand.IntN(2) == 0, pods: h.randomPods()}
	case h.rand.IntN(4) == 0:
		delete(h.model, n)
	case h.rand.IntN(4) == 0:
		m.external = !m.external
	case h.rand.IntN(4) == 0:
		m.guarded = !m.guarded
	default:
		m.pods = h.randomPods()
	}
	h.update(n, before)
}

func (h *history) randomPods() map[int]proxiertest.EndpointOption {
	pods := map[int]proxiertest.EndpointOption{}
	for range h.rand.IntN(4) {
		pods[h.rand.IntN(6)] = []proxiertest.EndpointOption{nil, proxiertest.Terminating(), proxiertest.NotServing()}[h.rand.IntN(3)]
	}
	return pods
}

func (h *history) object(n int) *v1.Service {
	m := h.model[n]
	if m == nil {
		return nil
	}
	options := []proxiertest.ServiceOption{proxiertest.ClusterIPs(vip(n).String())}
	if m.external {
		options = append(options, proxiertest.NodePort("dns", v1.ProtocolUDP, 53, 30000+int32(n)), proxiertest.ExternalIPs(external(n).String()),
			proxiertest.LoadBalancer(balancer(n).String()))
		if m.guarded {
			options = append(options, proxiertest.SourceRanges(friend+"/32"))
		}
	} else {
		options = append(options, proxiertest.Port("dns", v1.ProtocolUDP, 53))
	}
	return proxiertest.Service("test", fmt.Sprintf("dns-%d", n), append(options, proxiertest.Port("tcp", v1.ProtocolTCP, 53))...)
}

// update passes a Service and its endpoints to the Provider.
func (h *history) update(n int, before *v1.Service) {
	after := h.object(n)
	// Without the event handlers, so that only the test decides when to sync.
	h.p.Tracker().Services.Update(before, after)
	options := []proxiertest.SliceOption{proxiertest.SlicePort("dns", v1.ProtocolUDP, 5353), proxiertest.SlicePort("tcp", v1.ProtocolTCP, 5353)}
	if m := h.model[n]; m != nil {
		for i, condition := range m.pods {
			more := []proxiertest.EndpointOption{}
			if condition != nil {
				more = append(more, condition)
			}
			options = append(options, proxiertest.Endpoint(pod(i).Addr().String(), more...))
		}
	}
	slice := proxiertest.Slice("test", fmt.Sprintf("dns-%d", n), discovery.AddressTypeIPv4, options...)
	h.p.Tracker().Endpoints.EndpointSliceUpdate(slice, false)
}

// traffic opens flows through Services, and flows that have nothing to do with them.
func (h *history) traffic() {
	for n, m := range h.model {
		for _, dialled := range m.frontends(n) {
			for i := range m.pods {
				if m.serves(pod(i)) && h.rand.IntN(2) == 0 {
					h.open(flows.Flow{Protocol: desired.UDP, Dialled: dialled, Server: pod(i)})
				}
			}
		}
	}
	for n := range historyServices {
		if m := h.model[n]; m != nil {
			continue
		}
		for _, dialled := range (&modelled{external: true}).frontends(n) { // nobody translates it
			h.open(flows.Flow{Protocol: desired.UDP, Dialled: dialled, Server: dialled})
		}
	}
	n := h.rand.IntN(historyServices)
	elsewhere := netip.AddrPortFrom(netip.MustParseAddr(otherNode), 30000+uint16(n))
	for _, f := range []flows.Flow{
		{Protocol: desired.UDP, Dialled: elsewhere, Server: elsewhere},
		{Protocol: desired.UDP, Dialled: elsewhere, Server: pod(n)},
		{Protocol: desired.UDP, Dialled: netip.AddrPortFrom(vip(n), 54), Server: netip.AddrPortFrom(vip(n), 54)},
		{Protocol: desired.TCP, Dialled: netip.AddrPortFrom(vip(n), 53), Server: pod(40)},
	} {
		h.open(f)
	}
}

// open adds a flow of a random client, answered or not.
func (h *history) open(f flows.Flow) {
	f.Client = netip.AddrPortFrom(netip.MustParseAddr([]string{friend, stranger}[h.rand.IntN(2)]), 1024)
	f.Answered = h.rand.IntN(2) == 0
	if h.valid(f) || f.Protocol != desired.UDP { // the first packet of a stranger is dropped
		h.flows[f] = true
	}
}

// syncUntilRight syncs until a sync succeeds, and checks that no flow is stale.
func (h *history) syncUntilRight(ctx context.Context, step int) {
	for attempt := 0; ; attempt++ {
		engineFails := step >= 0 && attempt < 3 && h.rand.IntN(6) == 0
		h.broken = step >= 0 && attempt < 3 && h.rand.IntN(4) == 0
		h.engine.Fail(nil)
		if engineFails {
			h.engine.Fail(errors.New("engine broken"))
		}
		err := h.p.Sync(ctx)
		conditions := h.p.Status().Conditions // one if the flows could not be deleted
		if err == nil && len(conditions) == 0 {
			break
		} else if attempt > 5 {
			h.t.Fatalf("step %d: %v, %v", step, err, conditions)
		}
		if h.rand.IntN(2) == 0 {
			h.change() // between a failure and the retry
		}
	}
	for f := range h.flows {
		if f.Protocol == desired.UDP && !h.valid(f) {
			h.t.Errorf("step %d: stale flow %+v is left", step, f)
		}
	}
}

// In random histories of Services, failures and restarts, no stale flow stays and no valid flow is deleted
// (CT-03…08, without W-23, W-24 and W-25).
func TestNoFlowIsStaleAndNoValidOneDeleted(t *testing.T) {
	t.Parallel()
	for i := range 60 {
		seed := uint64(time.Now().UnixNano()) + uint64(i)
		synctest.Test(t, func(t *testing.T) { startHistory(t, seed).run() })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func (h *history) run() {
	for restarts := range 3 {
		ctx, stop := context.WithCancel(h.t.Context())
		done := make(chan error, 1)
		go func() { done <- h.p.Run(ctx) }()
		synctest.Wait() // the first sync needs no request
		h.syncUntilRight(ctx, -1)
		for step := range 25 {
			for range 1 + h.rand.IntN(3) {
				h.change()
			}
			h.syncUntilRight(ctx, step)
			h.traffic()
		}
		before := h.checks
		if err := h.p.Sync(ctx); err != nil || h.checks != before {
			h.t.Errorf("a sync without change: %v, %d checks of flows, want none", err, h.checks-before)
		}
		stop()
		if err := <-done; err != nil {
			h.t.Errorf("Run: %v", err)
		}
		if restarts == 1 {
			h.changeWhileStopped()
		}
		h.start()
	}
}

// changeWhileStopped changes Services while no Provider runs. If it deletes one, the next
// Provider can only recognize its cluster IP, by the Service CIDR.
func (h *history) changeWhileStopped() {
	for n := range historyServices {
		m := h.model[n]
		switch {
		case m == nil:
		case h.rand.IntN(2) == 0:
			m.pods = h.randomPods()
		case h.rand.IntN(2) == 0:
			delete(h.model, n)
			for f := range h.flows {
				if slices.Contains(m.frontends(n)[1:], f.Dialled) {
					delete(h.flows, f)
				}
			}
		}
	}
}
