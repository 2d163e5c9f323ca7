package refusals

import (
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/oracle"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// life is one process after another on one node, and a Service of UDP and TCP with frontends of all kinds.
type life struct {
	*testing.T

	engine  engine
	world   *proxiertest.Topology
	cluster *oracle.Cluster
}

func newLife(t *testing.T, e engine) *life {
	t.Helper()
	l := &life{T: t, engine: e, world: proxiertest.NewTopology(t)}
	l.cluster = newCluster(t, l.world, settings()[0])
	add(l.cluster, l.world, 1, spec{endpoints: []string{nodeName}})
	return l
}

// begin starts a process, with the Service or without; end stops it and leaves its rules.
func (l *life) begin(with bool) (p *proxier.Proxier, end func()) {
	l.Helper()
	p, err := l.engine.create(config(l.world, l.cluster))
	if err != nil {
		l.Fatal(err)
	}
	if with {
		l.add(p)
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	end = poll.Background(l, p.Run)
	l.sync(p)
	return p, end
}

func (l *life) add(p *proxier.Proxier) {
	p.OnServiceAdd(l.cluster.Services[name(1)])
	for _, slice := range l.cluster.Slices {
		p.OnEndpointSliceAdd(slice)
	}
}

func (l *life) sync(p *proxier.Proxier) {
	l.Helper()
	if err := proxiertest.Sync(l.Context(), p); err != nil {
		l.Fatal(err)
	}
}

// frontends are the places that clients dial.
func (l *life) frontends(family v1.IPFamily) map[string]netip.AddrPort {
	all := map[string]netip.AddrPort{"node port": netip.AddrPortFrom(l.world.Node.Addr(family), firstNodePort+1)}
	for i, vip := range vips(1, family) {
		all[[]string{"cluster IP", "external IP", "load balancer IP"}[i]] = netip.AddrPortFrom(netip.MustParseAddr(vip), servicePort)
	}
	return all
}

// flows opens a flow from a client outside to each frontend of both families.
func (l *life) flows(network string) map[string]*proxiertest.Conn {
	l.Helper()
	all := map[string]*proxiertest.Conn{}
	for _, family := range families() {
		for name, to := range l.frontends(family) {
			flow, err := l.world.Client.Open(l.Context(), network, to, proxiertest.AskOptions{From: l.world.Client.Addr(family)})
			if err != nil {
				l.Fatal(err)
			}
			l.Cleanup(func() { _ = flow.Close() })
			all[string(family)+" "+name] = flow
		}
	}
	return all
}

// TestFlowsOfAServiceThatIsDeletedWhileNoProxyRuns: a UDP client that goes on sending gets no
// answer from an endpoint of a Service that the next process never heard of (CT-13).
func TestFlowsOfAServiceThatIsDeletedWhileNoProxyRuns(t *testing.T) {
	for _, e := range engines() {
		t.Run(e.name, func(t *testing.T) { t.Parallel(); forgotten(t, e) })
	}
}

func forgotten(t *testing.T, e engine) {
	t.Helper()
	l := newLife(t, e)
	_, end := l.begin(true)
	flows := l.flows("udp")
	for name, flow := range flows {
		if _, err := flow.Ask(t.Context()); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	end()
	p, end := l.begin(false)
	cleansUp(t, p)
	defer end()
	for name, flow := range flows {
		flow.Expect(l.world)
		if answer, err := flow.Ask(t.Context()); err == nil {
			t.Errorf("%s: %s answers", name, answer.Server)
		}
	}
}

// TestARestartServesThePortsOfBefore: after the first sync of a new process, a client is served from the source
// port that it had with the old one, whatever conntrack knows of it (CT-15).
func TestARestartServesThePortsOfBefore(t *testing.T) {
	for _, e := range append(engines(), onIPTables()) {
		t.Run(e.name, func(t *testing.T) { t.Parallel(); restarted(t, e) })
	}
}

func restarted(t *testing.T, e engine) {
	t.Helper()
	l := newLife(t, e)
	port, all := uint16(41_000), []asker(nil)
	for _, family := range families() {
		for _, to := range l.frontends(family) {
			for _, network := range []string{"tcp", "udp"} {
				port++
				all = append(all, asker{l.world.Client, network, to, port})
			}
		}
	}
	for range 3 {
		p, end := l.begin(true)
		var open []*proxiertest.Conn // some end before the process, some after it
		for i, a := range all {
			if _, err := a.ask(t.Context()); err != nil {
				t.Errorf("%s from port %d to %v: %v", a.network, a.fromPort, a.to, err)
			}
			if i%3 == 0 {
				continue
			}
			flow, err := a.open(t.Context(), a.options())
			if err == nil {
				_, err = flow.Ask(t.Context())
				open = append(open, flow)
			}
			if err != nil {
				t.Errorf("%s from port %d to %v: %v", a.network, a.fromPort, a.to, err)
			}
		}
		end()
		for i, flow := range open {
			if i%2 == 0 {
				_ = flow.Close()
				continue
			}
			_ = flow.Abort()
		}
		for i, a := range all { // mode userspace refuses now, and conntrack has entries of that
			if i%2 == 0 {
				o := a.options()
				o.Timeout = 50 * time.Millisecond
				_ = a.once(t.Context(), o)
			}
		}
		cleansUp(t, p)
	}
}

// TestWhoLingersKeepsItsConnections: a process of mode userspace that ends with Linger serves its open connections
// beside the next process, which forgets only connections whose process has ended (CT-15).
func TestWhoLingersKeepsItsConnections(t *testing.T) {
	for name, create := range map[string]func(proxier.Config) (*proxier.Proxier, error){
		"on nftables": newUserspace(time.Hour, func(c proxier.Config, family v1.IPFamily, deps proxier.Deps) (proxier.Engine, error) {
			return nftables.NewEngine(nftables.Config{Config: c}, family, deps)
		}),
		"on iptables": newUserspace(time.Hour, func(c proxier.Config, family v1.IPFamily, deps proxier.Deps) (proxier.Engine, error) {
			return iptables.NewEngine(iptables.Config{Config: c, Portals: true}, family, deps)
		}),
	} {
		t.Run(name, func(t *testing.T) { t.Parallel(); lingered(t, engine{name: name, create: create}) })
	}
}

func lingered(t *testing.T, e engine) {
	t.Helper()
	l := newLife(t, e)
	_, endFirst := l.begin(true)
	flows := l.flows("tcp")
	asked := func(when string) {
		for name, flow := range flows {
			if _, err := flow.Ask(t.Context()); err != nil {
				t.Errorf("%s, %s: %v", when, name, err)
			}
		}
	}
	asked("first process")
	ended := make(chan struct{})
	go func() { defer close(ended); endFirst() }()
	p, err := e.create(config(l.world, l.cluster))
	if err != nil {
		t.Fatal(err)
	}
	l.add(p)
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	endSecond := poll.Background(t, p.Run)
	poll.Nil(t, "the second process has the names", func() error { return proxiertest.Sync(t.Context(), p) })
	asked("beside the second process")
	for _, flow := range flows {
		_ = flow.Close()
	}
	<-ended
	endSecond()
	cleansUp(t, p)
}

// TestAConnectionThatBeganBeforeItsService: the client sends its first packet before the
// frontend exists, and goes on from the same port (CT-14).
func TestAConnectionThatBeganBeforeItsService(t *testing.T) {
	for _, e := range engines() {
		t.Run(e.name, func(t *testing.T) { t.Parallel(); early(t, e) })
	}
}

func early(t *testing.T, e engine) {
	t.Helper()
	l := newLife(t, e)
	p, end := l.begin(false)
	cleansUp(t, p)
	defer end()
	const port = 40000
	ask := func(family v1.IPFamily, to netip.AddrPort, flusher *proxiertest.Topology) (proxiertest.Answer, error) {
		o := proxiertest.AskOptions{From: l.world.Client.Addr(family), FromPort: port}
		if flusher != nil {
			o.Flusher = flusher
		}
		return l.world.Client.Ask(t.Context(), "tcp", to, o)
	}
	for _, family := range families() {
		for name, to := range l.frontends(family) {
			if _, err := ask(family, to, l.world); err == nil {
				t.Fatalf("%s %s answers without a Service", family, name)
			}
		}
	}
	l.add(p)
	l.sync(p)
	for _, family := range families() {
		for name, to := range l.frontends(family) {
			if answer, err := ask(family, to, nil); err != nil || answer.Server != "pod-1" {
				t.Errorf("%s %s: %v, %v", family, name, answer.Server, err)
			}
		}
	}
}
