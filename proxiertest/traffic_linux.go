package proxiertest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// TrafficCounts compares the numbers of Config.CountTraffic with the packets that clients send and
// receive, as packet sockets beside them see these: they must be equal, for each service port and
// each endpoint, over both families, TCP and UDP, for all kinds of addresses and for a pod that
// reaches itself, while flows are open and when they have ended, also after changes of endpoints
// and of Services, when all entries of connection tracking are deleted, and after a restart.
// Providers of the factory must have the method Counts of *proxier.Proxier, whose traffic the kernel counts.
//
// It needs Linux and root.
func TrafficCounts(t *testing.T, factory Factory) {
	t.Helper()
	ctx := t.Context()
	x := &trafficTest{
		suite:  newSuite(t, Features{}, factory, func(config *proxier.Config) { config.CountTraffic = true }),
		meters: map[*Host]*meter{}, port: firstPortOfTraffic,
	}
	for _, host := range []*Host{x.world.Client, x.world.LocalPods[1]} {
		x.meters[host] = newMeter(t, host)
	}
	netnstest.Check(t, x.world.Node.ns.SetSysctl(accounting, "1"))
	x.begin(ctx, t)
	two := ready(pod0, remote0)
	services := func(web []endpoint) []service {
		return []service{{name: "web", external: true, endpoints: web}, {name: "self", endpoints: ready(pod1)}}
	}
	for _, step := range []struct {
		name string
		do   func()
	}{
		{"of open flows", func() { x.change(ctx, t, services(two)...); x.talk(ctx, t) }},
		{"of flows that continue", func() { x.talk(ctx, t) }},
		{"of an endpoint that is gone", func() { x.change(ctx, t, services(two[1:])...); x.talk(ctx, t) }},
		{"of an endpoint that returns", func() { x.change(ctx, t, services(two)...); x.talk(ctx, t) }},
		{"of closed flows", func() { x.hangUp(t); x.talk(ctx, t) }},
		{"of flows that nobody tracks any more", func() { x.hangUp(t); x.settle(ctx, t); x.flush(t); x.talk(ctx, t) }},
		{"after a restart", func() {
			x.settle(ctx, t)
			x.end(t)
			x.begin(ctx, t)
			x.change(ctx, t, services(two)...)
			x.talk(ctx, t)
		}},
		{"of a Service that begins again", func() { x.change(ctx, t, services(two)[:1]...); x.change(ctx, t, services(two)...); x.talk(ctx, t) }},
	} {
		step.do()
		if t.Failed() {
			t.Fatalf("%s", step.name)
		}
		poll.Nil(t, "traffic "+step.name, func() error { return x.check(ctx) })
	}
	x.unaccounted(ctx, t)
}

const (
	firstPortOfTraffic = 3000
	accounting         = "net/netfilter/nf_conntrack_acct"
)

// trafficTest is one run of Traffic.
type trafficTest struct {
	*suite
	*stage

	meters map[*Host]*meter
	talks  []*talk
	port   uint16 // of the last flow
}

// talk is an open flow, or a closed one.
type talk struct {
	*Conn

	family   v1.IPFamily
	from     *Host
	wire     wire
	name     changetracker.ServicePortName
	endpoint netip.AddrPort
	// before does not count, endpointBefore not for the endpoint.
	before, endpointBefore connection.Traffic
	udp                    bool
}

// begin starts a Provider. Traffic from before does not count.
func (x *trafficTest) begin(ctx context.Context, t *testing.T) {
	t.Helper()
	x.stage = &stage{suite: x.suite, provider: x.use(ctx, t, setupDefault)}
	x.serial = 0
	for _, flow := range x.talks {
		flow.before = x.metered(flow).Traffic
		flow.endpointBefore = flow.before
	}
}

func (x *trafficTest) metered(flow *talk) metered { return x.meters[flow.from].of(flow.wire) }

// targetsOf are where clients reach a service.
func (x *trafficTest) targetsOf(p *published, family v1.IPFamily) (from *Host, targets []netip.AddrPort) {
	to := p.targets(x.world, family)
	if targets = p.outside(to); targets != nil {
		return x.world.Client, targets
	}
	return x.world.LocalPods[1], []netip.AddrPort{to[clusterIP]}
}

// talk asks over all open flows of TCP, and over new ones to all addresses.
func (x *trafficTest) talk(ctx context.Context, t *testing.T) {
	t.Helper()
	for _, p := range x.services {
		for _, family := range families() {
			from, targets := x.targetsOf(p, family)
			for _, to := range targets {
				for _, port := range p.object.Spec.Ports {
					x.open(t, p, &port, from, to)
				}
			}
		}
	}
	for _, flow := range x.talks {
		if flow.Conn != nil {
			x.ask(ctx, t, flow)
		}
	}
}

func (x *trafficTest) open(t *testing.T, p *published, port *v1.ServicePort, from *Host, to netip.AddrPort) {
	t.Helper()
	flow := &talk{family: familyOf(to.Addr()), from: from, name: p.name(port), udp: port.Protocol == v1.ProtocolUDP}
	network := map[bool]string{false: "tcp", true: "udp"}[flow.udp]
	x.port++
	flow.wire = wire{network: network, client: netip.AddrPortFrom(from.Addr(flow.family), x.port), target: to}
	var err error
	flow.Conn, err = from.Open(t.Context(), network, to, AskOptions{From: flow.wire.client.Addr(), FromPort: x.port, Timeout: answerTimeout})
	if err != nil {
		t.Errorf("open %s to %v: %v", network, to, err)
		return
	}
	x.talks = append(x.talks, flow)
}

// ask asks several times over a flow.
func (x *trafficTest) ask(ctx context.Context, t *testing.T, flow *talk) {
	t.Helper()
	const times = 5
	for range times {
		answer, err := flow.Ask(ctx)
		if err != nil || flow.endpoint.IsValid() && answer.Local != flow.endpoint {
			t.Errorf("%s at %v of %v: %q from %v, error %v, want an answer from %v", flow.name, flow.wire.target, flow.from.Name, answer.Server, answer.Local, err, flow.endpoint)
		}
		flow.endpoint = answer.Local
	}
	if flow.udp { // after a change, the kernel may send the next datagram elsewhere
		x.close(t, flow)
	}
}

// close closes a flow, if it is open.
func (*trafficTest) close(t *testing.T, flow *talk) {
	t.Helper()
	if flow.Conn == nil {
		return
	}
	if err := flow.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	flow.Conn = nil
}

// hangUp closes all flows.
func (x *trafficTest) hangUp(t *testing.T) {
	t.Helper()
	for _, flow := range x.talks {
		x.close(t, flow)
	}
}

// settle waits until everything is counted, so that nothing is on its way.
func (x *trafficTest) settle(ctx context.Context, t *testing.T) {
	t.Helper()
	poll.Nil(t, "traffic up to now", func() error { return x.check(ctx) })
}

// check compares the counts with the packets. What service ports and endpoints had that are gone
// is no part of their numbers, but endpoints that are gone are part of their service port's.
func (x *trafficTest) check(ctx context.Context) error {
	var errs []error
	for _, flow := range x.talks {
		if !x.metered(flow).isQuiet() {
			errs = append(errs, fmt.Errorf("%v: packets are not acknowledged yet", flow.wire))
		}
	}
	for _, family := range families() {
		got, err := x.counts(ctx, family)
		if err != nil {
			return err
		}
		if !got.Traffic || got.TrafficLosses != 0 {
			errs = append(errs, fmt.Errorf("%s: traffic is counted: %v %s, %d losses; want true and none", family, got.Traffic, got.TrafficProblem, got.TrafficLosses))
		}
		if got.Connections {
			errs = append(errs, fmt.Errorf("%s: connections are counted too, which nobody asked for", family))
		}
		errs = append(errs, x.differences(family, &got))
	}
	return errors.Join(errs...)
}

func (x *trafficTest) differences(family v1.IPFamily, got *connection.Counts) error {
	want := map[changetracker.ServicePortName]*passed{}
	for _, flow := range x.talks {
		if flow.family != family {
			continue
		}
		if want[flow.name] == nil {
			want[flow.name] = &passed{endpoints: map[netip.AddrPort]connection.Traffic{}}
		}
		of, now := want[flow.name], x.metered(flow)
		of.all = of.all.Plus(now.Minus(flow.before))
		if more := now.Minus(flow.endpointBefore); x.has(flow) && more != (connection.Traffic{}) {
			of.endpoints[flow.endpoint] = of.endpoints[flow.endpoint].Plus(more)
		}
	}
	var errs []error
	for _, p := range got.ServicePorts {
		if x.isUncertain(p.Name) {
			delete(want, p.Name)
			continue
		}
		have := passed{p.Traffic, map[netip.AddrPort]connection.Traffic{}}
		for _, e := range p.Endpoints {
			have.endpoints[e.Endpoint] = e.Traffic
		}
		if of := want[p.Name]; of == nil || !reflect.DeepEqual(*of, have) {
			errs = append(errs, fmt.Errorf("%s of %s: counted %v, want %v", p.Name, family, have, of))
		}
		delete(want, p.Name)
	}
	for name, of := range want {
		if of.all != (connection.Traffic{}) && !x.isUncertain(name) {
			errs = append(errs, fmt.Errorf("%s of %s: not counted, want %v", name, family, of))
		}
	}
	return errors.Join(errs...)
}

// isUncertain reports whether a busy machine made an end of a flow repeat its first packet: the kernel
// counts that packet only in some states of the connection.
func (x *trafficTest) isUncertain(name changetracker.ServicePortName) bool {
	return slices.ContainsFunc(x.talks, func(flow *talk) bool { return flow.name == name && x.metered(flow).hasRepeated() })
}

// passed is the traffic of a service port, and of the endpoints that it has.
type passed struct {
	all       connection.Traffic
	endpoints map[netip.AddrPort]connection.Traffic
}

// has reports whether the service port of a flow has its endpoint.
func (x *trafficTest) has(flow *talk) bool {
	return slices.ContainsFunc(x.services, func(p *published) bool {
		return p.object.Name == flow.name.Name && p.has(flow.family, flow.endpoint.Addr())
	})
}

// change publishes services. An endpoint that returns begins at zero, and so does a Service.
func (x *trafficTest) change(ctx context.Context, t *testing.T, services ...service) {
	t.Helper()
	had := map[*talk]bool{}
	for _, flow := range x.talks {
		had[flow] = x.has(flow)
	}
	x.publish(ctx, t, services...)
	for _, flow := range x.talks {
		if !had[flow] && x.has(flow) {
			flow.endpointBefore = x.metered(flow).Traffic
		}
	}
	x.talks = slices.DeleteFunc(x.talks, func(flow *talk) bool {
		gone := !slices.ContainsFunc(x.services, func(p *published) bool { return p.object.Name == flow.name.Name })
		if gone {
			x.close(t, flow)
		}
		return gone
	})
}

// flush deletes all entries of connection tracking.
func (s *suite) flush(t *testing.T) {
	t.Helper()
	netnstest.Check(t, s.world.Node.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
}

// unaccounted shows what Counts tells if the kernel does not count.
func (x *trafficTest) unaccounted(ctx context.Context, t *testing.T) {
	t.Helper()
	x.hangUp(t)
	x.settle(ctx, t)
	netnstest.Check(t, x.world.Node.ns.SetSysctl(accounting, "0"))
	for _, family := range families() {
		before, err := x.counts(ctx, family)
		if err != nil || before.Traffic || !strings.Contains(before.TrafficProblem, "nf_conntrack_acct") {
			t.Errorf("counts of %s without accounting: traffic %v, problem %q, error %v; want the setting in the problem", family, before.Traffic, before.TrafficProblem, err)
		}
		known := len(x.talks)
		x.talk(ctx, t)
		x.hangUp(t)
		x.talks = x.talks[:known]
	}
	netnstest.Check(t, x.world.Node.ns.SetSysctl(accounting, "1"))
	x.settle(ctx, t)
	x.talk(ctx, t)
	x.settle(ctx, t)
}
