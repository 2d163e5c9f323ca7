package refusals

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/oracle"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

var asks = flag.Int("refusals.asks", chance.Few(200, 400), "how many connections and datagrams a transition must serve")

// transitions are what a Service is in turn. In each state some endpoint is right for all who ask.
func transitions() map[string][]spec {
	both, here, elsewhere := []string{nodeName, "elsewhere"}, []string{nodeName}, []string{"elsewhere"}
	option := func(edit func(*v1.Service)) spec {
		return spec{endpoints: both, options: []proxiertest.ServiceOption{edit}}
	}
	return map[string][]spec{
		"external policy":                 {{endpoints: both}, {endpoints: both, external: true}},
		"internal policy":                 {{endpoints: both}, {endpoints: both, internal: true}},
		"both policies, a local endpoint": {{endpoints: here}, {endpoints: here, internal: true, external: true}},
		"policies and endpoints at once":  {{endpoints: elsewhere}, {endpoints: here, internal: true, external: true}},
		"endpoints with policy Local":     {{endpoints: both, internal: true, external: true}, {endpoints: here, internal: true, external: true}},
		"endpoints":                       {{endpoints: both}, {endpoints: elsewhere}, {endpoints: here}},
		"all endpoints":                   {{endpoints: elsewhere}, {endpoints: here}},
		"source ranges":                   {{endpoints: both}, {endpoints: both, ranges: append(clientsOnly(), "10.244.0.0/16", "fd00:10:244::/48")}},
		"type":                            {{endpoints: both}, {endpoints: both, clusterIPOnly: true}},
		"IP families":                     {{endpoints: both}, {endpoints: both, families: families()[:1]}},
		"session affinity":                {{endpoints: both}, option(func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP })},
		"another port": {{endpoints: both}, option(func(s *v1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "more", Protocol: v1.ProtocolTCP, Port: 81})
		})},
		"an external IP": {{endpoints: both}, option(func(s *v1.Service) { s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, "198.51.100.77") })},
	}
}

// onIPTables is userspace with portals of iptables.
func onIPTables() engine {
	return engine{name: "userspace on iptables", passes: true, sockets: true, create: newUserspace(0, func(c proxier.Config, family v1.IPFamily, deps proxier.Deps) (proxier.Engine, error) {
		return iptables.NewEngine(iptables.Config{Config: c, Portals: true}, family, deps)
	})}
}

// Whatever changes of a Service (PKT-96): as long as an endpoint is right before and after, every connection and
// every datagram is answered, also from one source port again and again. A datagram that meets a change may be
// lost: the client sends it again.
func TestTransitionsKeepServing(t *testing.T) {
	names := slices.Sorted(maps.Keys(transitions()))
	some := chance.Some(t, 6, names...)
	others := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return !chance.All() && slices.Contains(some, name) })
	for i, e := range append(engines(), onIPTables()) {
		for _, name := range [][]string{some, others}[i%2] { // each list of states with every other engine
			t.Run(e.name+"/"+name, func(t *testing.T) { keepServing(t, e, transitions()[name]) })
		}
	}
	for _, name := range some {
		t.Run("ebpf/"+name, func(t *testing.T) { keepServing(t, withSockets(t), transitions()[name]) })
	}
}

// TestAnEndpointThatMovesKeepsServing (PKT-96): the only endpoint of a Service moves from one slice to another, in two
// events, after which nobody waits for a sync. Between them it is in no slice.
func TestAnEndpointThatMovesKeepsServing(t *testing.T) {
	for _, e := range append(engines(), onIPTables()) {
		t.Run(e.name, func(t *testing.T) { moving(t, e) })
	}
}

func moving(t *testing.T, e engine) {
	t.Helper()
	b := &bench{t: t, engine: e, world: proxiertest.NewTopology(t)}
	s := spec{endpoints: []string{nodeName}}
	c := newCluster(t, b.world, settings()[0])
	add(c, b.world, 1, s)
	clusters := [2]*oracle.Cluster{}
	for i := range clusters {
		now := *c
		now.Slices = map[string]*discovery.EndpointSlice{}
		for name, slice := range c.Slices {
			with, without := slice.DeepCopy(), slice.DeepCopy()
			with.Name, without.Name, without.Endpoints = fmt.Sprint(name, "-", i), fmt.Sprint(name, "-", 1-i), nil
			now.Slices[with.Name], now.Slices[without.Name] = with, without
		}
		clusters[i] = &now
	}
	own := config(b.world, c)
	own.Runner.Gather = time.Minute // until the test syncs
	b.start(own, clusters[0])
	b.whileAsking([]spec{s}, 10, func(n int, served func()) {
		was, now := clusters[n%2], clusters[(n+1)%2]
		for _, i := range []int{n % 2, (n + 1) % 2} { // the endpoint goes, and then comes
			for _, family := range families() {
				name := fmt.Sprint(name(1), "-", family, "-", i)
				b.proxy.OnEndpointSliceUpdate(was.Slices[name], now.Slices[name])
			}
			served()
		}
		b.sync()
	})
}

// withSockets is ebpf, which translates sockets of the node and its pods when they connect.
func withSockets(t *testing.T) engine {
	t.Helper()
	s := ebpf.Sockets{BPFFS: bpftest.FileSystem(t), Cgroups: []string{bpftest.OwnCgroup(t)}, Namespaces: &ebpf.Namespaces{Only: true}}
	join := func(netNS string) { netnstest.Check(t, s.Namespaces.Add(netNS)) }
	return engine{name: "ebpf", join: join, create: func(c proxier.Config) (*proxier.Proxier, error) {
		join(c.NetNS)
		return ebpf.New(ebpf.Config{Config: nftables.Config{Config: c}, Sockets: s}, proxier.Deps{})
	}}
}

// asker asks one frontend again and again.
type asker struct {
	from     *proxiertest.Host
	network  string
	to       netip.AddrPort
	fromPort uint16 // 0 is any
}

func keepServing(t *testing.T, e engine, states []spec) {
	t.Helper()
	b := &bench{t: t, engine: e, world: proxiertest.NewTopology(t)}
	if e.join != nil {
		e.join(b.world.LocalPods[0].NetNS())
	}
	clusters := make([]*oracle.Cluster, len(states))
	for i, s := range states {
		clusters[i] = newCluster(t, b.world, settings()[0])
		add(clusters[i], b.world, 1, s)
	}
	b.start(config(b.world, clusters[0]), clusters[0])
	b.whileAsking(states, 3*len(states), func(n int, _ func()) {
		b.tell(clusters[n%len(clusters)], clusters[(n+1)%len(clusters)])
		b.sync()
	})
}

// start starts the proxy, with a cluster.
func (b *bench) start(config proxier.Config, c *oracle.Cluster) {
	b.t.Helper()
	p, err := b.engine.create(config)
	if err != nil {
		b.t.Fatal(err)
	}
	b.proxy = p
	cleansUp(b.t, p)
	proxiertest.Run(b.t, p)
	b.tell(&oracle.Cluster{Services: map[string]*v1.Service{}, Slices: map[string]*discovery.EndpointSlice{}}, c)
	b.sync()
}

// whileAsking makes at least so many changes while clients ask, until they have asked often enough. served waits
// until clients have asked again.
func (b *bench) whileAsking(states []spec, atLeast int, change func(n int, served func())) {
	b.t.Helper()
	t, all := b.t, b.askers(states)
	var asked, retried atomic.Int64
	stop, running := make(chan struct{}), sync.WaitGroup{}
	for _, a := range all {
		running.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				again, err := a.ask(t.Context())
				asked.Add(1)
				retried.Add(int64(again))
				if err != nil {
					t.Errorf("%s, %s from port %d to %v: %v", a.from.Name, a.network, a.fromPort, a.to, err)
					return
				}
			}
		})
	}
	served := func() {
		want := asked.Load() + int64(2*len(all)) // those who are asking now, and then everybody once more
		poll.Until(t, "clients ask", func() bool { return t.Failed() || asked.Load() >= want })
	}
	changes := 0
	for ; !t.Failed() && (asked.Load() < int64(*asks) || changes < atLeast); changes++ {
		change(changes, served)
		served()
	}
	close(stop)
	running.Wait()
	t.Logf("%d changes, %d asked, %d datagrams sent again", changes, asked.Load(), retried.Load())
}

// askers are those whom all states serve.
func (b *bench) askers(states []spec) (all []asker) {
	only := slices.ContainsFunc(states, func(s spec) bool { return s.clusterIPOnly })
	port := uint16(20_000)
	for _, family := range families() {
		if slices.ContainsFunc(states, func(s spec) bool { return s.families != nil && !slices.Contains(s.families, family) }) {
			continue
		}
		for i, vip := range append(vips(1, family), b.world.Node.Addr(family).String()) {
			to := netip.AddrPortFrom(netip.MustParseAddr(vip), servicePort)
			if i == len(vips(1, family)) {
				to = netip.AddrPortFrom(to.Addr(), firstNodePort+1)
			}
			for _, from := range []*proxiertest.Host{b.world.LocalPods[0], b.world.Client} {
				if i == 0 == (from == b.world.Client) || i > 0 && only {
					continue // the client asks external frontends, the pod the ClusterIP
				}
				for _, network := range []string{"tcp", "udp"} {
					all = append(all, asker{from, network, to, 0})
					if port++; network == "tcp" || !b.engine.clashes {
						all = append(all, asker{from, network, to, port})
					}
				}
			}
		}
	}
	return all
}

// ask returns how often a datagram was sent again.
func (a asker) ask(ctx context.Context) (again int, err error) {
	const attempts = 5
	for again = range attempts {
		if err = a.once(ctx, a.options()); err == nil || a.network == "tcp" || !errors.Is(err, proxiertest.ErrTimeout) {
			break
		}
	}
	if err != nil {
		err = fmt.Errorf("attempt %d: %w", again+1, err)
	}
	return again, err
}

func (a asker) options() proxiertest.AskOptions {
	timeout := 10 * time.Second
	if a.network == "udp" {
		timeout = time.Second
	}
	return proxiertest.AskOptions{From: a.from.Addr(familyOf(a.to.Addr())), FromPort: a.fromPort, Timeout: timeout}
}

func (a asker) once(ctx context.Context, options proxiertest.AskOptions) error {
	flow, err := a.open(ctx, options)
	if err != nil {
		return err
	}
	_, err = flow.Ask(ctx)
	return errors.Join(err, flow.Abort())
}

func (a asker) open(ctx context.Context, options proxiertest.AskOptions) (flow *proxiertest.Conn, err error) {
	poll.Soon(func() bool { // a process that an engine is about to start has the sockets of this one for a moment
		flow, err = a.from.Open(ctx, a.network, a.to, options)
		return !errors.Is(err, unix.EADDRINUSE) && !errors.Is(err, unix.EADDRNOTAVAIL)
	})
	return flow, err
}

func familyOf(a netip.Addr) v1.IPFamily {
	if a.Is6() {
		return v1.IPv6Protocol
	}
	return v1.IPv4Protocol
}
