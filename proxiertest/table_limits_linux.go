package proxiertest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// annotationLimit is ServicePort.ClientLimit.
const annotationLimit = "proxiertest/client-limit"

func limited(limit string, options ...ServiceOption) service {
	return service{external: true, endpoints: ready(pod1), options: append(options, annotated(annotationLimit, limit))}
}

func chooseLimit(p *changetracker.ServicePort, s *v1.Service) {
	if text := s.Annotations[annotationLimit]; text != "" {
		var err error
		if p.ClientLimit, err = changetracker.ParseClientLimit(text); err != nil {
			panic(err) // of limited
		}
	}
}

// limitScenarios are about limits for clients.
func limitScenarios() []scenario {
	clientOnly := SourceRanges("198.51.100.2/32", "2001:db8:c::2/128")
	dropping := limited("open=2,ipv6=128,drop")
	return []scenario{
		plays("PKT-100", "A client that opens too many connections in a second is refused until it has waited, and no other client is.", playRate,
			limited("rate=1,burst=3,ipv6=128"), limited("rate=1,burst=3,ipv4=24,ipv6=64")),
		plays("PKT-100/drop", "If a Service asks for it, what is too much is dropped.", playDropped, dropping),
		plays("PKT-101", "A client that has too many open connections is refused until it closes one, and no other client is.", playOpen,
			limited("open=2,ipv6=128"), limited("open=2,ipv6=128", ExternalPolicyLocal())),
		packets("PKT-100/ranges", "Source ranges hold beside a limit.", setupDefault, []service{limited("rate=10000", clientOnly)},
			every([]place{client}, []target{loadBalancer}, masqueradedTo(pod1)), every([]place{otherClient, pod0}, []target{loadBalancer}, isDropped())),
		packets("PKT-100/affinity", "A limit is beside session affinity.", setupDefault, []service{limited("rate=10000,open=1000", ClientAffinity(longAffinity))},
			every([]place{client}, external(), masqueradedTo(pod1))),
		packets("PKT-100/empty", "Without endpoints, clients within the limit are rejected.", setupDefault,
			[]service{{external: true, options: []ServiceOption{annotated(annotationLimit, "rate=10000")}}},
			every([]place{client}, external(), isRejected())),
	}
}

// asks opens a new connection, and returns what it got.
func (s *stage) asks(ctx context.Context, from place, to target, service int, c combo) error {
	_, err := s.sender(from, c.family).askWith(ctx, c.network, s.services[service].targets(s.world, c.family)[to], AskOptions{
		Timeout: answerTimeout, Flusher: s.world.flusher(&s.features, c.network),
	})
	return err
}

// exceed opens connections to an external IP until one gets none, and returns why. It fails if more than burst succeed, and
// the one that each second brings.
func (s *stage) exceed(ctx context.Context, t *testing.T, service, burst int, c combo) error {
	t.Helper()
	began := time.Now()
	for n := 0; ; n++ {
		if err := s.asks(ctx, client, externalIP, service, c); err != nil {
			return err
		}
		if time.Since(began) > poll.Timeout {
			t.Fatalf("%d connections in %v are too slow to exceed a limit", n+1, time.Since(began))
		}
		if most := burst + int(time.Since(began)/time.Second) + 1; n > most {
			t.Fatalf("%d connections in %v, want %d at most", n+1, time.Since(began), most)
		}
	}
}

func playRate(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	for _, c := range combos() {
		t.Run(c.String(), func(t *testing.T) {
			if err := s.exceed(ctx, t, 0, 3, c); !isRefusal(err, c) {
				t.Errorf("above the limit: %v, want %v", err, ErrRefused)
			}
			for _, p := range []probe{{from: otherClient, to: externalIP}, {from: client, to: loadBalancer}, {from: client, to: nodePort}, {from: client, to: clusterIP}} {
				if err := s.asks(ctx, p.from, p.to, 0, c); err != nil {
					t.Errorf("%s: %v, want an answer", p.name(), err)
				}
			}
			for range 10 {
				if err := s.asks(ctx, client, nodePort, 0, c); err != nil {
					t.Fatalf("node port: %v, want no limit", err)
				}
			}
			poll.Until(t, "an answer after a pause", func() bool { return s.asks(ctx, client, externalIP, 0, c) == nil })
			// The second Service takes both addresses of the client for one.
			poll.Until(t, "a refusal of the other address", func() bool {
				_ = s.exceed(ctx, t, 1, 3, c)
				return s.asks(ctx, otherClient, externalIP, 1, c) != nil
			})
		})
	}
}

func playDropped(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	for _, c := range combos() {
		t.Run(c.String(), func(t *testing.T) {
			for range 2 {
				s.holdOne(ctx, t, 0, c)
			}
			if err := s.asks(ctx, client, externalIP, 0, c); !errors.Is(err, ErrTimeout) {
				t.Errorf("above the limit: %v, want %v", err, ErrTimeout)
			}
		})
	}
}

func playOpen(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	for _, c := range combos() {
		for service := range s.services {
			t.Run(c.String(), func(t *testing.T) { s.open2(ctx, t, service, c) })
		}
	}
}

// open2 has two connections open, the limit, and asks for a third one.
func (s *stage) open2(ctx context.Context, t *testing.T, service int, c combo) {
	t.Helper()
	open := []*Conn{s.holdOne(ctx, t, service, c), s.holdOne(ctx, t, service, c)}
	if err := s.asks(ctx, client, externalIP, service, c); !isRefusal(err, c) {
		t.Errorf("a third connection: %v, want %v", err, ErrRefused)
	}
	if err := s.asks(ctx, otherClient, externalIP, service, c); err != nil {
		t.Errorf("another client: %v, want an answer", err)
	}
	for _, conn := range open {
		if _, err := conn.Ask(ctx); err != nil {
			t.Errorf("an open connection: %v", err)
		}
	}
	if c.network == "tcp" { // the kernel knows that a flow of UDP has ended when it times out
		_ = open[0].Close()
		poll.Until(t, "an answer after one is closed", func() bool { return s.asks(ctx, client, externalIP, service, c) == nil })
	}
}

// holdOne opens a connection to an external IP, which has an answer.
func (s *stage) holdOne(ctx context.Context, t *testing.T, service int, c combo) *Conn {
	t.Helper()
	from := s.sender(client, c.family)
	conn, err := from.host.Open(ctx, c.network, s.services[service].targets(s.world, c.family)[externalIP], AskOptions{From: from.addr, Timeout: answerTimeout})
	if err == nil {
		t.Cleanup(func() { _ = conn.Close() })
		_, err = conn.Ask(ctx)
	}
	if err != nil {
		t.Fatalf("within the limit: %v, want an answer", err)
	}
	return conn
}

// isRefusal reports whether a client was refused. ICMP errors, which a UDP client gets, are rare.
func isRefusal(err error, c combo) bool {
	return errors.Is(err, ErrRefused) || c.network == "udp" && errors.Is(err, ErrTimeout)
}

// RefusedCounts compares the numbers of connection.ServicePortCounts.Refused with the connections that a client limit refuses.
// Providers of the factory must have the method Counts of *proxier.Proxier.
//
// It needs Linux and root.
func RefusedCounts(t *testing.T, factory Factory) {
	t.Helper()
	ctx := t.Context()
	c := &countsTest{suite: newSuite(t, Features{ClientLimits: true}, factory, func(config *proxier.Config) { config.CountConnections = true })}
	c.begin(ctx, t)
	refused := map[v1.IPFamily]uint64{}
	for _, limit := range []string{"rate=1,burst=3,ipv6=128", "rate=1,burst=5,ipv6=128"} { // another one has counters anew
		of := limited(limit)
		of.name = "limited"
		c.publish(ctx, t, of)
		for _, family := range families() {
			for range 20 {
				if err := c.asks(ctx, client, externalIP, 0, combo{family, "tcp"}); errors.Is(err, ErrRefused) {
					refused[family]++
				}
			}
			if refused[family] == 0 {
				t.Errorf("%s: none is refused", family)
			}
			poll.Nil(t, "counts", func() error { return c.hasRefused(ctx, family, refused[family]) })
		}
	}
}

// hasRefused reports whether the first port of the service has refused so many connections.
func (s *stage) hasRefused(ctx context.Context, family v1.IPFamily, n uint64) error {
	counts, err := s.counts(ctx, family)
	if err != nil {
		return err
	}
	name := s.services[0].name(&s.services[0].object.Spec.Ports[0])
	for _, of := range counts.ServicePorts {
		if of.Name == name && of.Refused == n {
			return nil
		}
	}
	return fmt.Errorf("%s: %+v, want %d refused of %v", family, counts.ServicePorts, n, name)
}
