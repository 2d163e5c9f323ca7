package userspace

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// portalled is a running Provider with portals of nftables.
type portalled struct {
	*network
	*side
	*proxier.Proxier

	engine *Engine
	heard  *reports
	stop   func() // ends Run, and waits for it
}

// startPortals starts a Provider, which ends with the test.
func startPortals(t *testing.T, n *network, s *side, change ...func(*Config)) *portalled {
	t.Helper()
	netnstest.Check(t, n.node.AddRoute(s.vipRange, s.away)) // the node's own packets to VIPs need a route
	p := &portalled{network: n, side: s, heard: &reports{}}
	config := Config{Config: proxier.Config{
		Families: []v1.IPFamily{s.family}, NetNS: n.node.Path(), Node: changetracker.Node{Name: "node", Addresses: []netip.Addr{s.node}},
		Runner: runner.Options{MinInterval: runner.Unlimited},
	}}
	deps := proxier.Deps{Observer: p.heard, Conntrack: conntrack.New(conntrack.Options{NetNS: n.node.Path()})}
	config.Portals = func(family v1.IPFamily) (proxier.Engine, error) {
		return nftables.NewEngine(nftables.Config{Config: config.Config}, family, proxier.Deps{})
	}
	for _, c := range change {
		c(&config)
	}
	var err error
	if p.engine, err = NewEngine(config, s.family, deps); err == nil {
		p.Proxier, err = proxier.New(config.Config, deps, map[v1.IPFamily]proxier.Engine{s.family: p.engine})
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	var stopped atomic.Bool
	p.stop = func() {
		if cancel(); !stopped.Swap(true) {
			if err := <-done; err != nil {
				t.Errorf("Run = %v, want nil", err)
			}
		}
	}
	t.Cleanup(func() {
		p.stop()
		if err := p.engine.Close(); err != nil {
			t.Errorf("Close = %v, want nil", err)
		}
	})
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	return p
}

const nodePortNumber = 30080

// service returns a Service with a VIP of the network, over TCP and UDP, and a node port
// unless that is 0.
func (p *portalled) service(name string, vip int, nodePort int32) *v1.Service {
	return proxiertest.Service("test", name, proxiertest.ClusterIPs(p.vips[vip].String()),
		proxiertest.NodePort("t", v1.ProtocolTCP, 80, nodePort), proxiertest.NodePort("u", v1.ProtocolUDP, 80, nodePort))
}

// slice returns an EndpointSlice with a port of the network.
func (p *portalled) slice(name string, port int32, endpoints ...proxiertest.SliceOption) *discovery.EndpointSlice {
	family := discovery.AddressTypeIPv4
	if p.family == v1.IPv6Protocol {
		family = discovery.AddressTypeIPv6
	}
	return proxiertest.Slice("test", name, family, append(endpoints,
		proxiertest.SlicePort("t", v1.ProtocolTCP, port), proxiertest.SlicePort("u", v1.ProtocolUDP, port))...)
}

// serve adds a Service and its endpoint.
func (p *portalled) serve(name string, vip int, nodePort, port int32) *v1.Service {
	s := p.service(name, vip, nodePort)
	p.OnServiceAdd(s)
	p.OnEndpointSliceAdd(p.slice(name, port, proxiertest.Endpoint(p.away().String())))
	return s
}

func (p *portalled) away() netip.Addr         { return p.side.away }
func (p *portalled) vip(i int) netip.AddrPort { return netip.AddrPortFrom(p.vips[i], 80) }
func (p *portalled) nodePort() netip.AddrPort { return netip.AddrPortFrom(p.side.node, nodePortNumber) }

func (p *portalled) mustSync(t *testing.T) {
	t.Helper()
	if err := proxiertest.Sync(t.Context(), p); err != nil {
		t.Fatalf("Sync = %v, want nil", err)
	}
}

// mustFailFor checks that a sync fails only for the service ports of one Service.
func (p *portalled) mustFailFor(t *testing.T, name string, want error) {
	t.Helper()
	err := proxiertest.Sync(t.Context(), p)
	if one, ok := errors.AsType[*proxier.ServiceError](err); !ok || one.Name.Name != name || !errors.Is(err, want) {
		t.Fatalf("Sync = %v, want a ServiceError of %s: %v", err, name, want)
	}
	if got, want := strings.Count(err.Error(), "service port test/"), strings.Count(err.Error(), "service port test/"+name+":"); got != want {
		t.Errorf("Sync = %v, want only service ports of %s", err, name)
	}
}

// Another program uses the node port. Only that service port has an error, its ClusterIP
// works, and its node port opens as soon as it is free.
func TestANodePortOfSomebodyElse(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		program, err := netns.Serve(t.Context(), n.node, "program", nodePortNumber)
		netnstest.Check(t, err)
		p := startPortals(t, n, s)
		p.serve("web", 0, nodePortNumber, 8081)
		p.serve("other", 1, 30081, 8082)
		p.mustFailFor(t, "web", syscall.EADDRINUSE)
		for protocol := range bothProtocols() {
			mustAnswer(t, n.away, protocol, p.vip(0), "one")
			mustAnswer(t, n.away, protocol, p.vip(1), "two")
			mustAnswer(t, n.away, protocol, netip.AddrPortFrom(s.node, 30081), "two")
			mustAnswer(t, n.away, protocol, p.nodePort(), "program")
		}
		if err := program.Close(); err != nil {
			t.Fatal(err)
		}
		p.mustSync(t)
		for protocol := range bothProtocols() {
			mustAnswer(t, n.away, protocol, p.nodePort(), "one")
			mustAnswer(t, n.node, protocol, p.nodePort(), "one")
		}
	})
}

// mustBind checks whether a program of the node can bind a port.
func mustBind(t *testing.T, ns *netns.NS, at netip.AddrPort, want error) {
	t.Helper()
	l, err := ns.Listen(t.Context(), "tcp", at.String())
	if !errors.Is(err, want) {
		t.Errorf("listen on %v = %v, want %v", at, err, want)
	}
	if err == nil {
		_ = l.Close()
	}
	c, err := ns.ListenPacket(t.Context(), "udp", at.String())
	if !errors.Is(err, want) {
		t.Errorf("listen on %v for datagrams = %v, want %v", at, err, want)
	}
	if err == nil {
		_ = c.Close()
	}
}

// No other program can bind a node port until its Service is deleted.
func TestAClaimedNodePortIsNobodyElses(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		p := startPortals(t, n, s)
		web := p.serve("web", 0, nodePortNumber, 8081)
		p.mustSync(t)
		everywhere := netip.AddrPortFrom(netip.PrefixFrom(s.node, 0).Masked().Addr(), nodePortNumber)
		mustBind(t, n.node, p.nodePort(), syscall.EADDRINUSE)
		mustBind(t, n.node, everywhere, syscall.EADDRINUSE)
		for protocol := range bothProtocols() {
			mustAnswer(t, n.away, protocol, p.nodePort(), "one")
		}
		p.OnServiceDelete(web)
		p.mustSync(t)
		mustBind(t, n.node, p.nodePort(), nil)
		mustBind(t, n.node, everywhere, nil)
		for protocol := range bothProtocols() {
			mustNotAnswer(t, n.away, protocol, p.nodePort(), netns.ErrRefused)
		}
	})
}

// With ShareNodePorts, the portal works although another program uses the port.
func TestASharedNodePortIsLedToThePortal(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		netnstest.Serve(t, n.node, "program", nodePortNumber)
		p := startPortals(t, n, s, func(c *Config) { c.ShareNodePorts = true })
		p.serve("web", 0, nodePortNumber, 8081)
		p.mustSync(t)
		for protocol := range bothProtocols() {
			mustAnswer(t, n.away, protocol, p.nodePort(), "one")
		}
	})
}

// Clients that connect to a proxy port itself are refused.
func TestNobodyGetsAroundPoliciesByAProxyPort(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		p := startPortals(t, n, s)
		p.serve("web", 0, nodePortNumber, 8081)
		p.mustSync(t)
		sites := p.engine.Sockets()
		if len(sites) != 2 {
			t.Fatalf("sockets %v, want one of each protocol", sites)
		}
		for _, site := range sites {
			protocol := strings.ToLower(string(site.Name.Protocol))
			mustNotAnswer(t, n.away, protocol, site.Addr, netns.ErrRefused)
			mustNotAnswer(t, n.node, protocol, site.Addr, netns.ErrRefused)
		}
		for protocol := range bothProtocols() {
			mustAnswer(t, n.away, protocol, p.vip(0), "one")
			mustAnswer(t, n.node, protocol, p.vip(0), "one")
		}
	})
}

// mustRunNFT runs nft inside a namespace.
func mustRunNFT(t *testing.T, ns *netns.NS, arguments ...string) string {
	t.Helper()
	var out []byte
	err := ns.Do(func() (err error) {
		out, err = exec.CommandContext(t.Context(), "nft", arguments...).CombinedOutput()
		return err
	})
	if errors.Is(err, exec.ErrNotFound) {
		t.Skipf("needs the program nft: %v", err)
	}
	if err != nil {
		t.Fatalf("nft %v: %v\n%s", arguments, err, out)
	}
	return string(out)
}

// Damage is repaired at once, and Cleanup removes all portals.
func TestDamagedPortalsAreRepaired(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		p := startPortals(t, n, s)
		p.serve("web", 0, nodePortNumber, 8081)
		p.mustSync(t)
		mustAnswer(t, n.away, "tcp", p.vip(0), "one")
		mustRunNFT(t, n.node, "flush", "ruleset")
		poll.Until(t, "the portals are repaired", func() bool {
			_, err := netns.Ask(t.Context(), n.away, "tcp", p.vip(0), netns.AskOptions{Timeout: time.Second})
			return err == nil
		})
		p.stop()
		if err := p.Cleanup(t.Context()); err != nil {
			t.Fatalf("Cleanup = %v, want nil", err)
		}
		if left := mustRunNFT(t, n.node, "list", "ruleset"); strings.TrimSpace(left) != "" {
			t.Errorf("after Cleanup:\n%s\nwant no table", left)
		}
		mustBind(t, n.node, p.nodePort(), nil)
	})
}

// The node's address changes; open connections continue.
func TestSocketsMoveWithTheNodesAddress(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		next := s.more[0]
		netnstest.Check(t, n.node.AddAddrs("eth0", netip.PrefixFrom(next, s.vipRange.Bits())))
		p := startPortals(t, n, s)
		p.serve("web", 0, nodePortNumber, 8081)
		p.mustSync(t)
		flow, err := netns.Open(t.Context(), n.away, "tcp", p.vip(0), netns.AskOptions{Timeout: patience})
		if err != nil {
			t.Fatal(err)
		}
		defer flow.Close()
		if _, err := flow.Ask(t.Context()); err != nil {
			t.Fatal(err)
		}
		p.OnNodeChange(changetracker.Node{Name: "node", Addresses: []netip.Addr{next}})
		p.mustSync(t)
		for _, site := range p.engine.Sockets() {
			if site.Addr.Addr() != next {
				t.Errorf("a socket at %v, want it at %v", site.Addr, next)
			}
		}
		if answer, err := flow.Ask(t.Context()); err != nil || answer.Server != "one" {
			t.Errorf("the open connection after the move: %v, %v, want it to work", answer, err)
		}
		for protocol := range bothProtocols() {
			mustAnswer(t, n.away, protocol, p.vip(0), "one")
			mustAnswer(t, n.away, protocol, netip.AddrPortFrom(next, nodePortNumber), "one")
		}
		mustBind(t, n.node, netip.AddrPortFrom(next, nodePortNumber), syscall.EADDRINUSE)
		mustBind(t, n.node, netip.AddrPortFrom(s.node, nodePortNumber), nil)
	})
}

// Scale from zero: a client of the ClusterIP waits for the first endpoint.
func TestAClientWaitsForTheFirstEndpoint(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		activated := make(chan string, 16)
		p := startPortals(t, n, s, func(c *Config) {
			c.Hooks.Activate = func(_ context.Context, name changetracker.ServicePortName) { activated <- name.Name }
		})
		p.OnServiceAdd(p.service("web", 0, nodePortNumber))
		p.mustSync(t)
		answers := make(chan error, 1)
		go func() {
			answer, err := netns.Ask(t.Context(), n.away, "tcp", p.vip(0), netns.AskOptions{Timeout: patience})
			if err == nil && answer.Server != "one" {
				err = errors.New("answer of " + answer.Server)
			}
			answers <- err
		}()
		select {
		case got := <-activated:
			if got != "web" {
				t.Errorf("activated %q, want %q", got, "web")
			}
		case err := <-answers:
			t.Fatalf("answer %v without a call of Activate", err)
		}
		select {
		case err := <-answers:
			t.Fatalf("answer %v before there was an endpoint", err)
		case <-time.After(2 * time.Second):
		}
		p.OnEndpointSliceAdd(p.slice("web", 8081, proxiertest.Endpoint(s.away.String())))
		p.mustSync(t)
		if err := <-answers; err != nil {
			t.Errorf("after 2s: %v, want an answer", err)
		}
		if report := p.heard.next(t); report.Held < 2*time.Second || report.Outcome != connection.Served {
			t.Errorf("%v after it was held for %v, want served after 2s or more", report.Outcome, report.Held)
		}
	})
}

// Reports have the VIP that the client dialled, and not the proxy port.
func TestReportsNameTheVIP(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		p := startPortals(t, n, s)
		p.serve("web", 0, nodePortNumber, 8081)
		p.mustSync(t)
		for _, client := range []*netns.NS{n.away, n.node} {
			for _, to := range []netip.AddrPort{p.vip(0), p.nodePort()} {
				conn := dialIn(t, client, "tcp", to)
				from := addrPort(conn.LocalAddr())
				_ = conn.Close()
				got := p.heard.next(t)
				if got.Dialled != to || got.Client != from || got.Endpoint != s.one() || got.Family != s.family {
					t.Errorf("%v asked %v of %v (%v), want %v to have asked %v of %v", got.Client, got.Dialled, got.Endpoint, got.Family, from, to, s.one())
				}
			}
		}
	})
}

// The client uses Multipath TCP; the report has the VIP that it dialled.
func TestAClientOfMultipathTCPIsServed(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		p := startPortals(t, n, s)
		p.serve("web", 0, nodePortNumber, 8081)
		p.mustSync(t)
		dialer := net.Dialer{Timeout: patience}
		dialer.SetMultipathTCP(true)
		var conn net.Conn
		netnstest.Check(t, n.away.Do(func() (err error) {
			conn, err = dialer.DialContext(t.Context(), "tcp", p.vip(0).String())
			return err
		}))
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(patience))
		_, _ = io.WriteString(conn, "?\n")
		if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.HasPrefix(line, "one ") {
			t.Errorf("answer %q, %v, want one of %q", line, err, "one")
		}
		_ = conn.Close()
		if got := p.heard.next(t); got.Dialled != p.vip(0) || got.Outcome != connection.Served {
			t.Errorf("asked %v: %v (%v), want %v to be served", got.Dialled, got.Outcome, got.Err, p.vip(0))
		}
	})
}

// blind returns an engine whose portals do nothing, so that all clients bypass them.
func blind(t *testing.T, n *network, s *side) *Engine {
	t.Helper()
	return inNode(t, n, s.family, Config{
		Listen:  []netip.Addr{s.node},
		Portals: func(v1.IPFamily) (proxier.Engine, error) { return &proxiertest.RecordingEngine{}, nil },
	})
}

func everyNodePort(s *side) desired.Globals {
	return desired.Globals{NodePortAddresses: []netip.Prefix{netip.PrefixFrom(s.node, 0).Masked()}}
}

// reserveBoth programs a node port of both protocols, which then nobody else can bind, and
// returns its address.
func reserveBoth(t *testing.T, n *network, s *side, e *Engine) netip.AddrPort {
	t.Helper()
	var services []*desired.Service
	for _, protocol := range bothProtocols() {
		services = append(services, servicePort("web", protocol, []desired.Frontend{nodePort(nodePortNumber)}, s.one()))
	}
	program(t, e, everyNodePort(s), services...)
	at := netip.AddrPortFrom(s.node, nodePortNumber)
	mustBind(t, n.node, at, syscall.EADDRINUSE)
	return at
}

// A client that bypasses the portals is refused at a reserved port.
func TestWhoComesPastThePortalsIsRefused(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		e := blind(t, n, s)
		at := reserveBoth(t, n, s, e)
		for protocol := range bothProtocols() {
			mustNotAnswer(t, n.away, protocol, at, netns.ErrRefused)
			mustNotAnswer(t, n.node, protocol, at, netns.ErrRefused)
		}
	})
}

// While a process only lingers, the next one gets its node ports.
func TestWhoLingersReservesNothing(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		e := inNode(t, n, s.family, Config{
			Listen: []netip.Addr{s.node}, Linger: time.Hour, // or lingerPause, without connections
			Portals: func(v1.IPFamily) (proxier.Engine, error) { return &proxiertest.RecordingEngine{}, nil },
		})
		at := reserveBoth(t, n, s, e)
		closed := make(chan error, 1)
		go func() { closed <- e.Close() }()
		poll.Until(t, "the ports are free", func() bool {
			l, err := n.node.Listen(t.Context(), "tcp", at.String())
			if err != nil {
				return false
			}
			_ = l.Close()
			c, err := n.node.ListenPacket(t.Context(), "udp", at.String())
			if err != nil {
				return false
			}
			_ = c.Close()
			return true
		})
		select {
		case err := <-closed:
			t.Errorf("Close = %v before the ports were free, want it to linger", err)
		default:
		}
		if err := <-closed; err != nil {
			t.Errorf("Close = %v, want nil", err)
		}
	})
}

// A reserved port moves between Services in a single update, in any order of the Services.
func TestAClaimMovesFromOneServiceToAnother(t *testing.T) {
	n, s := newNetwork(t), sides()[0]
	e := blind(t, n, &s)
	for round, owner := range []string{"a", "b", "a"} {
		var services []*desired.Service
		for _, name := range []string{"a", "b"} {
			one := servicePort(name, v1.ProtocolTCP, nil, s.one())
			if name == owner {
				one.Frontends = []desired.Frontend{nodePort(nodePortNumber)}
			}
			services = append(services, one)
		}
		if _, err := e.Apply(t.Context(), desired.Update{Full: round == 0, Globals: everyNodePort(&s), Changes: desired.ChangesTo(services...)}); err != nil {
			t.Errorf("round %d: Apply = %v, want nil", round, err)
		}
		if l, err := n.node.Listen(t.Context(), "tcp", netip.AddrPortFrom(s.node, nodePortNumber).String()); err == nil {
			_ = l.Close()
			t.Errorf("round %d: a program can bind the port, want it reserved", round)
		}
	}
}

// A refusal reaches a UDP client (PKT-97): an endpoint where nobody listens refuses, from outside and from the
// node, at a VIP and at a node port. Then somebody listens.
func TestARefusalReachesAUDPClient(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		p := startPortals(t, n, s)
		p.serve("web", 0, nodePortNumber, 9999)
		p.mustSync(t)
		for _, from := range []*netns.NS{n.away, n.node} {
			mustNotAnswer(t, from, "udp", p.vip(0), netns.ErrRefused)
			mustNotAnswer(t, from, "udp", p.nodePort(), netns.ErrRefused)
		}
		netnstest.Serve(t, n.away, "late", 9999)
		for _, from := range []*netns.NS{n.away, n.node} {
			mustAnswer(t, from, "udp", p.vip(0), "late")
		}
	})
}

// An endpoint that is a frontend is refused (PKT-95): its own frontend, that of a ring of two, a node port at an
// address of the node, known or not. Each client makes the connections of the Services that it passes, and no more.
func TestAnEndpointThatIsAFrontendIsRefused(t *testing.T) {
	eachFamily(t, func(t *testing.T, n *network, s *side) {
		other := netip.PrefixFrom(s.more[0], s.more[0].BitLen())
		netnstest.Check(t, n.node.AddAddrs("lo", other))
		p := startPortals(t, n, s, func(c *Config) {
			c.NodePorts = proxier.NodePorts{Addresses: []netip.Prefix{netip.PrefixFrom(s.node, 0).Masked()}}
		})
		p.OnServiceAdd(p.service("web", 0, nodePortNumber))
		p.OnServiceAdd(p.service("ring", 1, 0))
		back := p.slice("ring", 80, proxiertest.Endpoint(s.vips[0].String()))
		p.OnEndpointSliceAdd(back)
		var before *discovery.EndpointSlice
		for title, endpoint := range map[string]netip.AddrPort{
			"its own VIP": p.vip(0), "a ring of two": p.vip(1), "its node port": p.nodePort(), "its node port at another address": netip.AddrPortFrom(s.more[0], nodePortNumber),
		} {
			slice := p.slice("web", int32(endpoint.Port()), proxiertest.Endpoint(endpoint.Addr().String()))
			p.OnEndpointSliceUpdate(before, slice)
			before = slice
			p.mustSync(t)
			for _, from := range []*netns.NS{n.away, n.node} {
				for protocol := range bothProtocols() {
					if _, err := netns.Ask(t.Context(), from, protocol, p.vip(0), netns.AskOptions{Timeout: 50 * time.Millisecond}); err == nil {
						t.Errorf("%s, %s: an answer, want none", title, protocol)
					}
					if r := p.heard.next(t); !errors.Is(r.Err, errLeadsBack) || r.Outcome != connection.Unreachable || !strings.Contains(r.Err.Error(), "test/") {
						t.Errorf("%s, %s: %v, %v, want the Service to which it leads", title, protocol, r.Outcome, r.Err)
					}
				}
			}
		}
		p.stop()
		if more := p.heard.all; len(more) > 0 {
			t.Errorf("%d more connections, want one for each of a client", len(more))
		}
	})
}
