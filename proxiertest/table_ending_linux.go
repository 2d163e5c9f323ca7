package proxiertest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// annotationEnd sets ServicePort.EndConnections.
const annotationEnd = "proxiertest/end-connections"

func endsConnections() ServiceOption { return annotated(annotationEnd, "true") }

func chooseEnding(p *changetracker.ServicePort, s *v1.Service) {
	p.EndConnections, p.Failover.End = s.Annotations[annotationEnd] != "", s.Annotations[annotationFailoverEnd] != ""
	p.KeepFlows = s.Annotations[annotationKeepFlows] != ""
	for text := range strings.FieldsSeq(s.Annotations[annotationDenied]) {
		if r := netip.MustParsePrefix(text); r.Addr().Is4() == (p.Family == v1.IPv4Protocol) {
			p.DeniedSources = append(p.DeniedSources, r)
		}
	}
	p.ExposeOn = changetracker.NodeSelector(s.Annotations[annotationExpose])
}

// endingScenarios are about connections to endpoints that are gone for good.
func endingScenarios() []scenario {
	return []scenario{{
		name: "PKT-94", rule: "If a Service asks for it, both ends of TCP connections to an endpoint get a RST after it is gone from all slices, and no other connection does.",
		services: []service{endingService(pod1), {external: true, endpoints: ready(pod1)}, endingService(pod2), {external: true, endpoints: ready(pod1)}},
		play:     playEnding,
	}}
}

func endingService(at ...place) service {
	return service{external: true, endpoints: ready(at...), options: []ServiceOption{endsConnections()}}
}

// openConn is a TCP connection, whose client waits for data.
type openConn struct {
	name   string
	conn   net.Conn
	reader *bufio.Reader
}

func dialFrom(ctx context.Context, t *testing.T, from sender, name string, to netip.AddrPort) *openConn {
	t.Helper()
	conn, err := from.host.ns.DialFrom(ctx, "tcp", from.addr, to.String())
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	c := &openConn{name: fmt.Sprintf("%s_from_%s_to_%s", name, from.host.Name, to), conn: conn, reader: bufio.NewReader(conn)}
	if err := c.ask(); err != nil {
		t.Fatalf("%s: %v", c.name, err)
	}
	return c
}

// ask sends a line and waits for the answer.
func (c *openConn) ask() error {
	_ = c.conn.SetDeadline(time.Now().Add(answerTimeout))
	if _, err := c.conn.Write([]byte("\n")); err != nil {
		return err
	}
	_, err := c.reader.ReadString('\n')
	return err
}

// read waits for data, of which there is none.
func (c *openConn) read() error {
	_ = c.conn.SetDeadline(time.Now().Add(answerTimeout))
	_, err := c.reader.ReadByte()
	return err
}

// write asks until that fails.
func (c *openConn) write() error {
	for deadline := time.Now().Add(answerTimeout); time.Now().Before(deadline); {
		if err := c.ask(); err != nil {
			return err
		}
		<-time.After(answerTimeout / 300)
	}
	return errors.New("its server answers still")
}

// dialAll opens a connection of each kind to a service.
func (s *stage) dialAll(ctx context.Context, t *testing.T, service int, name string) (all []*openConn) {
	t.Helper()
	for _, family := range families() {
		at := s.services[service].targets(s.world, family)
		for _, p := range ways() {
			all = append(all, dialFrom(ctx, t, s.sender(p.from, family), name+"_"+string(p.to), at[p.to]))
		}
	}
	return all
}

func playEnding(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	readers, writers := s.dialAll(ctx, t, 0, "reader"), s.dialAll(ctx, t, 0, "writer")
	others := s.dialAll(ctx, t, 1, "other_service")
	others = append(others, s.dialAll(ctx, t, 2, "not_ready")...)
	others = append(others, s.dialAll(ctx, t, 3, "without_option")...)
	for _, family := range families() {
		others = append(others, dialFrom(ctx, t, s.sender(pod0, family), "direct", netip.AddrPortFrom(podAddr(pod1)(family), podPort)))
	}
	other := service{external: true, endpoints: ready(pod1)}
	notReady := endingService(pod0)
	notReady.endpoints = append(notReady.endpoints, notServing(pod2)...)
	without := service{external: true, endpoints: ready(pod0)}
	leaving := endingService(pod0)
	leaving.endpoints = append(leaving.endpoints, notServing(pod1)...)
	s.publish(ctx, t, leaving, other, notReady, without)
	others = append(others, s.dialAll(ctx, t, 0, "other_endpoint")...)
	s.publish(ctx, t, endingService(pod0), other, notReady, without)
	gone := time.Now()
	allReset(t, readers, (*openConn).read)
	allReset(t, writers, (*openConn).write)
	// The endpoint returns: its new connections have nothing to do with the old ones.
	s.publish(ctx, t, endingService(pod0, pod1), other, notReady, without)
	for range 2 {
		others = append(others, s.dialAll(ctx, t, 0, "returned")...)
	}
	for again := true; again && !t.Failed(); again = time.Since(gone) < 2*proxier.EndGrace { // what ends late, too
		for _, c := range others {
			if err := c.ask(); err != nil {
				t.Errorf("%s: %v, want an answer", c.name, err)
			}
		}
	}
}

func allReset(t *testing.T, conns []*openConn, wait func(*openConn) error) {
	t.Helper()
	for i, err := range together(conns, wait) {
		if !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
			t.Errorf("%s: %v, want a RST", conns[i].name, err)
		}
	}
}
