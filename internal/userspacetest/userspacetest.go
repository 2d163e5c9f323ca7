// Package userspacetest runs a userspace engine on loopback, for tests of what observes connections.
package userspacetest

import (
	"context"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
	"github.com/serviceplane/serviceplane/userspace"
)

// World is a Provider with one engine. Endpoints at 127.0.0.2 refuse connections and are tried first.
type World struct {
	*proxier.Proxier

	engine *userspace.Engine
}

// HoldTimeout is how long the engine holds connections of Services without endpoints.
const HoldTimeout = 50 * time.Millisecond

// New runs a World until the test ends.
func New(tb testing.TB, observer proxier.Observer, change ...func(*userspace.Config)) *World {
	tb.Helper()
	config := userspace.Config{
		Config: proxier.Config{
			Families: []v1.IPFamily{v1.IPv4Protocol}, Runner: runner.Options{MinInterval: runner.Unlimited},
			Tracker: changetracker.ObjectOptions{LoopbackEndpoints: true},
		},
		UDPIdle:     200 * time.Millisecond,
		HoldTimeout: HoldTimeout,
		Hooks:       userspace.Hooks{Pick: deadFirst, Activate: func(context.Context, changetracker.ServicePortName) {}},
	}
	for _, c := range change {
		c(&config)
	}
	config, deps := config.WithDefaults(), proxier.Deps{Observer: observer, Health: proxier.NoHealth()}
	engine, err := userspace.NewEngine(config, v1.IPv4Protocol, deps)
	if err != nil {
		tb.Fatal(err)
	}
	p, err := proxier.New(config.Config, deps, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	if err != nil {
		tb.Fatal(err)
	}
	proxiertest.Run(tb, p)
	return &World{p, engine}
}

func deadFirst(_ userspace.Connection, endpoints, tried []netip.AddrPort) (netip.AddrPort, bool) {
	i := slices.IndexFunc(endpoints, func(e netip.AddrPort) bool { return e.Addr() == netip.MustParseAddr("127.0.0.2") })
	if i < 0 || len(tried) > 0 {
		return netip.AddrPort{}, false
	}
	return endpoints[i], true
}

// Add adds a Service with endpoints at some addresses, all with the same port.
func (w *World) Add(name, vip string, protocol v1.Protocol, port uint16, addresses ...string) {
	w.OnServiceAdd(proxiertest.Service("test", name, proxiertest.ClusterIPs(vip), proxiertest.Port("main", protocol, 80)))
	options := []proxiertest.SliceOption{proxiertest.SlicePort("main", protocol, int32(port))}
	for _, a := range addresses {
		options = append(options, proxiertest.Endpoint(a))
	}
	w.OnEndpointSliceAdd(proxiertest.Slice("test", name, discovery.AddressTypeIPv4, options...))
}

// Socket returns where a Service listens.
func (w *World) Socket(tb testing.TB, name string) netip.AddrPort {
	tb.Helper()
	sites := w.engine.Sockets()
	i := slices.IndexFunc(sites, func(s userspace.Site) bool { return s.Name.Name == name })
	if i < 0 {
		tb.Fatalf("%s has no socket", name)
	}
	return sites[i].Addr
}

// Ask sends hello to a Service. It returns the answer, or "" if there is none, and the address of the client.
func (w *World) Ask(tb testing.TB, network, name string) (answer string, client netip.AddrPort) {
	tb.Helper()
	conn, err := (&net.Dialer{Timeout: poll.Timeout}).DialContext(tb.Context(), network, w.Socket(tb, name).String())
	if err != nil {
		tb.Fatalf("dial %s: %v", name, err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(poll.Timeout))
	if _, err := io.WriteString(conn, "hello"); err != nil {
		tb.Fatal(err)
	}
	heard := make([]byte, 100)
	n, _ := conn.Read(heard) // an error counts as an empty answer
	return string(heard[:n]), netip.MustParseAddrPort(conn.LocalAddr().String())
}

// Endpoint answers TCP clients on 127.0.0.1 until the test ends.
func Endpoint(tb testing.TB) (port uint16) {
	tb.Helper()
	l, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		tb.Fatal(err)
	}
	serve(tb, l, func() error {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		_, _ = io.ReadFull(conn, make([]byte, len("hello")))
		_, _ = io.WriteString(conn, "you said hello")
		return conn.Close()
	})
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

// DatagramEndpoint is Endpoint for UDP.
func DatagramEndpoint(tb testing.TB) (port uint16) {
	tb.Helper()
	c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		tb.Fatal(err)
	}
	serve(tb, c, func() error {
		_, from, err := c.ReadFromUDPAddrPort(make([]byte, 100))
		if err == nil {
			_, err = c.WriteToUDPAddrPort([]byte("you said hello"), from)
		}
		return err
	})
	return netip.MustParseAddrPort(c.LocalAddr().String()).Port()
}

// serve calls once until it fails, at the end of the test.
func serve(tb testing.TB, socket io.Closer, once func() error) {
	tb.Helper()
	var running sync.WaitGroup
	running.Go(func() {
		for once() == nil {
		}
	})
	tb.Cleanup(func() {
		_ = socket.Close()
		running.Wait()
	})
}
