package userspace

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// countsOf returns the counts of the only service port.
func countsOf(t *testing.T, e *Engine) connection.ServicePortCounts {
	t.Helper()
	counts, err := e.Counts(t.Context())
	if err != nil || counts.Since.IsZero() || len(counts.ServicePorts) != 1 || counts.ServicePorts[0].Name != webName(v1.ProtocolTCP) {
		t.Fatalf("counts %v, error %v, want those of %s", counts, err, webName(v1.ProtocolTCP))
	}
	return counts.ServicePorts[0]
}

// Connections are counted exactly for each endpoint, as the endpoints themselves count them. Those that refuse get
// none. What an endpoint had stays in the sum when it is gone.
func TestConnectionsAreCountedExactly(t *testing.T) {
	named := func(name string) netip.AddrPort {
		return server(t, func(conn *net.TCPConn) { _, _ = io.WriteString(conn, name) })
	}
	a, b, dead := named("a"), named("b"), refusing(t, "tcp4")
	e, _ := observed(t, Config{Config: proxier.Config{CountConnections: true}})
	apply(t, e, web(v1.ProtocolTCP, a, b, dead))
	to, answers, all := at(t, e, RoleInternal), map[netip.AddrPort]uint64{}, uint64(0)
	connect := func(n int) {
		for range n {
			answer, err := ask(t, to, "")
			if err != nil || answer != "a" && answer != "b" {
				t.Errorf("answer %q, error %v, want a or b", answer, err)
			}
			all++
			answers[map[string]netip.AddrPort{"a": a, "b": b}[answer]]++
		}
	}
	check := func(endpoints ...netip.AddrPort) {
		t.Helper()
		got := countsOf(t, e)
		if got.Connections != all || len(got.Endpoints) != len(endpoints) {
			t.Errorf("%d connections to %v, want %d to %v", got.Connections, got.Endpoints, all, endpoints)
		}
		for _, p := range got.Endpoints {
			if p.Connections != answers[p.Endpoint] {
				t.Errorf("%s has %d connections, want %d", p.Endpoint, p.Connections, answers[p.Endpoint])
			}
		}
	}
	for answers[a] == 0 || answers[b] == 0 {
		connect(10)
	}
	check(a, b)
	apply(t, e, web(v1.ProtocolTCP, b))
	check(b)
	connect(5)
	apply(t, e, web(v1.ProtocolTCP, a, b))
	answers[a] = 0
	check(b)
	for answers[a] == 0 {
		connect(1)
	}
	check(a, b)
}

func TestNothingIsCountedByDefault(t *testing.T) {
	e, _ := observed(t, Config{})
	apply(t, e, web(v1.ProtocolTCP, refusing(t, "tcp4")))
	if _, err := e.Counts(t.Context()); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("counts: %v, want ErrUnsupported", err)
	}
}

// Bytes are counted exactly while a connection is open and when it has ended: small pieces, large ones that the
// kernel copies, datagrams, and those of an endpoint that is gone.
func TestBytesAreCountedExactly(t *testing.T) {
	large := strings.Repeat("large ", 300_000)
	echo := server(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) })
	other := server(t, func(conn *net.TCPConn) { _, _ = io.Copy(io.Discard, conn) })
	e, _ := observed(t, Config{Config: proxier.Config{CountTraffic: true}})
	apply(t, e, web(v1.ProtocolTCP, echo))
	expect := func(name changetracker.ServicePortName, all, endpoint connection.Traffic) {
		t.Helper()
		poll.Nil(t, "bytes are counted", func() error {
			counts, err := e.Counts(t.Context())
			if err != nil || !counts.Traffic || len(counts.ServicePorts) != 1 {
				return fmt.Errorf("counts %v, error %w", counts, err)
			}
			p := counts.ServicePorts[0]
			if p.Name != name || p.Connections != 0 || p.Traffic != all || len(p.Endpoints) != 1 || p.Endpoints[0].Traffic != endpoint {
				return fmt.Errorf("counted %+v, want %+v of %s, %+v of the endpoint, and no connections", p, all, name, endpoint)
			}
			return nil
		})
	}
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(t.Context(), "tcp", at(t, e, RoleInternal).String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	sent := connection.Traffic{}
	talk := func(text string) {
		_ = conn.SetDeadline(time.Now().Add(patience))
		var sending sync.WaitGroup
		sending.Go(func() { _, _ = io.WriteString(conn, text) })
		if _, err := io.ReadFull(conn, make([]byte, len(text))); err != nil {
			t.Errorf("read: %v", err)
		}
		sending.Wait()
		sent = sent.Plus(connection.Traffic{BytesIn: uint64(len(text)), BytesOut: uint64(len(text))})
	}
	talk("small")
	expect(webName(v1.ProtocolTCP), sent, sent)
	talk(large)
	talk("small again")
	_ = conn.Close()
	expect(webName(v1.ProtocolTCP), sent, sent)
	apply(t, e, web(v1.ProtocolTCP, other))
	if _, err := ask(t, at(t, e, RoleInternal), "to another endpoint"); err != nil {
		t.Error(err)
	}
	more := connection.Traffic{BytesIn: uint64(len("to another endpoint"))}
	expect(webName(v1.ProtocolTCP), sent.Plus(more), more)

	apply(t, e, web(v1.ProtocolUDP, udpServer(t, "answer to "))) // the other one is gone
	client, err := net.ListenUDP("udp4", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	answer, _ := askFrom(t, client, at(t, e, RoleInternal), "ping")
	sent = connection.Traffic{BytesIn: uint64(len("ping")), BytesOut: uint64(len(answer))}
	expect(webName(v1.ProtocolUDP), sent, sent)
}
