package userspace

import (
	"errors"
	"net"
	"net/netip"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// needsWildcards skips the test if the system does not report a datagram's destination.
func needsWildcards(t *testing.T) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skipf("%s has one loopback address only", runtime.GOOS)
	}
}

// skipUnless skips the test if this machine lacks an address, for example of IPv6.
func skipUnless(t *testing.T, addr netip.Addr) {
	t.Helper()
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
	if errors.Is(err, syscall.EADDRNOTAVAIL) || errors.Is(err, syscall.EAFNOSUPPORT) {
		t.Skipf("needs the address %v: %v", addr, err)
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
}

// engineOf returns an engine of an IP family, which is closed at the end of the test.
func engineOf(t *testing.T, family v1.IPFamily, deps proxier.Deps, config Config) *Engine {
	t.Helper()
	e, err := NewEngine(config, family, deps)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("Close = %v, want nil", err)
		}
	})
	return e
}

// askFrom sends a datagram and returns the answer and its source.
func askFrom(t *testing.T, conn *net.UDPConn, to netip.AddrPort, datagram string) (answer string, from netip.AddrPort) {
	t.Helper()
	if _, err := conn.WriteToUDPAddrPort([]byte(datagram), to); err != nil {
		t.Fatal(err)
	}
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	buffer := make([]byte, maxDatagram)
	n, from, err := conn.ReadFromUDPAddrPort(buffer)
	if err != nil {
		t.Fatalf("ask %v: %v", to, err)
	}
	return string(buffer[:n]), unmapped(from)
}

// udpServerAt is udpServer at an address.
func udpServerAt(t *testing.T, name string, addr netip.Addr) netip.AddrPort {
	t.Helper()
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
	if err != nil {
		t.Fatal(err)
	}
	answerAll(t, conn, name)
	return addrPort(conn.LocalAddr())
}

// answerAll answers each datagram with a name and the datagram, until the test ends.
func answerAll(t *testing.T, conn net.PacketConn, name string) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		buffer := make([]byte, maxDatagram)
		for {
			n, from, err := conn.ReadFrom(buffer)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = conn.WriteTo(append([]byte(name), buffer[:n]...), from)
			}
		}
	}()
	t.Cleanup(func() {
		_ = conn.Close()
		<-done
	})
}

// loopback is an IP family on the loopback interface.
type loopback struct {
	name        v1.IPFamily
	unspecified string
	addrs       []string
}

func loopbacks() []loopback {
	return []loopback{
		{v1.IPv4Protocol, "0.0.0.0", []string{"127.0.0.1", "127.0.0.2", "127.9.8.7"}},
		{v1.IPv6Protocol, "::", []string{"::1"}},
	}
}

// The socket is bound to all addresses. A connected client receives an answer only if it
// comes from the address that the client sent to.
func TestAnswersComeFromTheAddressThatWasAsked(t *testing.T) {
	needsWildcards(t)
	for _, family := range loopbacks() {
		t.Run(string(family.name), func(t *testing.T) {
			first := netip.MustParseAddr(family.addrs[0])
			skipUnless(t, first)
			e := engineOf(t, family.name, proxier.Deps{}, Config{Listen: []netip.Addr{netip.MustParseAddr(family.unspecified)}})
			endpoint := udpServerAt(t, "a", first)
			apply(t, e, web(v1.ProtocolUDP, endpoint))
			port := at(t, e, RoleInternal).Port()
			for _, addr := range family.addrs {
				to := netip.AddrPortFrom(netip.MustParseAddr(addr), port)
				connected := dialUDP(t, to)
				for range 3 {
					if got := exchange(t, connected, "hi"); got != "ahi" {
						t.Errorf("%v: answer %q, want %q", to, got, "ahi")
					}
				}
				anywhere, err := net.ListenUDP("udp", nil)
				if err != nil {
					t.Fatal(err)
				}
				defer anywhere.Close()
				if got, from := askFrom(t, anywhere, to, "hi"); got != "ahi" || from != to {
					t.Errorf("%v: answer %q from %v, want it from there", to, got, from)
				}
			}
		})
	}
}

// Datagrams of one client port to two addresses are two flows.
func TestOneClientPortHasAFlowForEachAddressItAsks(t *testing.T) {
	needsWildcards(t)
	e := engine(t, func(c *Config) { c.Listen = []netip.Addr{netip.IPv4Unspecified()} })
	apply(t, e, web(v1.ProtocolUDP, udpServer(t, "a"), udpServer(t, "b")))
	port := at(t, e, RoleInternal).Port()
	client, err := net.ListenUDP("udp4", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	one, two := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port), netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), port)
	answers := map[netip.AddrPort]string{}
	for range 3 {
		for _, to := range []netip.AddrPort{one, two} {
			got, from := askFrom(t, client, to, "hi")
			if from != to {
				t.Errorf("asked %v: answer from %v", to, from)
			}
			if before, known := answers[to]; known && before != got {
				t.Errorf("asked %v: answer %q after %q, want the same endpoint for all of a flow", to, got, before)
			}
			answers[to] = got
		}
	}
	if answers[one] == answers[two] {
		t.Errorf("answers %v, want different endpoints for different flows", answers)
	}
	if open := e.Traffic()[webName(v1.ProtocolUDP)].Open; open != 2 {
		t.Errorf("%d flows, want 2", open)
	}
}

// Reports have the address that the client sent to.
func TestAWildcardTellsWhatWasAsked(t *testing.T) {
	needsWildcards(t)
	var picked atomic.Value
	e, heard := observed(t, Config{
		Listen: []netip.Addr{netip.IPv4Unspecified()},
		Hooks: Hooks{Pick: func(c Connection, _, _ []netip.AddrPort) (netip.AddrPort, bool) {
			picked.Store(c.Dialled)
			return netip.AddrPort{}, false
		}},
	})
	s := web(v1.ProtocolUDP, udpServer(t, "a"))
	apply(t, e, s)
	to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), at(t, e, RoleInternal).Port())
	conn := dialUDP(t, to)
	if got := exchange(t, conn, "hi"); got != "ahi" {
		t.Fatalf("answer %q, want %q", got, "ahi")
	}
	apply(t, e)
	got := heard.next(t)
	if got.Dialled != to || picked.Load() != to || got.Client != addrPort(conn.LocalAddr()) {
		t.Errorf("client %v asked %v (Pick: %v), want %v and %v", got.Client, got.Dialled, picked.Load(), conn.LocalAddr(), to)
	}
}

func TestNodePortsOnAllAddresses(t *testing.T) {
	needsWildcards(t)
	port := portOn(t, "0.0.0.0")
	e := placed(t)
	s := servicePort("web", v1.ProtocolUDP, []desired.Frontend{nodePort(port)}, udpServer(t, "a"))
	update := desired.Update{
		Family: v1.IPv4Protocol, Full: true, Changes: desired.ChangesTo(s),
		Globals: desired.Globals{NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}},
	}
	if _, err := e.Apply(t.Context(), update); err != nil {
		t.Fatal(err)
	}
	for _, addr := range []string{"127.0.0.1", "127.0.0.2"} {
		to := netip.AddrPortFrom(netip.MustParseAddr(addr), port)
		if got := exchange(t, dialUDP(t, to), "hi"); got != "ahi" {
			t.Errorf("%v: answer %q, want %q", to, got, "ahi")
		}
	}
}
