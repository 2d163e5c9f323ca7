package proxiertest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// counter counts connections, as *proxier.Proxier does.
type counter interface {
	Counts(ctx context.Context, family v1.IPFamily) (connection.Counts, error)
}

// ConnectionCounts compares the numbers of Config.CountConnections with the connections that it opens to
// all kinds of addresses, over both families, TCP and UDP: they must be equal, for each service
// port and each endpoint, also after changes of endpoints and of Services, a full sync and a
// restart. Some seconds may pass until they are. Providers of the factory must have the method Counts of *proxier.Proxier.
//
// It needs Linux and root.
func ConnectionCounts(t *testing.T, factory Factory) {
	t.Helper()
	ctx := t.Context()
	c := &countsTest{suite: newSuite(t, Features{}, factory, func(config *proxier.Config) { config.CountConnections = true }), port: firstPortOfCounts}
	c.begin(ctx, t)
	two, extra := ready(pod0, remote0), manyPods(24)
	sticky := []ServiceOption{ClientAffinity(time.Hour)}
	services := func(web, many, affine []endpoint) []service {
		return []service{
			{name: "web", external: true, endpoints: web}, {name: "many", endpoints: many}, {name: "sticky", endpoints: affine, options: sticky},
		}
	}
	for _, step := range []struct {
		name     string
		services []service
		before   func()
	}{
		{name: "at first", services: services(two, extra, two)},
		{name: "with another endpoint", services: services(ready(pod0, remote0, pod1), extra[:23], ready(pod0, remote0, pod1))},
		{name: "with one endpoint less", services: services(ready(remote0, pod1), extra[2:], ready(remote0, pod1))},
		{name: "after an endpoint was gone", services: services(two, extra, two)},
		{name: "in a full sync", services: services(two, extra[:20], two), before: func() { c.move("zone-of-counts") }},
		{name: "without endpoints", services: services(nil, nil, nil)},
		{name: "after no endpoints", services: services(two, extra, two)},
		{name: "without one Service", services: services(two, extra, two)[:2]},
		{name: "with that Service again", services: services(two, extra, two)},
		{name: "after a restart", services: services(two, extra, two), before: func() { c.end(t); c.begin(ctx, t) }},
	} {
		if step.before != nil {
			step.before()
		}
		c.publish(ctx, t, step.services...)
		c.forgetGone()
		c.connect(ctx, t)
		if t.Failed() {
			t.Fatalf("%s", step.name)
		}
		poll.Nil(t, "counts "+step.name, func() error { return c.check(ctx) })
	}
}

const firstPortOfCounts = 2000

// countsTest is one run of Counts.
type countsTest struct {
	*suite
	*stage

	// sent are the connections since the Provider began.
	sent map[v1.IPFamily]map[changetracker.ServicePortName]*sentTo
	// port is the source port of the last connection.
	port uint16
}

// sentTo are the connections to a service port, and to each endpoint that it has.
type sentTo struct {
	all       uint64
	endpoints map[netip.AddrPort]uint64
}

// begin starts a Provider that knows no Services.
func (c *countsTest) begin(ctx context.Context, t *testing.T) {
	t.Helper()
	c.sent = map[v1.IPFamily]map[changetracker.ServicePortName]*sentTo{}
	for _, family := range families() {
		c.sent[family] = map[changetracker.ServicePortName]*sentTo{}
	}
	c.stage = &stage{suite: c.suite, provider: c.use(ctx, t, setupDefault)}
	c.serial = 0
}

// counts returns those of the Provider.
func (s *stage) counts(ctx context.Context, family v1.IPFamily) (connection.Counts, error) {
	counter, ok := s.provider.(counter)
	if !ok {
		return connection.Counts{}, fmt.Errorf("%T counts no connections", s.provider)
	}
	counts, err := counter.Counts(ctx, family)
	if err != nil {
		err = fmt.Errorf("counts of %s: %w", family, err)
	}
	return counts, err
}

// name returns the name of a service port.
func (p *published) name(port *v1.ServicePort) (name changetracker.ServicePortName) {
	name.Namespace, name.Name, name.Port, name.Protocol = p.object.Namespace, p.object.Name, port.Name, port.Protocol
	return name
}

// outside returns where clients outside the cluster reach a service; none if it is not external.
func (p *published) outside(to map[target]netip.AddrPort) []netip.AddrPort {
	if p.object.Spec.Type != v1.ServiceTypeLoadBalancer {
		return nil
	}
	return []netip.AddrPort{to[nodePort], to[nodePortSecondary], to[externalIP], to[loadBalancer]}
}

func familyOf(addr netip.Addr) v1.IPFamily {
	if addr.Is4() {
		return v1.IPv4Protocol
	}
	return v1.IPv6Protocol
}

// move changes the node's zone, which causes a full sync.
func (c *countsTest) move(zone string) {
	n := setupDefault.config(c.world).Node
	n.Zone = zone
	c.provider.OnNodeChange(n)
}

func (p *published) has(family v1.IPFamily, addr netip.Addr) bool {
	for _, slice := range p.slices {
		for i := range slice.Endpoints {
			if v1.IPFamily(slice.AddressType) == family && slices.Contains(slice.Endpoints[i].Addresses, addr.String()) {
				return true
			}
		}
	}
	return false
}

// forgetGone forgets Services and endpoints that are gone: they begin again at zero.
func (c *countsTest) forgetGone() {
	for family, ports := range c.sent {
		maps.DeleteFunc(ports, func(name changetracker.ServicePortName, of *sentTo) bool {
			i := slices.IndexFunc(c.services, func(p *published) bool { return p.object.Name == name.Name })
			if i < 0 {
				return true
			}
			maps.DeleteFunc(of.endpoints, func(e netip.AddrPort, _ uint64) bool { return !c.services[i].has(family, e.Addr()) })
			return false
		})
	}
}

// connect opens connections to all addresses of all Services, several to each.
func (c *countsTest) connect(ctx context.Context, t *testing.T) {
	t.Helper()
	for _, p := range c.services {
		if len(p.slices) == 0 {
			continue
		}
		for _, family := range families() {
			to := p.targets(c.world, family)
			dials := map[*Host][]netip.AddrPort{c.world.LocalPods[1]: {to[clusterIP]}, c.world.Node: {to[clusterIP]}}
			if outside := p.outside(to); outside != nil {
				dials[c.world.Client] = outside
				dials[c.world.Node] = append(dials[c.world.Node], to[nodePort], to[externalIP])
			}
			for from, targets := range dials {
				for _, target := range targets {
					c.dial(ctx, t, p, from, target)
				}
			}
		}
	}
}

// dial opens connections to one address.
func (c *countsTest) dial(ctx context.Context, t *testing.T, p *published, from *Host, to netip.AddrPort) {
	t.Helper()
	family := familyOf(to.Addr())
	const times = 3
	for _, port := range p.object.Spec.Ports {
		network := map[v1.Protocol]string{v1.ProtocolTCP: "tcp", v1.ProtocolUDP: "udp"}[port.Protocol]
		name := p.name(&port)
		of := c.sent[family][name]
		if of == nil {
			of = &sentTo{endpoints: map[netip.AddrPort]uint64{}}
			c.sent[family][name] = of
		}
		for range times {
			c.port++ // of the same one, the kernel may know an earlier datagram
			answer, err := from.Ask(ctx, network, to, AskOptions{From: from.Addr(family), FromPort: c.port, Timeout: answerTimeout})
			if err != nil {
				t.Errorf("%s from %s to %v of %s: %v", network, from.Name, to, name, err)
				continue
			}
			of.all++
			of.endpoints[answer.Local]++
		}
	}
}

// check compares the counts with the connections.
func (c *countsTest) check(ctx context.Context) error {
	var errs []error
	for family, ports := range c.sent {
		got, err := c.counts(ctx, family)
		if err != nil {
			return err
		}
		if got.Since.IsZero() || !got.Connections {
			errs = append(errs, fmt.Errorf("%s: nothing counts", family))
		}
		errs = append(errs, differences(family, &got, ports))
	}
	return errors.Join(errs...)
}

// differences compares the counts of a family.
func differences(family v1.IPFamily, got *connection.Counts, ports map[changetracker.ServicePortName]*sentTo) error {
	want := map[changetracker.ServicePortName]string{}
	for name, of := range ports {
		want[name] = fmt.Sprintf("%d %v", of.all, of.endpoints)
	}
	var errs []error
	for _, p := range got.ServicePorts {
		have := map[netip.AddrPort]uint64{}
		for _, e := range p.Endpoints {
			if e.Connections > 0 {
				have[e.Endpoint] = e.Connections
			}
		}
		if text := fmt.Sprintf("%d %v", p.Connections, have); text != want[p.Name] {
			errs = append(errs, fmt.Errorf("%s of %s: counted %s, want %s", p.Name, family, text, want[p.Name]))
		}
		delete(want, p.Name)
	}
	for name, text := range want {
		errs = append(errs, fmt.Errorf("%s of %s: not counted, want %s", name, family, text))
	}
	return errors.Join(errs...)
}
