package userspace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// needsAliases skips the test if 127.0.0.0/8 is not local.
func needsAliases(t *testing.T) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skipf("%s has one loopback address only", runtime.GOOS)
	}
}

// placed returns an engine with AtFrontends.
func placed(t *testing.T, change ...func(*Config)) *Engine {
	t.Helper()
	return engine(t, append(change, func(c *Config) { c.AtFrontends = true })...)
}

// portOn returns a port that is free for TCP and UDP.
func portOn(t *testing.T, addr string) uint16 {
	t.Helper()
	for range 20 {
		l, err := net.Listen("tcp", net.JoinHostPort(addr, "0"))
		if err != nil {
			t.Fatal(err)
		}
		conn, err := net.ListenPacket("udp", l.Addr().String())
		_ = l.Close()
		if err == nil {
			_ = conn.Close()
			return addrPort(l.Addr()).Port()
		}
	}
	t.Fatal("no port is free")
	return 0
}

func clusterIP(addr string, port uint16) desired.Frontend {
	return desired.Frontend{
		Kind: desired.ClusterIP, VIP: netip.MustParseAddr(addr), Port: port, Scope: desired.ScopeCluster, Action: desired.Forward,
	}
}

func nodePort(port uint16) desired.Frontend {
	return desired.Frontend{Kind: desired.NodePort, Port: port, Scope: desired.ScopeCluster, Action: desired.Forward}
}

// servicePort returns a service port with these frontends.
func servicePort(name string, protocol v1.Protocol, frontends []desired.Frontend, endpoints ...netip.AddrPort) *desired.Service {
	s := web(protocol, endpoints...)
	s.Name = changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "test", Name: name}, Protocol: protocol}
	s.Serving, s.Frontends = s.Cluster, frontends
	return s
}

func addrPortOf(addr string, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(addr), port)
}

// mustFail checks that a connection fails.
func mustFail(t *testing.T, to netip.AddrPort) {
	t.Helper()
	if got, err := ask(t, to, "hello"); err == nil {
		t.Errorf("answer %q at %v, want an error", got, to)
	}
}

// There are two ports of one VIP, for both protocols, and one of another VIP.
func TestVIPsAreListenedOnAtTheirOwnPorts(t *testing.T) {
	needsAliases(t)
	first, second := portOn(t, "127.1.2.3"), portOn(t, "127.1.2.3")
	e := placed(t)
	apply(t, e,
		servicePort("first", v1.ProtocolTCP, []desired.Frontend{clusterIP("127.1.2.3", first)}, named(t, "first")),
		servicePort("second", v1.ProtocolTCP, []desired.Frontend{clusterIP("127.1.2.3", second)}, named(t, "second")),
		servicePort("other", v1.ProtocolTCP, []desired.Frontend{clusterIP("127.1.2.4", first)}, named(t, "other")),
		servicePort("first", v1.ProtocolUDP, []desired.Frontend{clusterIP("127.1.2.3", first)}, udpServer(t, "datagram ")),
	)
	mustAsk(t, addrPortOf("127.1.2.3", first), "first heard hello")
	mustAsk(t, addrPortOf("127.1.2.3", second), "second heard hello")
	mustAsk(t, addrPortOf("127.1.2.4", first), "other heard hello")
	if got := exchange(t, dialUDP(t, addrPortOf("127.1.2.3", first)), "hi"); got != "datagram hi" {
		t.Errorf("answer %q, want %q", got, "datagram hi")
	}
	mustFail(t, addrPortOf("127.1.2.4", second))
}

func TestNodePortsListenWhereTheyAreAccepted(t *testing.T) {
	needsAliases(t)
	for name, c := range map[string]struct {
		accepted   []string
		open, shut []string
	}{
		"everywhere":      {[]string{"0.0.0.0/0"}, []string{"127.0.0.1", "127.1.2.5"}, nil},
		"two addresses":   {[]string{"127.1.2.3/32", "127.1.2.4/32"}, []string{"127.1.2.3", "127.1.2.4"}, []string{"127.0.0.1", "127.1.2.5"}},
		"a range":         {[]string{"127.0.0.0/24"}, []string{"127.0.0.1"}, []string{"127.1.2.3"}},
		"nowhere":         {nil, nil, []string{"127.0.0.1"}},
		"another machine": {[]string{"192.0.2.77/32", "127.1.2.3/32"}, []string{"127.1.2.3"}, []string{"127.0.0.1"}},
	} {
		t.Run(name, func(t *testing.T) {
			port := portOn(t, "0.0.0.0")
			e := placed(t, func(c *Config) { c.Addresses = &addressRecord{} })
			update := desired.Update{Family: v1.IPv4Protocol, Full: true, Changes: desired.ChangesTo(
				servicePort("web", v1.ProtocolTCP, []desired.Frontend{nodePort(port)}, named(t, "a")),
				servicePort("web", v1.ProtocolUDP, []desired.Frontend{nodePort(port)}, udpServer(t, "a")),
			)}
			for _, text := range c.accepted {
				update.Globals.NodePortAddresses = append(update.Globals.NodePortAddresses, netip.MustParsePrefix(text))
			}
			if _, err := e.Apply(t.Context(), update); err != nil {
				t.Fatalf("Apply = %v, want nil", err)
			}
			for _, addr := range c.open {
				mustAsk(t, addrPortOf(addr, port), "a heard hello")
				if got := exchange(t, dialUDP(t, addrPortOf(addr, port)), "hi"); got != "ahi" {
					t.Errorf("answer %q at %s, want %q", got, addr, "ahi")
				}
			}
			for _, addr := range c.shut {
				mustFail(t, addrPortOf(addr, port))
			}
		})
	}
}

// A frontend moves between Services in a single update, in any order of the Services.
func TestAFrontendMovesFromOneServiceToAnother(t *testing.T) {
	needsAliases(t)
	for _, protocol := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
		t.Run(string(protocol), func(t *testing.T) {
			e := placed(t)
			addr, port := "127.1.2.3", portOn(t, "127.1.2.3")
			answer := func() string {
				if protocol == v1.ProtocolUDP {
					return exchange(t, dialUDP(t, addrPortOf(addr, port)), " heard hello")
				}
				got, err := ask(t, addrPortOf(addr, port), "hello")
				return fmt.Sprint(got, errorText(err))
			}
			endpoints := map[string]netip.AddrPort{}
			for _, name := range []string{"a", "b"} {
				if endpoints[name] = named(t, name); protocol == v1.ProtocolUDP {
					endpoints[name] = udpServer(t, name)
				}
			}
			for round, owner := range []string{"a", "b", "a", "b"} {
				var services []*desired.Service
				for _, name := range []string{"a", "b"} {
					s := servicePort(name, protocol, nil, endpoints[name])
					if name == owner {
						s.Frontends = []desired.Frontend{clusterIP(addr, port)}
					}
					services = append(services, s)
				}
				if round > 1 {
					slices.Reverse(services)
				}
				apply(t, e, services...)
				if got, want := answer(), owner+" heard hello"; got != want {
					t.Errorf("round %d: answer %q, want %q", round, got, want)
				}
			}
		})
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// A port in use is one ServiceError, and all other sockets are open.
func TestATakenPortIsOpenedAsSoonAsItIsFree(t *testing.T) {
	needsAliases(t)
	taken, free := portOn(t, "127.1.2.3"), portOn(t, "127.1.2.3")
	other, err := net.Listen("tcp", addrPortOf("127.1.2.3", taken).String())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	e := placed(t)
	both := servicePort("both", v1.ProtocolTCP, []desired.Frontend{clusterIP("127.1.2.3", taken), clusterIP("127.1.2.4", taken)}, named(t, "both"))
	update := desired.Update{Full: true, Changes: desired.ChangesTo(
		both, servicePort("free", v1.ProtocolTCP, []desired.Frontend{clusterIP("127.1.2.3", free)}, named(t, "free")),
	)}
	err = failureOf(e.Apply(t.Context(), update))
	one, ok := errors.AsType[*proxier.ServiceError](err)
	if !ok || one.Name != both.Name || !errors.Is(err, syscall.EADDRINUSE) || strings.Count(err.Error(), "service port") != 1 {
		t.Errorf("Apply = %v, want a ServiceError of %v", err, both.Name)
	}
	mustAsk(t, addrPortOf("127.1.2.3", free), "free heard hello")
	mustAsk(t, addrPortOf("127.1.2.4", taken), "both heard hello")
	_ = other.Close()
	if err := failureOf(e.Apply(t.Context(), desired.Update{Changes: desired.ChangesTo(both)})); err != nil {
		t.Errorf("Apply = %v when the port is free, want nil", err)
	}
	mustAsk(t, addrPortOf("127.1.2.3", taken), "both heard hello")
}

// addressRecord is an Addresses that records its calls.
type addressRecord struct {
	calls []string
	have  map[netip.Addr]bool
	bad   map[netip.Addr]bool // cannot be added
}

var errBadAddress = errors.New("bad address")

func (r *addressRecord) Add(_ context.Context, addr netip.Addr) error {
	r.calls = append(r.calls, "+"+addr.String())
	if r.bad[addr] {
		return errBadAddress
	}
	if r.have == nil {
		r.have = map[netip.Addr]bool{}
	}
	r.have[addr] = true
	return nil
}

func (r *addressRecord) Remove(_ context.Context, addr netip.Addr) error {
	r.calls = append(r.calls, "-"+addr.String())
	delete(r.have, addr)
	return nil
}

// mustHear compares the calls since the last time.
func (r *addressRecord) mustHear(t *testing.T, when string, want ...string) {
	t.Helper()
	got := r.calls
	slices.Sort(got)
	slices.Sort(want)
	if r.calls = nil; !slices.Equal(got, want) {
		t.Errorf("%s: calls %v, want %v", when, got, want)
	}
}

// Addresses are added before the first socket and removed after the last one (W-U6).
func TestAddressesStayWhileAnyPortIsThere(t *testing.T) {
	needsAliases(t)
	record := &addressRecord{}
	e := placed(t, func(c *Config) {
		c.Addresses = record
		c.Hooks.Listen = func(ctx context.Context, at Site) (net.Listener, error) {
			if !record.have[at.Addr.Addr()] {
				t.Errorf("a socket is opened at %v, which was not added", at.Addr)
			}
			return (&net.ListenConfig{}).Listen(ctx, at.Network, at.Addr.String())
		}
	})
	one, two := portOn(t, "127.1.2.3"), portOn(t, "127.1.2.3")
	endpoint := named(t, "a")
	first := servicePort("first", v1.ProtocolTCP, []desired.Frontend{clusterIP("127.1.2.3", one), clusterIP("127.1.2.4", one)}, endpoint)
	second := servicePort("second", v1.ProtocolTCP, []desired.Frontend{clusterIP("127.1.2.3", two)}, endpoint)
	third := servicePort("third", v1.ProtocolUDP, []desired.Frontend{clusterIP("127.1.2.3", two)}, endpoint)

	apply(t, e, first, second, third)
	record.mustHear(t, "at first", "+127.1.2.3", "+127.1.2.4")
	apply(t, e, first, second, third)
	record.mustHear(t, "once more")
	apply(t, e, second, third)
	record.mustHear(t, "one Service less", "-127.1.2.4")
	mustAsk(t, addrPortOf("127.1.2.3", two), "a heard hello")
	apply(t, e, third)
	record.mustHear(t, "UDP is left")
	apply(t, e)
	record.mustHear(t, "nothing is left", "-127.1.2.3")
	apply(t, e, first, second)
	record.mustHear(t, "they are back", "+127.1.2.3", "+127.1.2.4")
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	record.mustHear(t, "closed", "-127.1.2.3", "-127.1.2.4")
}

// An address that cannot be added is an error of one service port, and is retried.
func TestAnAddressThatCannotBeAddedConcernsOneServiceOnly(t *testing.T) {
	needsAliases(t)
	bad := netip.MustParseAddr("127.1.2.4")
	record := &addressRecord{bad: map[netip.Addr]bool{bad: true}}
	e := placed(t, func(c *Config) { c.Addresses = record })
	port := portOn(t, "127.1.2.3")
	endpoint := named(t, "a")
	services := []*desired.Service{
		servicePort("bad", v1.ProtocolTCP, []desired.Frontend{clusterIP("127.1.2.4", port)}, endpoint),
		servicePort("good", v1.ProtocolTCP, []desired.Frontend{clusterIP("127.1.2.3", port)}, endpoint),
	}
	err := failureOf(e.Apply(t.Context(), desired.Update{Full: true, Changes: desired.ChangesTo(services...)}))
	one, ok := errors.AsType[*proxier.ServiceError](err)
	if !ok || one.Name != services[0].Name || !errors.Is(err, errBadAddress) || strings.Count(err.Error(), "service port") != 1 {
		t.Errorf("Apply = %v, want a ServiceError of %v", err, services[0].Name)
	}
	record.mustHear(t, "at first", "+127.1.2.3", "+127.1.2.4")
	mustAsk(t, addrPortOf("127.1.2.3", port), "a heard hello")
	delete(record.bad, bad)
	apply(t, e, services...)
	record.mustHear(t, "again", "+127.1.2.4")
	mustAsk(t, addrPortOf("127.1.2.4", port), "a heard hello")
}

// If the only socket of an address cannot be opened, the address is removed.
func TestAnAddressGoesWithASocketThatCannotBeOpened(t *testing.T) {
	record := &addressRecord{}
	e := placed(t, func(c *Config) {
		c.Addresses = record
		c.Hooks.Listen = func(context.Context, Site) (net.Listener, error) { return nil, syscall.EADDRINUSE }
	})
	s := servicePort("web", v1.ProtocolTCP, []desired.Frontend{clusterIP("127.1.2.3", 1080)}, netip.MustParseAddrPort("127.0.0.1:1"))
	if err := failureOf(e.Apply(t.Context(), desired.Update{Full: true, Changes: desired.ChangesTo(s)})); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("Apply = %v, want %v", err, syscall.EADDRINUSE)
	}
	record.mustHear(t, "after the failure", "+127.1.2.3", "-127.1.2.3")
}

// The address is the frontend's, even if the Listen hook listens elsewhere.
func TestAddressesAreThoseThatWereAskedFor(t *testing.T) {
	record := &addressRecord{}
	e := placed(t, func(c *Config) {
		c.Addresses = record
		c.Hooks.Listen = func(ctx context.Context, _ Site) (net.Listener, error) {
			return (&net.ListenConfig{}).Listen(ctx, "tcp4", "127.0.0.1:0")
		}
	})
	s := servicePort("web", v1.ProtocolTCP, []desired.Frontend{clusterIP("10.96.0.1", 80)}, named(t, "a"))
	apply(t, e, s)
	mustAsk(t, at(t, e, RoleInternal), "a heard hello")
	apply(t, e)
	record.mustHear(t, "come and gone", "+10.96.0.1", "-10.96.0.1")
}
