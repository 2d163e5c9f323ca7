package proxiertest

import (
	"context"
	"slices"
	"testing"

	discovery "k8s.io/api/discovery/v1"
)

// annotationFailoverEnd sets ServicePort.Failover.End.
const annotationFailoverEnd = "proxiertest/failover-end"

// resting is an endpoint that serves, but is not ready.
func resting(e *discovery.Endpoint) { setConditions(e, false, true, false) }

// failoverScenarios are about groups of endpoints.
func failoverScenarios() []scenario {
	everybody := []place{pod2, node, client, remote0}
	to := append(external(), clusterIP)
	using := func(options []ServiceOption, endpoints ...[]endpoint) []service {
		return []service{{external: true, endpoints: slices.Concat(endpoints...), options: options}}
	}
	local := []ServiceOption{ExternalPolicyLocal()}
	return []scenario{
		packets("PKT-98", "The first group of endpoints that can serve gets all connections.", setupDefault,
			using(nil, ready(pod1), group(1, pod0), group(2, remote0)), every(everybody, to, answeredBy(pod1))),
		packets("PKT-98/next", "If no endpoint of the first group is ready, the next group gets all connections.", setupDefault,
			using(nil, notServing(pod1), group(1, pod0), group(2, remote0)), every(everybody, to, answeredBy(pod0))),
		packets("PKT-98/local", "A traffic policy Local is about the group that serves: a node where only others have endpoints drops.", setupDefault,
			using(local, ready(remote0), group(1, pod0)), every([]place{client}, external(), isDropped())),
		packets("PKT-98/maintenance", "If the first group is in maintenance, the next one serves.", setupDefault,
			using(nil, inCondition(weight(0), []place{pod1}), group(1, pod0)), every(everybody, to, answeredBy(pod0))),
		plays("PKT-98/end", "If a Service asks for it, connections to a group end when it serves no more; otherwise they stay.", playFailover,
			backed(nil, endsAtFailover()...), backed(nil)).needingConntrack(),
	}
}

func endsAtFailover() []ServiceOption {
	return []ServiceOption{endsConnections(), annotated(annotationFailoverEnd, "true")}
}

// backed is a Service with an endpoint in a condition, and one that stands by.
func backed(first EndpointOption, options ...ServiceOption) service {
	return service{external: true, endpoints: append(inCondition(first, []place{pod1}), group(1, pod0)...), options: options}
}

func playFailover(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	ended, kept := s.dialAll(ctx, t, 0, "first_group"), s.dialAll(ctx, t, 1, "first_group_without_option")
	flows := s.sockets(ctx, t, families(), ways()[1:]) // a connected socket of a pod may end instead
	s.allFollow(ctx, t, flows, "begun", pod1)
	s.publish(ctx, t, backed(resting, endsAtFailover()...), backed(resting))
	allReset(t, ended, (*openConn).write)
	s.allFollow(ctx, t, flows, "failed_over", pod0)
	ended = s.dialAll(ctx, t, 0, "second_group")
	kept = append(kept, s.dialAll(ctx, t, 1, "second_group_without_option")...)
	s.publish(ctx, t, backed(nil, endsAtFailover()...), backed(nil))
	allReset(t, ended, (*openConn).read)
	s.allFollow(ctx, t, flows, "failed_back", pod1)
	for _, c := range kept {
		if err := c.ask(); err != nil {
			t.Errorf("%s: %v, want an answer", c.name, err)
		}
	}
}
