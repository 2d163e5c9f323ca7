package userspace

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// countsOf returns the counts of the only service port.
func countsOf(t *testing.T, e *Engine) proxier.ServicePortCounts {
	t.Helper()
	counts, err := e.Counts(t.Context())
	if err != nil || counts.Since.IsZero() || len(counts.ServicePorts) != 1 || counts.ServicePorts[0].Name != webName(v1.ProtocolTCP) {
		t.Fatalf("counts %v, error %v, want those of %s", counts, err, webName(v1.ProtocolTCP))
	}
	return counts.ServicePorts[0]
}

// TestConnectionsAreCountedExactly by endpoint, as the endpoints themselves count them. Those that
// refuse get none. What an endpoint had stays in the sum when it is gone.
func TestConnectionsAreCountedExactly(t *testing.T) {
	named := func(name string) netip.AddrPort {
		return server(t, func(conn *net.TCPConn) { _, _ = io.WriteString(conn, name) })
	}
	a, b, dead := named("a"), named("b"), refusing(t)
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
	apply(t, e, web(v1.ProtocolTCP, refusing(t)))
	if _, err := e.Counts(t.Context()); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("counts: %v, want ErrUnsupported", err)
	}
}
