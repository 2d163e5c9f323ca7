package metrics_test

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/internal/userspacetest"
	"github.com/serviceplane/serviceplane/node/metrics"
	"github.com/serviceplane/serviceplane/proxier/connection"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/userspace"
)

// counting signals each counted connection on done.
type counting struct {
	*metrics.Metrics

	done chan struct{}
}

func (c counting) ObserveConnection(r connection.Report) {
	c.Metrics.ObserveConnection(r)
	c.done <- struct{}{}
}

// wait waits for n connections.
func (c counting) wait(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		select {
		case <-c.done:
		case <-time.After(poll.Timeout):
			t.Fatalf("%d connections were counted after %v, want %d", i, poll.Timeout, n)
		}
	}
}

// Two connections are served, one has a dead endpoint first, one has no endpoints, and one
// is a UDP client's flow.
func TestConnectionsThroughAUserspaceProxyAreMeasured(t *testing.T) {
	m, registry := measure(t, metrics.Options{Mode: "userspace", PerService: true})
	counted := counting{Metrics: m, done: make(chan struct{}, 5)}
	w := userspacetest.New(t, counted)
	tcp, udp := userspacetest.Endpoint(t), userspacetest.DatagramEndpoint(t)
	w.Add("web", "10.96.0.1", v1.ProtocolTCP, tcp, "127.0.0.1")
	w.Add("flaky", "10.96.0.2", v1.ProtocolTCP, tcp, "127.0.0.1", "127.0.0.2")
	w.Add("empty", "10.96.0.3", v1.ProtocolTCP, tcp)
	w.Add("names", "10.96.0.4", v1.ProtocolUDP, udp, "127.0.0.1")
	if err := proxiertest.Sync(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ network, name, want string }{
		{"tcp", "web", "you said hello"},
		{"tcp", "web", "you said hello"},
		{"tcp", "flaky", "you said hello"},
		{"tcp", "empty", ""},
		{"udp", "names", "you said hello"},
	} {
		if got, _ := w.Ask(t, c.network, c.name); got != c.want {
			t.Errorf("%s answers %q, want %q", c.name, got, c.want)
		}
	}
	counted.wait(t, 5)
	families := scrape(t, registry)
	for _, c := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"connections_total", []string{"ip_family=IPv4", "protocol=TCP", "outcome=served"}, 3},
		{"connections_total", []string{"ip_family=IPv4", "protocol=TCP", "outcome=no_endpoints"}, 1},
		{"connections_total", []string{"ip_family=IPv4", "protocol=TCP", "outcome=unreachable"}, 0},
		{"connections_total", []string{"ip_family=IPv4", "protocol=UDP", "outcome=served"}, 1},
		{"connection_bytes_total", []string{"ip_family=IPv4", "protocol=TCP", "direction=sent"}, 3 * 5},
		{"connection_bytes_total", []string{"ip_family=IPv4", "protocol=TCP", "direction=received"}, 3 * 14},
		{"connection_bytes_total", []string{"ip_family=IPv4", "protocol=UDP", "direction=sent"}, 5},
		{"connection_bytes_total", []string{"ip_family=IPv4", "protocol=UDP", "direction=received"}, 14},
		{"connection_retries_total", []string{"ip_family=IPv4", "protocol=TCP"}, 1},
		{"connection_retries_total", []string{"ip_family=IPv4", "protocol=UDP"}, 0},
		{"connection_duration_seconds", []string{"ip_family=IPv4", "protocol=TCP"}, 4},
		{"connection_duration_seconds", []string{"ip_family=IPv4", "protocol=UDP"}, 1},
		{"connection_held_seconds", []string{"ip_family=IPv4", "protocol=TCP"}, 1},
		{"service_connections_total", []string{"namespace=test", "service=web", "port=main", "protocol=TCP", "outcome=served"}, 2},
		{"service_connections_total", []string{"service=flaky", "outcome=served"}, 1},
		{"service_connections_total", []string{"service=empty", "outcome=no_endpoints"}, 1},
		{"service_connections_total", []string{"service=names", "protocol=UDP", "outcome=served"}, 1},
		{"service_connection_bytes_total", []string{"service=web", "direction=received"}, 2 * 14},
	} {
		if got := value(t, families, "serviceplane_"+c.name, c.labels...); got != c.want {
			t.Errorf("%s%v = %v, want %v", c.name, c.labels, got, c.want)
		}
	}
	if got := sum(families["serviceplane_connection_held_seconds"], []string{"ip_family=IPv4", "protocol=TCP"}); got < userspacetest.HoldTimeout.Seconds() {
		t.Errorf("connections were held for %vs, want %v at least", got, userspacetest.HoldTimeout)
	}
}

// The budget suffices for two sockets and one connection; the second connection is
// refused.
func TestAShortageOfDescriptorsIsMeasured(t *testing.T) {
	m, registry := measure(t, metrics.Options{Mode: "userspace"})
	w := userspacetest.New(t, m, func(c *userspace.Config) { c.Budget = userspace.NewBudget(4) })
	m.Watch(metrics.Sources{Status: w.Status})
	w.Add("web", "10.96.0.1", v1.ProtocolTCP, userspacetest.Endpoint(t), "127.0.0.1")
	w.Add("names", "10.96.0.4", v1.ProtocolUDP, userspacetest.DatagramEndpoint(t), "127.0.0.1")
	if err := proxiertest.Sync(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	to := w.Socket(t, "web").String()
	conn, err := (&net.Dialer{Timeout: poll.Timeout}).DialContext(t.Context(), "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	wantReset(t, to)
	families := scrape(t, registry)
	for _, c := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"client_descriptors", nil, 2},
		{"client_descriptors_limit", nil, 2},
		{"client_descriptors_short_total", []string{"what=refused"}, 1},
		{"client_descriptors_short_total", []string{"what=ended"}, 0},
		{"condition", []string{"type=Descriptors"}, 1},
	} {
		if got := value(t, families, "serviceplane_"+c.name, append(c.labels, "ip_family=IPv4")...); got != c.want {
			t.Errorf("%s%v = %v, want %v", c.name, c.labels, got, c.want)
		}
	}
}

// wantReset connects, and expects a reset, of the handshake or of a read.
func wantReset(t *testing.T, to string) {
	t.Helper()
	conn, err := (&net.Dialer{Timeout: poll.Timeout}).DialContext(t.Context(), "tcp", to)
	if errors.Is(err, syscall.ECONNRESET) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(poll.Timeout))
	if answer, err := io.ReadAll(conn); len(answer) > 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the second connection is answered %q, %v, want it to be reset", answer, err)
	}
}
