package ipvs

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// node is a node in memory. It outlives the engines on it.
type node struct {
	kernel *fakeKernel
	device *fakeDevice
	rules  *fakeRules
	// events are the writes to all three, in order, after record.
	events []string
}

// fakeDevice is the dummy device, and the addresses of the other links.
type fakeDevice struct {
	exists        bool
	here          map[netip.Addr]bool
	elsewhere     []netip.Addr
	calls, writes int
	// failAfter makes the call fail that follows so many others; below 0 none fails.
	failAfter int
	onWrite   func(event string)
}

const deviceLink, otherLink = 7, 2

func (d *fakeDevice) call(effect func()) error {
	d.calls++
	d.failAfter--
	if d.failAfter == -1 {
		return errFault
	}
	effect()
	return nil
}

func (d *fakeDevice) write(verb string, addrs []netip.Addr) {
	d.writes += len(addrs)
	for _, a := range addrs {
		if d.onWrite != nil {
			d.onWrite(fmt.Sprintf("%s address %v", verb, a))
		}
	}
}

func (d *fakeDevice) ensure() error { return d.call(func() { d.exists = true }) }
func (d *fakeDevice) find() error   { return d.call(func() {}) }
func (d *fakeDevice) close()        {}

func (d *fakeDevice) isOn(link int) bool { return link == deviceLink }

func (d *fakeDevice) addresses() (here map[netip.Addr]bool, elsewhere []netip.Addr, err error) {
	err = d.call(func() { here, elsewhere = maps.Clone(d.here), slices.Clone(d.elsewhere) })
	return here, elsewhere, err
}

func (d *fakeDevice) add(addrs []netip.Addr) error {
	if len(addrs) == 0 {
		return nil
	}
	return d.call(func() {
		d.write("add", addrs)
		for _, a := range addrs {
			d.here[a] = true
		}
	})
}

func (d *fakeDevice) remove(addrs []netip.Addr) error {
	if len(addrs) == 0 {
		return nil
	}
	return d.call(func() {
		d.write("remove", addrs)
		for _, a := range addrs {
			delete(d.here, a)
		}
	})
}

func (d *fakeDevice) delete() error {
	return d.call(func() { d.exists, d.here = false, map[netip.Addr]bool{} })
}

// fakeRules are the rules in front of IPVS, in memory.
type fakeRules struct {
	services map[changetracker.ServicePortName]*desired.Service
	behind   nftables.Behind
	updates  int
	cleanups int
	err      error // of every call, if set
	late     bool  // the call has had its effect, and only the response is lost
	onWrite  func(event string)
	watch    func(ctx context.Context) error
}

// guardedRules are the rules as one engine may use them: with its lock, because the real ones have
// one socket; and with a full update first, and after a failure. A breach ends the test.
type guardedRules struct {
	rules

	engine  *engine
	trusted bool
}

func (r *guardedRules) mustBeLocked() {
	if r.engine.mu.TryLock() {
		panic("the rules are used without the lock of their engine")
	}
}

func (r *guardedRules) Apply(ctx context.Context, update desired.Update, behind nftables.Behind) (proxier.Result, error) {
	r.mustBeLocked()
	if !update.Full && !r.trusted {
		panic("the rules get a partial update where they need a full one")
	}
	result, err := r.rules.Apply(ctx, update, behind)
	r.trusted = err == nil
	return result, err
}

func (r *guardedRules) Cleanup(ctx context.Context) error {
	r.mustBeLocked()
	r.trusted = false
	return r.rules.Cleanup(ctx)
}

func (r *guardedRules) Frontends(ctx context.Context) (map[desired.Key]bool, error) {
	r.mustBeLocked()
	return r.rules.Frontends(ctx)
}

func (r *guardedRules) Dump(ctx context.Context, w io.Writer) error {
	r.mustBeLocked()
	return r.rules.Dump(ctx, w)
}

func (r *guardedRules) Verify(ctx context.Context, update desired.Update, behind nftables.Behind) (proxier.Verification, error) {
	r.mustBeLocked()
	return r.rules.Verify(ctx, update, behind)
}

func (r *guardedRules) Close() error {
	r.mustBeLocked()
	r.trusted = false
	return r.rules.Close()
}

func (r *fakeRules) Apply(_ context.Context, update desired.Update, behind nftables.Behind) (proxier.Result, error) {
	r.updates++
	if r.err != nil && !r.late {
		return proxier.Result{}, r.err
	}
	if r.onWrite != nil {
		r.onWrite("rules")
	}
	if update.Full {
		r.services = map[changetracker.ServicePortName]*desired.Service{}
	}
	for s := range update.Services() {
		r.services[s.Name] = s
	}
	for name := range update.Removed() {
		delete(r.services, name)
	}
	r.behind = behind
	return proxier.Result{Report: proxier.ApplyReport{Writes: 1000, Transactions: 1}}, r.err
}

func (r *fakeRules) Cleanup(context.Context) error {
	r.cleanups++
	r.services, r.behind.Refused = map[changetracker.ServicePortName]*desired.Service{}, nil
	return r.err
}

func (r *fakeRules) Frontends(context.Context) (map[desired.Key]bool, error) {
	open := map[desired.Key]bool{}
	for key := range r.behind.Refused {
		open[key] = false
	}
	for _, s := range r.services {
		for i := range s.Frontends {
			f := &s.Frontends[i]
			open[s.Key(f)] = f.Action == desired.Forward && !f.Restricted && !f.ShortCircuit
		}
	}
	return open, r.err
}

func (r *fakeRules) Watch(ctx context.Context, _ func(proxier.Damage)) error {
	if r.watch != nil {
		return r.watch(ctx)
	}
	<-ctx.Done()
	return nil
}

func (r *fakeRules) Dump(_ context.Context, w io.Writer) error {
	_, err := io.WriteString(w, "the rules\n")
	return err
}

func (r *fakeRules) Plan(desired.Update, func(netip.Addr) bool) (string, error) {
	return "the rules\n", nil
}

// Verify finds that the rules hold what they should, beside one object.
func (r *fakeRules) Verify(_ context.Context, update desired.Update, behind nftables.Behind) (proxier.Verification, error) {
	for s := range update.Services() {
		if _, there := r.services[s.Name]; !there || len(behind.Refused) != len(r.behind.Refused) {
			return proxier.Verification{Differences: []proxier.Difference{{Object: "rules", Problem: proxier.DifferenceChanged, Service: s.Name}}}, r.err
		}
	}
	return proxier.Verification{Checked: 1}, r.err
}

func (r *fakeRules) Close() error { return nil }

// closes reports whether the rules refuse other ports of a VIP.
func (r *fakeRules) closes(vip string) bool {
	keys, _ := r.Frontends(context.Background())
	addr := netip.MustParseAddr(vip)
	for k := range keys {
		if k.VIP == addr {
			return r.behind.Holds(addr)
		}
	}
	return false
}

// nodeAddr is the node's own address.
const nodeAddr = "192.0.2.250"

func newFakeNode() *node {
	n := &node{
		kernel: newFakeKernel(),
		device: &fakeDevice{
			here: map[netip.Addr]bool{}, failAfter: -1,
			elsewhere: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr(nodeAddr)},
		},
		rules: &fakeRules{services: map[changetracker.ServicePortName]*desired.Service{}},
	}
	return n
}

// record records all writes from now on.
func (n *node) record() {
	n.events = nil
	onWrite := func(event string) { n.events = append(n.events, event) }
	n.rules.onWrite, n.device.onWrite = onWrite, onWrite
	n.kernel.onWrite = func(verb string, key serverKey, real netip.AddrPort, weight int) {
		switch verb {
		case "put real":
			onWrite(fmt.Sprintf("put real %v -> %v weight %d", key, real, weight))
		case "delete real":
			onWrite(fmt.Sprintf("delete real %v -> %v", key, real))
		default:
			onWrite(fmt.Sprintf("%s %v", verb, key))
		}
	}
}

// engine creates an engine on the node, as a new process does.
func (n *node) engine(tb testing.TB, change ...func(*Config)) *engine {
	tb.Helper()
	var config Config
	for _, c := range change {
		c(&config)
	}
	e, err := newEngine(config, v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		tb.Fatal(err)
	}
	e.rules = &guardedRules{rules: n.rules, engine: e}
	e.system = system{
		kernel:         func() (kernel, error) { return n.kernel, nil },
		device:         func() (vipDevice, error) { return n.device, nil },
		loaded:         func() (bool, error) { return true, nil },
		left:           func() (*left, error) { return nil, nil },
		check:          func(func(string)) error { return nil },
		waitForPackets: func() { n.events = append(n.events, "waitForPackets") },
	}
	return e
}

func mustApply(tb testing.TB, e *engine, u desired.Update) {
	tb.Helper()
	if _, err := e.Apply(tb.Context(), u); err != nil {
		tb.Fatalf("Apply: %v", err)
	}
}

func full(services ...*desired.Service) desired.Update {
	u := partial(services...)
	u.Full = true
	return u
}

func partial(services ...*desired.Service) desired.Update {
	return desired.Update{
		Family: v1.IPv4Protocol, Changes: desired.ChangesTo(services...),
		Globals: desired.Globals{NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}},
	}
}

func removal(names ...string) desired.Update {
	u := partial()
	for _, name := range names {
		u.Changes = append(u.Changes, desired.Change{Name: portName(name)})
	}
	return u
}

func portName(name string) changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "default", Name: name}, Protocol: v1.ProtocolTCP}
}

// service is a service port of TCP with a ClusterIP, port 80, and endpoints.
func service(name, vip string, endpoints ...string) *desired.Service {
	s := &desired.Service{Name: portName(name), Protocol: desired.TCP}
	for _, text := range endpoints {
		s.Cluster = s.Cluster.With(netip.MustParseAddrPort(text))
	}
	s.Serving = s.Cluster
	return withFrontend(s, desired.ClusterIP, vip, 80)
}

// withFrontend adds a frontend; VIP "" means the node's addresses.
func withFrontend(s *desired.Service, kind desired.Kind, vip string, port uint16) *desired.Service {
	f := desired.Frontend{Kind: kind, Port: port, Scope: desired.ScopeCluster, Action: desired.Forward}
	if s.Cluster.Len() == 0 {
		f.Action = desired.Reject
	}
	if vip != "" {
		f.VIP = netip.MustParseAddr(vip)
	}
	c := *s
	c.Frontends = append(slices.Clone(s.Frontends), f)
	return &c
}

// deleteDrainedAfter makes the engine delete drained real servers after some time.
func deleteDrainedAfter(e *engine, d time.Duration) error {
	now := time.Now().Add(d)
	e.table.now = func() time.Time { return now }
	return e.deleteDrained(context.Background())
}
