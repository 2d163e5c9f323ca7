package userspace

import (
	"context"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// pipes is a network in memory, for synctest: a listener, and endpoints that echo.
type pipes struct {
	incoming chan net.Conn
	once     sync.Once
	closed   chan struct{}
	echoing  sync.WaitGroup
}

func newPipes() *pipes {
	return &pipes{incoming: make(chan net.Conn), closed: make(chan struct{})}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case conn := <-p.incoming:
		return conn, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

// dial connects a client.
func (p *pipes) dial(t *testing.T) net.Conn {
	t.Helper()
	ours, theirs := net.Pipe()
	p.incoming <- theirs
	return ours
}

// echo is the Dial hook: it connects to an endpoint that echoes.
func (p *pipes) echo(context.Context, Connection, netip.AddrPort) (net.Conn, error) {
	ours, theirs := net.Pipe()
	p.echoing.Go(func() { _, _ = io.Copy(theirs, theirs) })
	return ours, nil
}

// lives reports whether a connection works in both directions.
func lives(conn net.Conn) bool {
	if _, err := io.WriteString(conn, "x"); err != nil {
		return false
	}
	_, err := io.ReadFull(conn, make([]byte, 1))
	return err == nil
}

const drain = time.Minute

// draining is an engine with one connection, in memory and in a synctest bubble.
type draining struct {
	*Engine
	*pipes

	conn net.Conn
	a, b netip.AddrPort
}

func testDraining(t *testing.T, limit time.Duration, test func(t *testing.T, d *draining)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		d := &draining{
			pipes: newPipes(), a: netip.MustParseAddrPort("192.0.2.1:80"), b: netip.MustParseAddrPort("192.0.2.2:80"),
		}
		d.Engine = engine(t, func(c *Config) {
			c.Drain = limit
			c.Hooks.Listen = func(context.Context, Site) (net.Listener, error) { return d.pipes, nil }
			c.Hooks.Dial = d.echo
		})
		d.serve(t, d.a)
		d.conn = d.dial(t)
		d.mustLive(t, "at first")
		test(t, d)
		if err := d.Engine.Close(); err != nil {
			t.Errorf("Close = %v, want nil", err)
		}
		d.mustBeCut(t, "after Close")
		d.echoing.Wait()
	})
}

// serve makes these the endpoints.
func (d *draining) serve(t *testing.T, endpoints ...netip.AddrPort) {
	t.Helper()
	apply(t, d.Engine, servicePort("web", v1.ProtocolTCP, []desired.Frontend{clusterIP("10.96.0.1", 80)}, endpoints...))
}

func (d *draining) mustLive(t *testing.T, when string) {
	t.Helper()
	if !lives(d.conn) {
		t.Fatalf("%s: the connection is cut, want it open", when)
	}
}

func (d *draining) mustBeCut(t *testing.T, when string) {
	t.Helper()
	synctest.Wait()
	if lives(d.conn) {
		t.Fatalf("%s: the connection is open, want it cut", when)
	}
}

// Connections to an endpoint that is in no slice are cut if the service port asks for it: CT-10, CT-11.
func TestConnectionsToAnEndpointThatIsInNoSliceAreCut(t *testing.T) {
	testDraining(t, 0, func(t *testing.T, d *draining) {
		list := func(ends bool, listed []netip.AddrPort, serving ...netip.AddrPort) {
			t.Helper()
			s := servicePort("web", v1.ProtocolTCP, []desired.Frontend{clusterIP("10.96.0.1", 80)}, serving...)
			s.Port, s.Listed = &changetracker.ServicePort{EndConnections: ends}, desired.EndpointsOf(listed...)
			apply(t, d.Engine, s)
			time.Sleep(time.Hour)
			synctest.Wait()
		}
		list(false, nil, d.b)
		d.mustLive(t, "without the option")
		_ = d.conn.Close()
		list(true, []netip.AddrPort{d.a}, d.a)
		d.conn = d.dial(t)
		d.mustLive(t, "with the option")
		list(true, []netip.AddrPort{d.a, d.b}, d.b)
		d.mustLive(t, "while the endpoint does not serve")
		list(true, []netip.AddrPort{d.b}, d.b)
		d.mustBeCut(t, "after the endpoint is gone")
	})
}

func TestConnectionsToAGoneEndpointAreCutAfterDrain(t *testing.T) {
	testDraining(t, drain, func(t *testing.T, d *draining) {
		time.Sleep(time.Hour)
		d.mustLive(t, "while the endpoint is there")
		d.serve(t, d.b)
		time.Sleep(drain - time.Second)
		d.serve(t, d.b) // another update does not extend it
		d.mustLive(t, "a second before the end")
		time.Sleep(time.Second)
		d.mustBeCut(t, "at the end")
	})
}

// If the endpoint is removed again, its connections drain for the whole time again.
func TestAnEndpointThatComesBackInTimeKeepsItsConnections(t *testing.T) {
	testDraining(t, drain, func(t *testing.T, d *draining) {
		d.serve(t, d.b)
		time.Sleep(drain / 2)
		d.serve(t, d.b)
		d.serve(t, d.a, d.b)
		time.Sleep(10 * drain)
		d.mustLive(t, "after it came back")
		d.serve(t, d.b)
		time.Sleep(drain - time.Second)
		d.mustLive(t, "the second time, before the end")
		time.Sleep(time.Second)
		d.mustBeCut(t, "the second time, at the end")
	})
}

func TestConnectionsOfARemovedServiceAreCutAfterDrain(t *testing.T) {
	testDraining(t, drain, func(t *testing.T, d *draining) {
		apply(t, d.Engine)
		time.Sleep(drain - time.Second)
		d.mustLive(t, "a second before the end")
		time.Sleep(time.Second)
		d.mustBeCut(t, "at the end")
	})
}

// Drain begins when a terminating endpoint stops serving.
func TestATerminatingEndpointThatServesKeepsItsConnections(t *testing.T) {
	testDraining(t, drain, func(t *testing.T, d *draining) {
		s := servicePort("web", v1.ProtocolTCP, []desired.Frontend{clusterIP("10.96.0.1", 80)}, d.b)
		s.Serving = desired.EndpointsOf(d.a, d.b)
		apply(t, d.Engine, s)
		time.Sleep(10 * drain)
		d.mustLive(t, "while it terminates")
		d.serve(t, d.b)
		time.Sleep(drain)
		d.mustBeCut(t, "a while after it ended")
	})
}

func TestWithoutDrainConnectionsGoOnForEver(t *testing.T) {
	testDraining(t, 0, func(t *testing.T, d *draining) {
		d.serve(t, d.b)
		time.Sleep(1000 * time.Hour)
		d.mustLive(t, "long after the endpoint went")
		apply(t, d.Engine)
		time.Sleep(1000 * time.Hour)
		d.mustLive(t, "long after the Service went")
	})
}

func TestOnlyConnectionsToTheGoneEndpointAreCut(t *testing.T) {
	testDraining(t, drain, func(t *testing.T, d *draining) {
		d.serve(t, d.b)
		other := d.dial(t)
		defer other.Close()
		if !lives(other) {
			t.Fatal("a connection to the other endpoint does not work")
		}
		time.Sleep(drain)
		d.mustBeCut(t, "at the end")
		if !lives(other) {
			t.Error("the connection to the other endpoint is cut too, want it open")
		}
	})
}

func TestAConnectionThatEndsByItselfLeavesNoDeadline(t *testing.T) {
	testDraining(t, drain, func(t *testing.T, d *draining) {
		drainer := d.services[servicePort("web", v1.ProtocolTCP, nil).Name].drainer
		d.serve(t, d.b)
		_ = d.conn.Close()
		synctest.Wait()
		drainer.mu.Lock()
		defer drainer.mu.Unlock()
		if len(drainer.conns) != 0 {
			t.Errorf("connections %v after the end, want none", drainer.conns)
		}
	})
}

// A waiting connection ends with its Service, or after HoldTimeout.
func TestAHeldConnectionEndsInTime(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(t *testing.T, e *Engine)
		wait time.Duration
	}{
		"timeout":         {func(*testing.T, *Engine) {}, 2 * time.Minute},
		"Service removed": {func(t *testing.T, e *Engine) { apply(t, e) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				network := newPipes()
				e := engine(t, func(c *Config) {
					c.Hooks.Listen = func(context.Context, Site) (net.Listener, error) { return network, nil }
					c.Hooks.Activate = func(context.Context, changetracker.ServicePortName) {}
				})
				apply(t, e, web(v1.ProtocolTCP))
				conn := network.dial(t)
				defer conn.Close()
				synctest.Wait()
				began := time.Now()
				c.end(t, e)
				if _, err := conn.Read(make([]byte, 1)); err == nil {
					t.Error("an answer, want an error")
				}
				if got := time.Since(began); got != c.wait {
					t.Errorf("it ended after %v, want %v", got, c.wait)
				}
				if err := e.Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// stuck is a Dial hook: its endpoint reads nothing.
func stuck(context.Context, Connection, netip.AddrPort) (net.Conn, error) {
	ours, _ := net.Pipe()
	return ours, nil
}

// The endpoint does not read the header of the PROXY protocol.
func TestCloseEndsAnEndpointThatTakesNoHeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := newPipes()
		e := engine(t, func(c *Config) {
			c.ProxyProtocol = true
			c.Hooks.Listen = func(context.Context, Site) (net.Listener, error) { return network, nil }
			c.Hooks.Dial = stuck
		})
		apply(t, e, web(v1.ProtocolTCP, netip.MustParseAddrPort("192.0.2.1:80")))
		conn := network.dial(t)
		defer conn.Close()
		synctest.Wait()
		if err := e.Close(); err != nil { // returns
			t.Error(err)
		}
	})
}

// A UDP flow stays with a terminating endpoint while that serves.
func TestUDPFlowsStayWithAnEndpointThatServes(t *testing.T) {
	a, b := udpServer(t, "a"), udpServer(t, "b")
	e := engine(t)
	frontends := []desired.Frontend{clusterIP("10.96.0.1", 53)}
	apply(t, e, servicePort("web", v1.ProtocolUDP, frontends, a))
	conn := dialUDP(t, at(t, e, RoleInternal))
	answers := func(when, want string) {
		t.Helper()
		if got := exchange(t, conn, "hi"); got != want {
			t.Errorf("%s: answer %q, want %q", when, got, want)
		}
	}
	answers("at first", "ahi")
	terminating := servicePort("web", v1.ProtocolUDP, frontends, b)
	terminating.Serving = servicePort("web", v1.ProtocolUDP, frontends, a, b).Cluster
	apply(t, e, terminating)
	answers("while it terminates", "ahi")
	if other := exchange(t, dialUDP(t, at(t, e, RoleInternal)), "hi"); other != "bhi" {
		t.Errorf("answer %q to a new client, want %q", other, "bhi")
	}
	apply(t, e, servicePort("web", v1.ProtocolUDP, frontends, b))
	answers("after it ended", "bhi")
}
