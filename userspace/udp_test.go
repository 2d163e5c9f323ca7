package userspace

import (
	"context"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// An attempt's timeout starts with the dial. UDP has no timeout.
func TestABusyMachineIsNoSlowEndpoint(t *testing.T) {
	protocols := map[string]desired.Protocol{"tcp4": desired.TCP, "tcp6": desired.TCP, "udp4": desired.UDP, "udp6": desired.UDP}
	loopback := map[byte]string{'4': "127.0.0.1:0", '6': "[::1]:0"}
	for network, protocol := range protocols {
		t.Run(network, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &socket{Engine: &Engine{}, service: &service{balancer: newBalancer(&affinityShare{})}, protocol: protocol, site: Site{Network: network}}
				s.refuser.inside = func(f func() error) error {
					time.Sleep(time.Hour) // the thread is not scheduled
					return f()
				}
				endpoint := listens(t, network, loopback[network[3]])
				conn, err := s.attempt(t.Context(), Connection{}, &connection.Report{}, endpoint, Config{}.WithDefaults().DialTimeouts[0])
				if err != nil {
					t.Fatalf("attempt = %v, want a connection", err)
				}
				_ = conn.Close()
			})
		})
	}
}

// listens opens a socket, without a server, and returns its address.
func listens(t *testing.T, network, address string) netip.AddrPort {
	t.Helper()
	var l net.ListenConfig
	if network[:3] == "tcp" {
		listener, err := l.Listen(t.Context(), network, address)
		if err != nil {
			t.Skipf("this machine has no %s: %v", network, err)
		}
		t.Cleanup(func() { _ = listener.Close() })
		return addrPort(listener.Addr())
	}
	conn, err := l.ListenPacket(t.Context(), network, address)
	if err != nil {
		t.Skipf("this machine has no %s: %v", network, err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return addrPort(conn.LocalAddr())
}

// letters is a UDP socket in memory, with one client.
type letters struct {
	net.PacketConn

	in, out chan string
	closed  chan struct{}
}

func (l *letters) LocalAddr() net.Addr { return &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

func (l *letters) ReadFrom(b []byte) (int, net.Addr, error) {
	select {
	case datagram := <-l.in:
		return copy(b, datagram), &net.UDPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 2}, nil
	case <-l.closed:
		return 0, nil, net.ErrClosed
	}
}

func (l *letters) WriteTo(b []byte, _ net.Addr) (int, error) {
	l.out <- string(b)
	return len(b), nil
}

func (l *letters) Close() error {
	close(l.closed)
	return nil
}

// line is a flow's socket in memory. The endpoint at the other end echoes.
type line struct {
	net.Conn

	far    net.Conn
	closed chan struct{}
	// writing is called before a datagram is sent, and late after a read deadline has
	// passed. Each is called once.
	writing atomic.Pointer[func() error]
	late    atomic.Pointer[func()]
}

func (l *line) Write(b []byte) (int, error) {
	if f := l.writing.Swap(nil); f != nil {
		if err := (*f)(); err != nil {
			return 0, err
		}
	}
	return l.Conn.Write(b)
}

func (l *line) Read(b []byte) (int, error) {
	n, err := l.Conn.Read(b)
	if isTimeout(err) {
		if f := l.late.Swap(nil); f != nil {
			(*f)()
		}
	}
	return n, err
}

func (l *line) Close() error {
	select {
	case <-l.closed:
	default:
		close(l.closed)
	}
	return l.Conn.Close()
}

// Each case ends the flow after the second datagram has found it.
func TestNoDatagramIsLostWhenItsFlowEnds(t *testing.T) {
	const idle = time.Minute
	a, b := netip.MustParseAddrPort("192.0.2.11:80"), netip.MustParseAddrPort("192.0.2.12:80")
	for name, end := range map[string]func(t *testing.T, e *Engine, l *line, used netip.AddrPort) error{
		"its endpoint goes": func(t *testing.T, e *Engine, _ *line, used netip.AddrPort) error {
			left := web(v1.ProtocolUDP, map[netip.AddrPort]netip.AddrPort{a: b, b: a}[used])
			return failureOf(e.Apply(t.Context(), desired.Update{Family: v1.IPv4Protocol, Full: true, Changes: desired.ChangesTo(left)}))
		},
		"reading is refused": func(_ *testing.T, _ *Engine, l *line, _ netip.AddrPort) error {
			_ = l.far.Close()
			<-l.closed
			return nil
		},
		"writing is refused": func(*testing.T, *Engine, *line, netip.AddrPort) error {
			return &net.OpError{Op: "write", Err: syscall.ECONNREFUSED}
		},
		"it was quiet": nil,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := &letters{in: make(chan string), out: make(chan string, 1), closed: make(chan struct{})}
				var latest *line
				var used netip.AddrPort
				e := engine(t, func(c *Config) {
					c.UDPIdle = idle
					c.Hooks.ListenPacket = func(context.Context, Site) (net.PacketConn, error) { return client, nil }
					c.Hooks.Dial = func(_ context.Context, _ Connection, endpoint netip.AddrPort) (net.Conn, error) {
						near, far := net.Pipe()
						go func() { _, _ = io.Copy(far, far); _ = far.Close() }()
						latest, used = &line{Conn: near, far: far, closed: make(chan struct{})}, endpoint
						return latest, nil
					}
				})
				apply(t, e, web(v1.ProtocolUDP, a, b))
				want := func(datagram string) {
					t.Helper()
					select {
					case got := <-client.out:
						if got != datagram {
							t.Fatalf("answer %q, want %q", got, datagram)
						}
					case <-time.After(idle / 2):
						t.Fatalf("%q is lost, want an answer", datagram)
					}
				}
				client.in <- "1"
				want("1")
				synctest.Wait()
				l, endpoint := latest, used
				if end != nil {
					writing := func() error { return end(t, e, l, endpoint) }
					l.writing.Store(&writing)
					client.in <- "2"
				} else {
					late := func() {
						client.in <- "2"
						time.Sleep(time.Second) // meanwhile it is written
					}
					l.late.Store(&late)
					time.Sleep(idle)
				}
				want("2")
				if err := e.Close(); err != nil {
					t.Errorf("Close = %v, want nil", err)
				}
			})
		})
	}
}

// The endpoint goes while the socket to it is opened: no later change would end the flow.
func TestAFlowThatBeginsDuringAChangeLeavesItsEndpoint(t *testing.T) {
	a, b := netip.MustParseAddrPort("192.0.2.11:80"), netip.MustParseAddrPort("192.0.2.12:80")
	synctest.Test(t, func(t *testing.T) {
		client := &letters{in: make(chan string), out: make(chan string, 1), closed: make(chan struct{})}
		var e *Engine
		with := func(endpoint netip.AddrPort) {
			apply(t, e, servicePort("web", v1.ProtocolUDP, web(v1.ProtocolUDP, endpoint).Frontends, endpoint))
		}
		change := func() { with(b) }
		e = engine(t, func(c *Config) {
			c.Hooks.ListenPacket = func(context.Context, Site) (net.PacketConn, error) { return client, nil }
			c.Hooks.Dial = func(_ context.Context, _ Connection, endpoint netip.AddrPort) (net.Conn, error) {
				if change != nil {
					change()
					change = nil
				}
				near, far := net.Pipe()
				go func() {
					defer func() { _ = far.Close() }()
					buffer := make([]byte, 64)
					for {
						if _, err := far.Read(buffer); err != nil {
							return
						}
						_, _ = far.Write([]byte(endpoint.String()))
					}
				}()
				return near, nil
			}
		})
		with(a)
		for _, datagram := range []string{"first", "second"} {
			client.in <- datagram
			synctest.Wait()
			select {
			case got := <-client.out:
				if got != b.String() {
					t.Errorf("%s datagram: answer of %s, want %s", datagram, got, b)
				}
			default:
				t.Errorf("%s datagram is lost", datagram)
			}
		}
		if err := e.Close(); err != nil {
			t.Errorf("Close = %v, want nil", err)
		}
	})
}

// deaf is a socket that is not read, so that writes return the kernel's errors.
type deaf struct {
	*net.UDPConn

	closed context.Context //nolint:containedctx // of the test
	close  context.CancelFunc
}

func (d *deaf) Read([]byte) (int, error) {
	<-d.closed.Done()
	return 0, net.ErrClosed
}

func (d *deaf) Close() error {
	d.close()
	return d.UDPConn.Close()
}

// A write that the kernel refuses begins a new flow.
func TestAWriterThatIsRefusedBeginsAnew(t *testing.T) {
	dead := refusing(t, "udp4")
	e := engine(t, func(c *Config) {
		c.Hooks.Dial = func(ctx context.Context, _ Connection, endpoint netip.AddrPort) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, "udp4", endpoint.String())
			if udp, ok := conn.(*net.UDPConn); ok && endpoint == dead {
				d := &deaf{UDPConn: udp}
				d.closed, d.close = context.WithCancel(context.Background())
				return d, err
			}
			return conn, err
		}
	})
	apply(t, e, web(v1.ProtocolUDP, dead, udpServer(t, "alive")))
	for range 2 { // one of them starts with the dead endpoint
		conn := dialUDP(t, at(t, e, RoleInternal))
		poll.Until(t, "an answer of the other endpoint", func() bool {
			_, _ = io.WriteString(conn, "1")
			_ = conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
			_, err := conn.Read(make([]byte, maxDatagram))
			return err == nil
		})
	}
}
