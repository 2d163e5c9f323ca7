package proxiertest

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns"
)

// flowScenarios are about connections that exist when Services change. What a
// UDP flow sees when its endpoint goes away is left out: there, the conntrack
// entry is removed on purpose.
func flowScenarios() []scenario {
	return []scenario{{
		name: "PKT-80", rule: "No change of a Service or of its endpoints touches an established connection.",
		services: []service{{external: true, endpoints: ready(pod1)}},
		play:     playEstablished,
	}}
}

// established is a connection that has been answered.
type established struct {
	combo combo
	name  string
	flow  *netns.Flow
	first Answer
}

func playEstablished(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	flows := s.establish(ctx, t)
	local := []ServiceOption{InternalPolicyLocal(), ExternalPolicyLocal()}
	steps := []struct {
		name     string
		services []service
		tcpOnly  bool // the step takes the endpoint away
		proof    probe
	}{
		{"scaled_up", []service{{external: true, endpoints: ready(pod0, pod1, remote0)}}, false, probe{pod2, clusterIP, 0, keptBy(pod0, pod1, remote0)}},
		{"restricted", []service{{external: true, endpoints: ready(pod1), options: []ServiceOption{SourceRanges("192.0.2.99/32", "2001:db8:2::99/128")}}}, false, probe{client, loadBalancer, 0, isDropped()}},
		{"policy_local", []service{{external: true, endpoints: ready(pod1), options: local}}, false, probe{client, nodePort, 0, keptBy(pod1)}},
		{"replaced", []service{{external: true, endpoints: ready(remote0), options: local}}, true, probe{client, clusterIP, 0, isDropped()}},
		{"scaled_to_zero", []service{{external: true}}, true, probe{client, clusterIP, 0, isRejected()}},
		{"deleted", nil, true, probe{}},
	}
	for _, step := range steps {
		s.publish(ctx, t, step.services...)
		if len(step.services) > 0 { // new connections must have felt the change
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

// establish opens one connection of each kind, and closes them with the test.
func (s *stage) establish(ctx context.Context, t *testing.T) []established {
	t.Helper()
	var flows []established
	for _, c := range (&scenario{}).combos() {
		for _, p := range []probe{
			{from: pod0, to: clusterIP},
			{from: node, to: clusterIP},
			{from: client, to: nodePort},
			{from: client, to: loadBalancer},
		} {
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
	from := s.seat(p.from, c.family)
	to := s.services[0].targets(s.world, c.family)[p.to]
	flow, err := netns.Open(ctx, from.host.ns, c.network, to, AskOptions{From: from.addr, Timeout: answerTimeout})
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
