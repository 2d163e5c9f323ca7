package proxiertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns"
)

// flowScenarios are about flows that exist when Services change.
func flowScenarios(f Features) []scenario {
	following := append(ways(), probe{from: client, to: externalIP})
	var atLoopback []probe
	if f.LoopbackNodePorts {
		atLoopback = []probe{{from: nodeAnywhere, to: nodePortLoopback}, {from: nodeAnywhere, to: nodePortLoopback2}}
	}
	follow := func(ctx context.Context, t *testing.T, s *stage) { s.follow(ctx, t, following, atLoopback) }
	return []scenario{
		plays("PKT-80", "No change of a Service or of its endpoints breaks an established connection.",
			playEstablished, service{external: true, endpoints: ready(pod1)}),
		plays("PKT-81", "A UDP client that continues to send keeps its endpoint while that serves, and then gets another one.",
			follow, service{external: true, endpoints: ready(pod1)}).needingConntrack(),
		plays("PKT-81/kept", "If a Service asks for it, a UDP client keeps its endpoint while that is only not ready.",
			playKept, service{external: true, endpoints: ready(pod1), options: []ServiceOption{annotated(annotationKeepFlows, "true")}}).needingConntrack(),
		plays("PKT-85", "Changes of a Service apply to a UDP client that sends and gets no answer as to a new client.",
			playOneWay, service{external: true, podPort: silentPort, endpoints: ready(pod1)}).needingConntrack(),
	}
}

// follow keeps one UDP socket open for each probe, from before the Service exists
// until after its deletion. The probes of both are for both IP families, those of four for
// IPv4.
func (s *stage) follow(ctx context.Context, t *testing.T, both, four []probe) {
	t.Helper()
	first := s.services[0]
	s.remove(first)
	s.sync(ctx, t)
	flows := append(s.sockets(ctx, t, families(), both), s.sockets(ctx, t, families()[:1], four)...)
	for _, e := range flows { // no answer, but a conntrack entry
		if _, err := e.ask(ctx, s.world.flusher(&s.features, "udp")); err == nil {
			t.Errorf("%s: answered without a Service", e.name)
		}
	}
	s.announce(first)
	s.sync(ctx, t)
	s.allFollow(ctx, t, flows, "created", pod1)
	for _, step := range []struct {
		name      string
		endpoints []endpoint
		server    place // that answers now; empty for none
	}{
		{"scaled_up", ready(pod0, pod1, remote0), pod1},
		{"terminating_but_serving", append(terminating(pod1), ready(remote0)...), pod1},
		{"replaced", ready(remote0), remote0},
		{"scaled_to_zero", nil, ""},
		{"scaled_from_zero", ready(pod2), pod2},
		{"in_maintenance", append(inCondition(weight(0), []place{pod2}), ready(remote1)...), pod2},
		{"standing_by", append(group(1, pod2), ready(remote1)...), pod2},
		{"published_though_not_ready", append(unready(pod2), ready(remote1)...), pod2},
		{"published_beside_one_that_is_not", slices.Concat(unready(pod2), ready(remote1), notServing(pod0)), pod2},
		{"not_serving", append(notServing(pod2), ready(remote1)...), remote1},
	} {
		s.publish(ctx, t, service{external: true, endpoints: step.endpoints})
		s.allFollow(ctx, t, flows, step.name, step.server)
	}
	s.publish(ctx, t)
	s.allFollow(ctx, t, flows, "deleted", "")
}

// annotationKeepFlows sets ServicePort.KeepFlows.
const annotationKeepFlows = "proxiertest/keep-flows"

func playKept(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	flows := s.sockets(ctx, t, families(), ways()[1:]) // a connected socket of a pod may end instead
	s.allFollow(ctx, t, flows, "begun", pod1)
	for _, step := range []struct {
		name      string
		endpoints []endpoint
		server    place
	}{
		{"not_ready", append(notServing(pod1), ready(remote0)...), pod1},
		{"alone_and_not_ready", notServing(pod1), pod1},
		{"gone", ready(remote0), remote0},
	} {
		s.publish(ctx, t, service{external: true, endpoints: step.endpoints, options: []ServiceOption{annotated(annotationKeepFlows, "true")}})
		s.allFollow(ctx, t, flows, step.name, step.server)
	}
}

func (s *stage) sync(ctx context.Context, t *testing.T) {
	t.Helper()
	if err := Sync(ctx, s.provider); err != nil {
		t.Fatalf("sync: %v", err)
	}
}

// sockets opens a UDP socket for each probe of the first service, and sends nothing.
func (s *stage) sockets(ctx context.Context, t *testing.T, families []v1.IPFamily, ways []probe) []established {
	t.Helper()
	var flows []established
	for _, family := range families {
		for _, p := range ways {
			from := s.sender(p.from, family)
			flow, err := from.host.Open(ctx, "udp", s.address(p.to, family), AskOptions{From: from.addr, Timeout: answerTimeout})
			if err != nil {
				t.Fatalf("%s: %v", p.name(), err)
			}
			t.Cleanup(func() { _ = flow.Close() }) // it may return a late port unreachable
			flows = append(flows, established{combo: combo{family: family, network: "udp"}, name: p.name(), flow: flow})
		}
	}
	return flows
}

// allFollow sends one request through every flow.
func (s *stage) allFollow(ctx context.Context, t *testing.T, flows []established, step string, server place) {
	t.Helper()
	for _, e := range flows {
		t.Run(e.combo.String()+"/"+e.name+"_"+step, func(t *testing.T) {
			var flusher netns.Flusher
			if server == "" {
				flusher = s.world.flusher(&s.features, "udp")
			}
			got, err := e.ask(ctx, flusher)
			switch {
			case server == "" && err == nil:
				t.Errorf("answered by %s, want no answer", got.Server)
			case server != "" && (err != nil || got.Server != string(server)):
				t.Errorf("got %q, %v; want an answer of %s", got.Server, err, server)
			}
		})
	}
}

// established is a connection with an answer.
type established struct {
	combo combo
	name  string
	flow  *Conn
	first Answer
}

// ask expects no answer if flusher is not nil.
func (e established) ask(ctx context.Context, flusher netns.Flusher) (Answer, error) {
	e.flow.Expect(flusher)
	return e.flow.Ask(ctx)
}

func playEstablished(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	flows := s.establish(ctx, t)
	local := []ServiceOption{InternalPolicyLocal(), ExternalPolicyLocal()}
	fewest := []place{pod0, pod1}
	if s.features.LeastConnections { // the established ones are at the other
		fewest = fewest[:1]
	}
	steps := []struct {
		name     string
		services []service
		tcpOnly  bool // the step removes the endpoint
		proof    probe
	}{
		{"scaled_up", []service{{external: true, endpoints: ready(pod0, pod1, remote0)}}, false, probe{pod2, clusterIP, 0, keptBy(pod0, pod1, remote0)}},
		{"weighted", []service{{external: true, endpoints: []endpoint{{at: pod1}, {at: pod0, condition: weight(5)}}}}, false, probe{pod2, clusterIP, 0, keptBy(pod0, pod1)}},
		{"hashed", []service{{external: true, endpoints: ready(pod0, pod1), options: []ServiceOption{balanced(changetracker.SourcePortHash)}}}, false, probe{pod2, clusterIP, 0, keptBy(pod0, pod1)}},
		{"least_connections", []service{{external: true, endpoints: ready(pod0, pod1), options: []ServiceOption{balanced(changetracker.LeastConnections)}}}, false, probe{pod2, clusterIP, 0, keptBy(fewest...)}},
		{"in_maintenance", []service{{external: true, endpoints: append(inCondition(weight(0), []place{pod1}), ready(pod0)...)}}, false, probe{pod2, clusterIP, 0, keptBy(pod0)}},
		{"standing_by", []service{{external: true, endpoints: append(group(1, pod1), ready(pod0)...)}}, false, probe{pod2, clusterIP, 0, keptBy(pod0)}},
		{"restricted", []service{{external: true, endpoints: ready(pod1), options: []ServiceOption{SourceRanges("192.0.2.99/32", "2001:db8:2::99/128")}}}, false, probe{client, loadBalancer, 0, isDropped()}},
		{"policy_local", []service{{external: true, endpoints: ready(pod1), options: local}}, false, probe{client, nodePort, 0, keptBy(pod1)}},
		{"replaced", []service{{external: true, endpoints: ready(remote0), options: local}}, true, probe{client, clusterIP, 0, isDropped()}},
		{"scaled_to_zero", []service{{external: true}}, true, probe{client, clusterIP, 0, isRejected()}},
		{"deleted", nil, true, probe{}},
	}
	for _, step := range steps {
		s.publish(ctx, t, step.services...)
		if len(step.services) > 0 { // new connections must see the change
			s.probe(ctx, t, scenario{networks: []string{"tcp"}, probes: []probe{step.proof}})
		}
		for _, e := range flows {
			if e.combo.network == "udp" && step.tcpOnly {
				continue
			}
			t.Run(e.combo.String()+"/"+e.name+"_"+step.name, func(t *testing.T) {
				if err := e.stillAnswers(ctx); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// ways are those of connections that last.
func ways() []probe {
	return []probe{{from: pod0, to: clusterIP}, {from: node, to: clusterIP}, {from: client, to: nodePort}, {from: client, to: loadBalancer}}
}

// establish opens a connection of each kind, which the end of the test closes.
func (s *stage) establish(ctx context.Context, t *testing.T) []established {
	t.Helper()
	var flows []established
	for _, c := range combos() {
		for _, p := range ways() {
			e, err := s.open(ctx, p, c)
			if err != nil {
				t.Fatalf("%s: %v", p.name(), err)
			}
			t.Cleanup(func() {
				if err := e.flow.Close(); err != nil {
					t.Errorf("close: %v", err)
				}
			})
			flows = append(flows, e)
		}
	}
	return flows
}

func (s *stage) open(ctx context.Context, p probe, c combo) (established, error) {
	from := s.sender(p.from, c.family)
	to := s.address(p.to, c.family)
	flow, err := from.host.Open(ctx, c.network, to, AskOptions{From: from.addr, Timeout: answerTimeout})
	if err != nil {
		return established{}, err
	}
	first, err := flow.Ask(ctx)
	if err != nil {
		return established{}, errors.Join(err, flow.Close())
	}
	return established{combo: c, name: p.name(), flow: flow, first: first}, nil
}

func (e established) stillAnswers(ctx context.Context) error {
	now, err := e.flow.Ask(ctx)
	if err != nil {
		return fmt.Errorf("established connection broke: %w", err)
	}
	if now != e.first {
		return fmt.Errorf("established connection moved from %+v to %+v", e.first, now)
	}
	return nil
}
