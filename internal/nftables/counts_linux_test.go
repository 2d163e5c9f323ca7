package nftables

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// counted is a node whose engine counts connections. A peer has the endpoints' addresses.
type counted struct {
	*Engine

	t    *testing.T
	w    *world
	node *netns.NS
	peer *netns.NS
	addr netip.Addr // of the node

	mu   sync.Mutex
	port uint16 // source port of the last connection
	sent map[changetracker.ServicePortName]uint64
}

func newCounted(t *testing.T, w *world) *counted {
	t.Helper()
	c := &counted{t: t, w: w, node: netnstest.New(t), peer: netnstest.New(t), addr: w.addr(5, 1), port: 10_000, sent: map[changetracker.ServicePortName]uint64{}}
	bits := w.addr(0, 0).BitLen()
	at := func(n int) string { return netip.PrefixFrom(w.addr(5, n), bits-8).String() }
	netnstest.Connect(t, c.node, []string{at(1)}, c.peer, []string{at(2)})
	netnstest.Check(t, c.node.AddRoute(netip.PrefixFrom(w.addr(0, 0), 8).Masked(), w.addr(5, 2)))
	c.Engine = c.engine()
	return c
}

// engine returns another engine of the node, as after a restart.
func (c *counted) engine() *Engine { return c.w.counting(c.t, c.node, true) }

func (w *world) counting(t *testing.T, ns *netns.NS, on bool) *Engine {
	t.Helper()
	e, err := NewEngine(Config{Config: proxier.Config{NetNS: ns.Path(), CountConnections: on}}, w.family, proxier.Deps{})
	netnstest.Check(t, err)
	t.Cleanup(func() { netnstest.Check(t, e.Close()) })
	return e
}

// connect opens connections from the node to a frontend of a service port. Each is a datagram
// from another port.
func (c *counted) connect(s *desired.Service, f *desired.Frontend, n int) {
	c.t.Helper()
	to := netip.AddrPortFrom(f.VIP, f.Port)
	if !f.VIP.IsValid() {
		to = netip.AddrPortFrom(c.addr, f.Port)
	}
	for range n {
		c.mu.Lock()
		c.port++
		from := netip.AddrPortFrom(c.addr, c.port)
		c.sent[s.Name]++
		c.mu.Unlock()
		socket, err := c.node.ListenPacket(c.t.Context(), "udp", from.String())
		if err == nil {
			_, err = socket.WriteTo([]byte("x"), net.UDPAddrFromAddrPort(to))
			err = errors.Join(err, socket.Close())
		}
		if err != nil {
			c.t.Errorf("connect to %v: %v", to, err)
		}
	}
}

// connectAtRandom opens connections to frontends that forward the node's own.
func (c *counted) connectAtRandom(m model, n int) {
	c.t.Helper()
	var names []changetracker.ServicePortName
	for name, s := range m {
		if slices.ContainsFunc(s.Frontends, forwards) {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, changetracker.ServicePortName.Compare)
	for range n {
		s := m[names[c.w.rand.IntN(len(names))]]
		f := &s.Frontends[c.w.rand.IntN(len(s.Frontends))]
		if forwards(*f) {
			c.connect(s, f, 1)
		}
	}
}

// forwards reports whether connections from the node reach an endpoint.
func forwards(f desired.Frontend) bool {
	return !f.Restricted && (f.Action == desired.Forward || f.ShortCircuit)
}

// check compares the counts with the number of connections since the engine's first sync.
func (c *counted) check(m model, when string) {
	c.t.Helper()
	got, err := c.Counts(c.t.Context())
	if err != nil {
		c.t.Fatalf("%s: counts: %v", when, err)
	}
	if got.Since.IsZero() {
		c.t.Errorf("%s: nothing counts", when)
	}
	have := byName(c.t, got)
	for name, want := range c.sent {
		s := m[name]
		if s == nil {
			if _, ok := have[name]; ok {
				c.t.Errorf("%s: %s is deleted and has counts", when, name)
			}
			delete(c.sent, name)
			continue
		}
		p := have[name]
		if p.Connections != want {
			c.t.Errorf("%s: %s has %d connections, want %d", when, name, p.Connections, want)
		}
		for _, e := range p.Endpoints {
			if !s.Cluster.Has(e.Endpoint) && !s.Local.Has(e.Endpoint) {
				c.t.Errorf("%s: %s has connections to %s, which is not its endpoint", when, name, e.Endpoint)
			}
		}
	}
}

// byName also checks that no endpoint is there twice, and that their sum is not too large.
func byName(t *testing.T, counts connection.Counts) map[changetracker.ServicePortName]connection.ServicePortCounts {
	t.Helper()
	ports := map[changetracker.ServicePortName]connection.ServicePortCounts{}
	for _, p := range counts.ServicePorts {
		sum, last := uint64(0), netip.AddrPort{}
		for _, e := range p.Endpoints {
			if e.Endpoint.Compare(last) <= 0 {
				t.Errorf("%s: %s is not in order", p.Name, e.Endpoint)
			}
			sum, last = sum+e.Connections, e.Endpoint
		}
		if sum > p.Connections {
			t.Errorf("%s: its endpoints have %d connections, it has %d", p.Name, sum, p.Connections)
		}
		if _, twice := ports[p.Name]; twice {
			t.Errorf("%s is there twice", p.Name)
		}
		ports[p.Name] = p
	}
	return ports
}

// udp makes all service ports UDP, without client limits.
func (w *world) udp(services int) model {
	m := model{}
	for n := range services {
		m[name(n)] = w.service(n)
	}
	return m.udp()
}

func (m model) udp() model {
	for _, s := range m {
		s.Protocol, s.Port.ClientLimit = desired.UDP, changetracker.ClientLimit{}
	}
	return m
}

// Connections are counted exactly over any history of partial and full syncs, with weights, consistent hashes,
// session affinity and every kind of frontend. A restart begins at zero.
func TestConnectionsAreCountedExactly(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		c, m := newCounted(t, w), w.udp(30)
		mustApply(t, c.Engine, m.full(w))
		for i := range 20 {
			c.connectAtRandom(m, w.rand.IntN(20))
			if w.rand.IntN(3) == 0 {
				c.check(m, "between syncs")
			}
			u := m.step(w, 30, 1+w.rand.IntN(8))
			m.udp()
			mustApply(t, c.Engine, u)
			switch {
			case i%10 == 9:
				c.Engine, c.sent = c.engine(), map[changetracker.ServicePortName]uint64{}
				mustApply(t, c.Engine, m.full(w))
			case i%5 == 4:
				mustApply(t, c.Engine, m.full(w)) // deletes counters that do not count any more
				mustWriteNothing(t, c.Engine, m.full(w), "full sync")
			}
			c.connectAtRandom(m, w.rand.IntN(20))
			c.check(m, "after a sync")
		}
		mustList(t, c.node)
	})
}

// TestCountsBesideSyncsNeitherLoseNorDouble: packets, syncs and readings run at once. Endpoints
// change all the time, so that counters change their owners.
func TestCountsBesideSyncsNeitherLoseNorDouble(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		c, m := newCounted(t, w), model{}
		draw := func(n int) *desired.Service {
			s := w.balanced(1+w.rand.IntN(8), changetracker.Random)
			s.Name, s.Protocol, s.Frontends[0].VIP = name(n), desired.UDP, w.addr(96, n)
			ends := s.Cluster.Len()
			s.Cluster = desired.Endpoints{}
			for i := range ends {
				s.Cluster = s.Cluster.With(netip.AddrPortFrom(w.addr(244, 50*i+w.rand.IntN(50)), 8080))
			}
			m[s.Name] = s
			return s
		}
		const services = 20
		for n := range services {
			draw(n)
		}
		mustApply(t, c.Engine, m.full(w))
		targets := make([]*desired.Service, 0, services)
		for _, s := range m {
			targets = append(targets, s)
		}
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() {
			for i := 0; ctx.Err() == nil && i < 20_000; i++ {
				s := targets[i%services]
				c.connect(s, &s.Frontends[0], 1)
			}
		})
		last := map[changetracker.ServicePortName]connection.ServicePortCounts{}
		running.Go(func() {
			for ctx.Err() == nil {
				got, err := c.Counts(ctx)
				if err != nil && ctx.Err() == nil {
					t.Errorf("counts: %v", err)
				}
				now := byName(t, got)
				for name, was := range last {
					if err == nil && now[name].Connections < was.Connections {
						t.Errorf("%s falls from %d to %d connections", name, was.Connections, now[name].Connections)
					}
				}
				if err == nil {
					last = now
				}
			}
		})
		for i := range 300 {
			u := desired.Update{Family: w.family, Globals: w.globals()}
			if i%50 == 49 {
				u = m.full(w)
			}
			s := draw(w.rand.IntN(services))
			u.Changes = append(slices.DeleteFunc(u.Changes, func(c desired.Change) bool { return c.Name == s.Name }),
				desired.Change{Name: s.Name, After: s})
			mustApply(t, c.Engine, u)
		}
		stop()
		running.Wait()
		c.check(m, "after all")
	})
}

// TestALatePacketIsCounted: one that was on its way through the rules when its endpoint was removed
// counts for the service port, after a partial and a full sync, whether the counter was there or not.
func TestALatePacketIsCounted(t *testing.T) {
	for _, full := range []bool{false, true} {
		for _, before := range []int{0, 2} {
			t.Run(fmt.Sprintf("full=%t/before=%d", full, before), func(t *testing.T) {
				eachFamily(t, func(t *testing.T, w *world) {
					c, m := newCounted(t, w), model{}
					s := w.balanced(1, changetracker.Random)
					s.Protocol = desired.UDP
					m[s.Name] = s
					mustApply(t, c.Engine, m.full(w))
					c.connect(s, &s.Frontends[0], 1)
					late := c.counter()
					c.set(late, 0)
					c.Engine, c.sent = c.engine(), map[changetracker.ServicePortName]uint64{}
					mustApply(t, c.Engine, m.full(w))
					c.connect(s, &s.Frontends[0], before)
					c.check(m, "before")

					removed := *s
					removed.Cluster = desired.Endpoints{}
					removed.Frontends = slices.Clone(s.Frontends)
					removed.Frontends[0].Action = desired.Reject
					m[s.Name] = &removed
					u := m.full(w)
					u.Full = full
					mustApply(t, c.Engine, u)
					c.set(late, before+1)
					c.sent[s.Name]++
					c.check(m, "after a late packet")
					mustApply(t, c.Engine, m.full(w))
					mustWriteNothing(t, c.Engine, m.full(w), "full sync")
					c.check(m, "without the counter")
				})
			})
		}
	}
}

// TestCountsOfWhatIsGoneAreForgotten: however many service ports have come and gone, the process knows
// no more counters than the kernel has, and a full sync leaves none there.
func TestCountsOfWhatIsGoneAreForgotten(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		c, none := newCounted(t, w), model{}
		mustApply(t, c.Engine, none.full(w))
		for range 5 {
			m := model{}
			for range 10 {
				for _, balancing := range []changetracker.Balancing{changetracker.Random, changetracker.SourceHash} {
					s := w.balanced(3, balancing)
					s.Name, s.Protocol, s.Frontends[0].VIP = name(len(m)), desired.UDP, w.addr(96, len(m))
					m[s.Name] = s
				}
			}
			u := m.full(w)
			u.Full = false
			mustApply(t, c.Engine, u)
			c.connectAtRandom(m, 20)
			u = none.full(w)
			u.Full = false
			for name := range m {
				u.Changes = append(u.Changes, desired.Change{Name: name})
			}
			mustApply(t, c.Engine, u)
		}
		mustApply(t, c.Engine, none.full(w))
		mustApply(t, c.Engine, none.full(w))
		if n := c.counts.ledger.Len(); n != 0 {
			t.Errorf("%d counters are known of service ports that are gone, want none", n)
		}
	})
}

// counter returns the key of the only counter, as nft prints it.
func (c *counted) counter() (key string) {
	c.t.Helper()
	text := nftOutput(c.t, c.node, "list set "+c.counters())
	found := regexp.MustCompile(`elements = \{ (.+) counter packets`).FindStringSubmatch(text)
	if found == nil {
		c.t.Fatalf("no counter in %s", text)
	}
	return found[1]
}

// set lets the counter have so many packets, as if they came; without any it does not exist.
func (c *counted) set(key string, packets int) {
	c.t.Helper()
	script := "flush set " + c.counters()
	if packets > 0 {
		script += fmt.Sprintf("; add element %s { %s counter packets %d bytes %d }", c.counters(), key, packets, 29*packets)
	}
	mustNFT(c.t, c.node, script)
}

func (c *counted) counters() string {
	return ipKeyword(c.w.family) + " serviceplane " + setName(setEndpointCounters)
}

// The setting of counts takes effect at once, also on the table of another setting. Without counts, nothing that
// costs stays in the table.
func TestSettingOfCountsTakesEffectAtOnce(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		c, m := newCounted(t, w), w.udp(20)
		for _, on := range []bool{false, true, false, true} {
			e := w.counting(t, c.node, on)
			mustApply(t, e, m.full(w))
			mustWriteNothing(t, e, m.full(w), "full sync")
			if listing := mustList(t, c.node); strings.Contains(listing, " counter ") != on {
				t.Errorf("counts %v: the rules count: %v, or elements are left\n%s", on, !on, listing)
			}
			c.sent = map[changetracker.ServicePortName]uint64{}
			c.connectAtRandom(m, 30)
			if c.Engine = e; on {
				c.check(m, "after the setting")
				continue
			}
			if _, err := e.Counts(t.Context()); !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("counts without the setting: %v, want ErrUnsupported", err)
			}
		}
	})
}

// Connections work when there is no room for counters, and connections to other endpoints are still counted.
func TestWithoutRoomForCountersConnectionsWork(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		c, m := newCounted(t, w), model{}
		c.counterLimit = 2
		for n := range 6 {
			s := w.balanced(1, changetracker.Random)
			s.Name, s.Protocol, s.Cluster.Slice()[0] = name(n), desired.UDP, netip.AddrPortFrom(w.addr(5, 2), 8080)
			s.Frontends[0].VIP = w.addr(96, n)
			if n%2 == 1 {
				s.Affinity = time.Hour
			}
			m[s.Name] = s
		}
		netnstest.Serve(t, c.peer, "peer", 8080)
		mustApply(t, c.Engine, m.full(w))
		for n := range 6 {
			s := m[name(n)]
			for range 3 {
				to := netip.AddrPortFrom(s.Frontends[0].VIP, s.Frontends[0].Port)
				if _, err := netns.Ask(t.Context(), c.node, "udp", to, netns.AskOptions{}); err != nil {
					t.Errorf("%s: %v", s.Name, err)
				}
			}
			if n < 4 { // there is room for two in each of the sets
				c.sent[s.Name] = 3
			} else {
				c.sent[s.Name] = 0
			}
		}
		c.check(m, "without room")
	})
}
