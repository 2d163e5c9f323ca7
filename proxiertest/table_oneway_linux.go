package proxiertest

import (
	"context"
	"errors"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns"
)

// sink receives datagrams and answers none.
type sink struct {
	mu  sync.Mutex // guards got
	got map[string]int
}

// openSink receives datagrams at silentPort of a pod until the test ends.
func openSink(ctx context.Context, t *testing.T, pod *netns.NS) *sink {
	t.Helper()
	s := &sink{got: map[string]int{}}
	for network, host := range map[string]string{"udp4": "0.0.0.0", "udp6": "::"} {
		conn, err := pod.ListenPacket(ctx, network, net.JoinHostPort(host, strconv.Itoa(silentPort)))
		if err != nil {
			t.Fatal(err)
		}
		var reading sync.WaitGroup
		reading.Go(func() { s.read(conn) })
		t.Cleanup(func() {
			_ = conn.Close()
			reading.Wait()
		})
	}
	return s
}

func (s *sink) read(conn net.PacketConn) {
	buffer := make([]byte, 512)
	for {
		n, _, err := conn.ReadFrom(buffer)
		if err != nil {
			return // closed
		}
		s.mu.Lock()
		s.got[string(buffer[:n])]++
		s.mu.Unlock()
	}
}

func (s *sink) count(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.got[name]
}

// oneWay is a UDP socket that sends, and always the same datagram.
type oneWay struct {
	probe

	name string
	conn net.Conn
	sink *sink
}

const sendPause = 20 * time.Millisecond

// refused sends, and reports whether a port unreachable came back.
func (s *oneWay) refused() bool {
	_, err := s.conn.Write([]byte(s.name))
	_ = s.conn.SetReadDeadline(time.Now().Add(sendPause))
	_, heard := s.conn.Read(make([]byte, 1))
	return errors.Is(err, unix.ECONNREFUSED) || errors.Is(heard, unix.ECONNREFUSED)
}

// arrives sends, and reports whether a datagram reaches the sink.
func (s *oneWay) arrives(patience time.Duration) bool {
	before := s.sink.count(s.name)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if s.refused(); s.sink.count(s.name) > before {
			return true
		}
	}
	return false
}

// fares checks the outcome of the oneWay's packets.
func (s *oneWay) fares(t *testing.T, wanted outcome) {
	t.Helper()
	switch wanted {
	case answered: // no scenario wants it
		if !s.arrives(answerTimeout) {
			t.Error("nothing arrives")
		}
	case dropped:
		if s.arrives(silence) { // the sink has no answer that Flush could wait for
			t.Error("it arrives, want it dropped")
		}
	case rejected:
		for end := time.Now().Add(answerTimeout); !s.refused(); {
			if time.Now().After(end) {
				t.Fatal("not refused")
			}
		}
		if s.arrives(sendPause) {
			t.Error("it arrives, want it refused")
		}
	case unanswered:
		s.refused()
	}
}

// playOneWay never answers. The clients' sockets are opened before the Service exists.
func playOneWay(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	first := s.services[0]
	s.remove(first)
	s.sync(ctx, t)
	senders := s.senders(ctx, t, openSink(ctx, t, s.world.LocalPods[1].ns))
	s.allFare(t, "before", senders, func(*oneWay) outcome { return unanswered })
	s.services = nil
	always := func(o outcome) func(*oneWay) outcome { return func(*oneWay) outcome { return o } }
	narrow := SourceRanges("192.0.2.99/32", "2001:db8:2::99/128")
	for _, step := range []struct {
		name    string
		service service
		wanted  func(*oneWay) outcome
	}{
		{"no_endpoints", service{}, always(rejected)},
		{"scaled_from_zero", service{endpoints: ready(pod1)}, always(answered)},
		{"narrowed", service{endpoints: ready(pod1), options: []ServiceOption{narrow}}, func(s *oneWay) outcome {
			if s.to == loadBalancer {
				return dropped
			}
			return answered
		}},
		{"widened", service{endpoints: ready(pod1)}, always(answered)},
		{"scaled_to_zero", service{}, always(rejected)},
	} {
		step.service.external, step.service.podPort = true, silentPort
		if len(s.services) == 0 {
			s.services = []*published{first}
			first.render(step.service)
			s.provider.OnServiceAdd(first.object)
			s.sync(ctx, t)
		} else {
			s.publish(ctx, t, step.service)
		}
		s.allFare(t, step.name, senders, step.wanted)
	}
}

// allFare checks all senders at once.
func (s *stage) allFare(t *testing.T, step string, senders []*oneWay, wanted func(*oneWay) outcome) {
	t.Helper()
	t.Run(step, func(t *testing.T) {
		for _, one := range senders {
			t.Run(one.name, func(t *testing.T) {
				t.Parallel()
				one.fares(t, wanted(one))
			})
		}
	})
}

// senders opens a socket for each probe of the first service.
func (s *stage) senders(ctx context.Context, t *testing.T, to *sink) (all []*oneWay) {
	t.Helper()
	for _, family := range families() {
		for _, p := range []probe{
			{from: pod0, to: clusterIP},
			{from: pod0, to: loadBalancer},
			{from: client, to: nodePort},
			{from: client, to: externalIP},
			{from: client, to: loadBalancer},
		} {
			from := s.sender(p.from, family)
			conn, err := from.host.ns.DialFrom(ctx, "udp", from.addr, s.address(p.to, family).String())
			if err != nil {
				t.Fatalf("%s: %v", p.name(), err)
			}
			t.Cleanup(func() { _ = conn.Close() })
			all = append(all, &oneWay{probe: p, name: string(family) + "/" + p.name(), conn: conn, sink: to})
		}
	}
	return all
}
