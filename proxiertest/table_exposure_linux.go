package proxiertest

import (
	"context"
	"slices"
	"testing"
)

// annotationExpose is ServicePort.ExposeOn.
const annotationExpose = "proxiertest/expose-on"

// exposureScenarios are about Services that some nodes expose.
func exposureScenarios() []scenario {
	return []scenario{plays("PKT-99", "A Service that is exposed on some nodes has external addresses and node ports on these, and its ClusterIP on all.", playExposure,
		service{external: true, endpoints: ready(pod1), options: []ServiceOption{LoadBalancer(inBoth(cloudVIP)...), annotated(annotationExpose, "pool=edge")}},
		service{external: true, endpoints: ready(pod1)},
	)}
}

func playExposure(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	everybody, node := []place{pod0, client, node}, s.world.Config().Node
	elsewhere := slices.Concat(every(everybody, []target{nodePort}, isRejected()), every(everybody, []target{cloudLoadBalancer}, keptBy(router)))
	noLonger := elsewhere
	if s.features.VIPsAreLocal { // the address stays while connections drain
		noLonger = every(everybody, []target{nodePort, cloudLoadBalancer}, isRejected())
	}
	here := every(everybody, []target{nodePort, cloudLoadBalancer}, masqueradedTo(pod1))
	always := slices.Concat(every([]place{pod0}, []target{clusterIP}, keptBy(pod1)), toSecond(every(everybody, external(), masqueradedTo(pod1))))
	for _, step := range []struct {
		pool   string
		probes []probe
	}{{"", elsewhere}, {"edge", here}, {"inner", noLonger}} {
		node.Labels = map[string]string{"pool": step.pool}
		s.provider.OnNodeChange(node)
		s.sync(ctx, t)
		s.probe(ctx, t, scenario{probes: slices.Concat(step.probes, always)})
	}
}
