package nftables

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// provider starts a Provider in a namespace. It ends with the test.
func provider(t *testing.T, ns *netns.NS, change ...func(*Config)) *proxier.Proxier {
	t.Helper()
	config := Config{Config: proxier.Config{NetNS: ns.Path(), Runner: runner.Options{MinInterval: runner.Unlimited}}}
	for _, c := range change {
		c(&config)
	}
	p, err := New(config, proxier.Deps{})
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return p
}

// TestBadObjectsHoldUpNoGoodOne gives the Provider 10,000 good Services and ten bad ones.
// One sync programs all good ones, and Status names each bad one.
func TestBadObjectsHoldUpNoGoodOne(t *testing.T) {
	const good = 10000
	ns := netnstest.New(t)
	p := provider(t, ns)
	c := newCluster(good, 1)
	for i := range c.services {
		p.OnServiceAdd(c.services[i])
		p.OnEndpointSliceAdd(c.slices[i])
	}
	type bad struct {
		change func(*v1.Service, *discovery.EndpointSlice)
		reason changetracker.Reason
		object string
	}
	bads := map[string]bad{
		"malformed ClusterIP":  {func(s *v1.Service, _ *discovery.EndpointSlice) { s.Spec.ClusterIP = "10.0.0.256" }, changetracker.ReasonInvalidAddress, "Service"},
		"no ports":             {func(s *v1.Service, _ *discovery.EndpointSlice) { s.Spec.Ports = nil }, changetracker.ReasonNoPorts, "Service"},
		"port 0":               {func(s *v1.Service, _ *discovery.EndpointSlice) { s.Spec.Ports[0].Port = 0 }, changetracker.ReasonInvalidPort, "Service"},
		"unknown protocol":     {func(s *v1.Service, _ *discovery.EndpointSlice) { s.Spec.Ports[0].Protocol = "QUIC" }, changetracker.ReasonInvalidProtocol, "Service"},
		"malformed externalIP": {func(s *v1.Service, _ *discovery.EndpointSlice) { s.Spec.ExternalIPs = []string{"nonsense"} }, changetracker.ReasonInvalidAddress, "Service"},
		"malformed source range": {func(s *v1.Service, _ *discovery.EndpointSlice) {
			s.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/33"}
		}, changetracker.ReasonInvalidCIDR, "Service"},
		"malformed endpoint": {func(_ *v1.Service, e *discovery.EndpointSlice) { e.Endpoints[0].Addresses = []string{"<nil>"} }, changetracker.ReasonInvalidAddress, "EndpointSlice"},
		"endpoint of the other family": {func(_ *v1.Service, e *discovery.EndpointSlice) {
			e.Endpoints[0].Addresses = []string{"fd00::1"}
		}, changetracker.ReasonWrongFamily, "EndpointSlice"},
		"endpoint without address": {func(_ *v1.Service, e *discovery.EndpointSlice) { e.Endpoints[0].Addresses = nil }, changetracker.ReasonMissing, "EndpointSlice"},
		"slice with a nil port":    {func(_ *v1.Service, e *discovery.EndpointSlice) { e.Ports[0].Port = nil }, changetracker.ReasonMissing, "EndpointSlice"},
	}
	extra := newCluster(good+len(bads), 1)
	n := good
	for name, b := range bads {
		service, slice := extra.services[n], extra.slices[n]
		service.Name = "bad-" + strings.ReplaceAll(strings.ToLower(name), " ", "-")
		slice.Name, slice.Labels[discovery.LabelServiceName] = service.Name, service.Name
		b.change(service, slice)
		p.OnServiceAdd(service)
		p.OnEndpointSliceAdd(slice)
		n++
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	if err := proxiertest.Sync(t.Context(), p); err != nil {
		t.Fatalf("sync: %v", err)
	}

	status := p.Status()
	for name, b := range bads {
		object := b.object + " bench/bad-" + strings.ReplaceAll(strings.ToLower(name), " ", "-")
		found := slices.ContainsFunc(status.Problems, func(p changetracker.Problem) bool {
			return p.Object == object && p.Reason == b.reason
		})
		if !found {
			t.Errorf("%s: no problem %q of %s in Status", name, b.reason, object)
		}
	}
	if len(status.Problems) != len(bads) {
		t.Errorf("%d problems, want %d: %+v", len(status.Problems), len(bads), status.Problems)
	}
	w := &world{family: v1.IPv4Protocol}
	e := w.engine(t, ns)
	if err := e.connect(); err != nil {
		t.Fatal(err)
	}
	o, err := e.observe(t.Context())
	if err == nil {
		err = e.observeElements(t.Context(), o)
	}
	if err != nil {
		t.Fatalf("observe: %v", err)
	}
	if got := len(o.element[setEndpoints]); got < good {
		t.Errorf("%d endpoints in the kernel after one sync, want at least %d", got, good)
	}
	for i := range c.services {
		vip := elementBytes{}.addr(netip.MustParseAddr(c.services[i].Spec.ClusterIP))
		if _, ok := o.element[setClusterIPs][keyString(vip)]; !ok {
			t.Fatalf("good service %d is not programmed", i)
		}
	}
}

// TestPlanShowsWhatApplyPrograms compares the dry run with the kernel.
func TestPlanShowsWhatApplyPrograms(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		e := w.engine(t, netnstest.New(t))
		m := model{}
		for n := range 12 {
			m[name(n)] = w.service(n)
		}
		plan, err := e.Plan(m.full(w))
		if err != nil {
			t.Fatalf("plan: %v", err)
		}
		mustApply(t, e, m.full(w))
		planned, programmed := elementLines(plan), []string(nil)
		// While the kernel enlarges a set, a dump may lack some of its elements.
		if len(planned) == 0 || !poll.Soon(func() bool {
			var dump strings.Builder
			netnstest.Check(t, e.Dump(t.Context(), &dump))
			programmed = elementLines(dump.String())
			return slices.Equal(planned, programmed)
		}) {
			t.Errorf("planned\n%s\nprogrammed\n%s", strings.Join(planned, "\n"), strings.Join(programmed, "\n"))
		}
	})
}

// elementLines are the lines of a plan for elements, except intervals, which the kernel
// reports as edges.
func elementLines(text string) []string {
	var lines []string
	set := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "set "), strings.HasPrefix(line, "map "), strings.HasPrefix(line, "chain "):
			set = strings.Fields(line)[1]
		case set == "service-cidrs", set == "nodeport-addresses", set == "pod-cidrs", line == "", line == "}":
		case !strings.Contains(line, "priority"):
			lines = append(lines, set+": "+line)
		}
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}

func TestWithoutPrivilegeTheErrorSaysWhatToDo(t *testing.T) {
	netnstest.Unprivileged(t, func(t *testing.T) {
		w := &world{family: v1.IPv4Protocol}
		e, err := NewEngine(Config{}, w.family, proxier.Deps{})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		_, err = e.Apply(t.Context(), model{}.full(w))
		if !errors.Is(err, proxier.ErrPermission) || !strings.Contains(err.Error(), "run with CAP_NET_ADMIN") {
			t.Errorf("apply = %v, want ErrPermission and what to do", err)
		}
	})
}

func TestAMissingNamespaceIsNamed(t *testing.T) {
	e, err := NewEngine(Config{Config: proxier.Config{NetNS: "no-such-namespace"}}, v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = e.Apply(t.Context(), model{}.full(&world{family: v1.IPv4Protocol}))
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "/run/netns/no-such-namespace") {
		t.Errorf("apply = %v, want one that names the path", err)
	}
}

// TestAMissingFeatureIsNamed probes a feature that no kernel has, as if a module were
// missing.
func TestAMissingFeatureIsNamed(t *testing.T) {
	w := &world{family: v1.IPv4Protocol}
	ns := netnstest.New(t)
	e := w.engine(t, ns)
	mustApply(t, e, model{}.full(w))
	for _, f := range e.features() {
		if err := e.probe(t.Context(), f); err != nil {
			t.Errorf("this kernel lacks %s: %v", f.name, err)
		}
	}
	unknown := setSpecs[setAffinity]
	unknown.extra |= 0x8000 // no kernel has this flag
	features := append(e.features(), feature{name: "flags of the future", set: &unknown})
	err := e.explain(t.Context(), errInjected, features)
	if !errors.Is(err, proxier.ErrNotSupported) || !errors.Is(err, errInjected) || !strings.Contains(err.Error(), "flags of the future") {
		t.Errorf("explain = %v, want the feature named", err)
	}
	if n := strings.Count(err.Error(), "is missing"); n != 1 {
		t.Errorf("%d features named, want 1: %v", n, err)
	}
	for _, errno := range []unix.Errno{unix.ENOMEM, unix.ENOBUFS, unix.EINTR, unix.EPERM} {
		e.kernel = refusingKernel{e.kernel, errno}
		if err := e.explain(t.Context(), errInjected, features); errors.Is(err, proxier.ErrNotSupported) || !errors.Is(err, errno) {
			t.Errorf("explain = %v, want %v, which is no missing feature", err, errno)
		}
	}
	mustWriteNothing(t, w.engine(t, ns), model{}.full(w), "after probing")
}

// refusingKernel refuses all transactions.
type refusingKernel struct {
	kernel
	errno unix.Errno
}

func (k refusingKernel) Commit(context.Context, *nft.Batch) error {
	return &nft.Error{Op: "add", Object: "anything", Err: k.errno}
}

func TestConfigReportsEveryFault(t *testing.T) {
	config := Config{
		Config: proxier.Config{
			Families:   []v1.IPFamily{"IPv5"},
			Names:      proxier.Names{Table: strings.Repeat("x", 300), ChainPrefix: "a b"},
			Masquerade: proxier.Masquerade{Mark: 3, PodInterface: strings.Repeat("x", 16), NodePodCIDRs: true},
			NodePorts:  proxier.NodePorts{Addresses: []netip.Prefix{{}}},
			Runner:     runner.Options{Burst: -1},
		},
		DNATPriority: -300,
	}
	_, err := New(config, proxier.Deps{})
	if !errors.Is(err, proxier.ErrInvalidConfig) {
		t.Fatalf("New = %v, want ErrInvalidConfig", err)
	}
	for _, field := range []string{
		"Families", "Names.Table", "Names.ChainPrefix", "Names.Device", "Masquerade.Mark",
		"Masquerade", "Masquerade.PodInterface", "NodePorts.Addresses[0]", "Runner", "DNATPriority",
	} {
		if !strings.Contains(err.Error(), field+":") && !strings.Contains(err.Error(), field+" is") {
			t.Errorf("the error does not name %s:\n%v", field, err)
		}
	}
}

// TestNodePortsOutliveANodeThatIsKnownLate: a Provider leaves the table unchanged until it
// has the node's primary address.
func TestNodePortsOutliveANodeThatIsKnownLate(t *testing.T) {
	ns := netnstest.New(t)
	node := changetracker.Node{Name: "node", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}}
	c := newCluster(1, 1)
	c.services[0].Spec.Ports[0].NodePort = 30080
	c.services[0].Spec.Type = v1.ServiceTypeNodePort
	// during runs a Provider with all inputs except the node.
	during := func(node changetracker.Node, do func(p *proxier.Proxier)) {
		t.Run("provider", func(t *testing.T) {
			p := provider(t, ns, func(c *Config) { c.Node, c.NodePorts.Primary = node, true })
			p.OnServiceAdd(c.services[0])
			p.OnEndpointSliceAdd(c.slices[0])
			p.OnServiceSynced()
			p.OnEndpointSlicesSynced()
			do(p)
		})
	}
	sync := func(p *proxier.Proxier) { netnstest.Check(t, proxiertest.Sync(t.Context(), p)) }
	table := func() string { // its words in order, as that of elements varies
		var text strings.Builder
		for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
			e := (&world{family: family}).engine(t, ns)
			netnstest.Check(t, e.Dump(t.Context(), &text))
		}
		return strings.Join(slices.Sorted(slices.Values(strings.FieldsFunc(text.String(), func(r rune) bool { return strings.ContainsRune(" \t\n,", r) }))), " ")
	}
	during(node, sync)
	before := table()
	if !strings.Contains(before, "192.0.2.1") || !strings.Contains(before, "30080") {
		t.Fatalf("the table has no node port:\n%s", before)
	}
	during(changetracker.Node{}, func(p *proxier.Proxier) {
		ctx, stop := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer stop()
		if err := p.Sync(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Sync = %v before the node is known, want that it waits", err)
		}
		if now := table(); now != before {
			t.Errorf("the table is\n%s\nwant it as it was\n%s", now, before)
		}
		p.OnNodeChange(node)
		sync(p)
		if now := table(); now != before {
			t.Errorf("the table is\n%s\nwant the same as before\n%s", now, before)
		}
	})
}
