package proxiertest

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
)

const (
	// draws is the number of connections in a test of uniform distribution.
	draws = 2000
	// drawers is the number of clients that dial at the same time.
	drawers = 4
	// manyEndpoints is above 1,000, where kube-proxy's iptables mode skips full syncs.
	manyEndpoints = 1200
	manyDraws     = 400
	// manyDistinct is the least number of them that answer: 340 are expected, with a
	// standard deviation of 6.
	manyDistinct = 290
)

// spreadScenarios are about the distribution of connections over endpoints.
func spreadScenarios() []scenario {
	// The limits are quantiles of the chi-squared distribution for one false alarm in a
	// million samples; each run has twelve.
	limits := []struct {
		endpoints int
		limit     float64
	}{{3, 27.63}, {7, 38.26}, {10, 44.81}}
	var all []scenario
	for _, l := range limits {
		all = append(all, scenario{
			name: fmt.Sprintf("spreading/%d_endpoints", l.endpoints), rule: "Connections spread uniformly over the endpoints.",
			services: []service{{endpoints: crowd(l.endpoints)}},
			play:     playSpread(l.endpoints, l.limit),
		})
	}
	return all
}

func playSpread(endpoints int, limit float64) func(context.Context, *testing.T, *stage) {
	return func(ctx context.Context, t *testing.T, s *stage) {
		t.Helper()
		s.report(t, (&scenario{}).combos(), func(c combo) []result {
			counts, err := s.draw(ctx, c, draws)
			if err == nil {
				err = uniform(counts, endpoints, limit, c)
			}
			return single("uniform", err)
		})
	}
}

// uniform is Pearson's chi-squared test.
func uniform(counts map[netip.Addr]int, endpoints int, limit float64, c combo) error {
	expected, sum := float64(draws)/float64(endpoints), 0.0
	for n := range endpoints {
		off := float64(counts[crowdAddr(c.family, n+1)]) - expected
		sum += off * off / expected
	}
	if len(counts) > endpoints || sum > limit {
		return fmt.Errorf("%d connections are distributed as %v: chi-squared %.1f, want at most %.1f", draws, counts, sum, limit)
	}
	return nil
}

// draw counts the answers of each server to connections to the first ClusterIP.
func (s *stage) draw(ctx context.Context, c combo, n int) (map[netip.Addr]int, error) {
	to := s.services[0].targets(s.world, c.family)[clusterIP]
	from := s.seat(client, c.family)
	var (
		mu       sync.Mutex // guards counts and firstErr
		counts   = map[netip.Addr]int{}
		firstErr error
		all      sync.WaitGroup
	)
	for range drawers {
		all.Go(func() {
			for range n / drawers {
				answer, err := from.ask(ctx, c.network, to, answerTimeout)
				mu.Lock()
				counts[answer.Local.Addr()]++
				if err != nil && firstErr == nil {
					firstErr = err
				}
				mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	all.Wait()
	return counts, firstErr
}

// extremeScenarios are about many endpoints, long names and SCTP.
func extremeScenarios(f Features) []scenario {
	sctp := func(s *v1.Service) {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "sctp", Protocol: v1.ProtocolSCTP, Port: servicePort, NodePort: s.Spec.Ports[0].NodePort})
	}
	long := func(char string) string { return strings.Repeat(char, 63) }
	everyWay := func(w want) []probe {
		return append(every([]place{client, node}, external(), w), probe{from: client, to: clusterIP, want: w})
	}
	scenarios := []scenario{
		{
			name: "many_endpoints", rule: "A Service with more than a thousand endpoints uses all of them.",
			services: []service{{endpoints: crowd(manyEndpoints)}},
			play:     playMany,
		},
		{
			name: "longest_names", rule: "The longest names that the API allows can be programmed.",
			services: []service{{
				namespace: long("n"), name: long("s"), tcpPort: long("t"), udpPort: long("u"),
				external: true, endpoints: ready(pod1, remote0), options: []ServiceOption{ExternalPolicyLocal(), ClientAffinity(longAffinity)},
			}},
			probes: every([]place{client}, external(), keptBy(pod1)),
		},
		{
			name: "longest_names/rejected", rule: "The longest names that the API allows can be rejected.",
			services: []service{{namespace: long("n"), name: long("s"), tcpPort: long("t"), udpPort: long("u"), external: true}},
			probes:   everyWay(isRejected()),
		},
	}
	if f.NoSCTP {
		return scenarios
	}
	return append(scenarios, scenario{
		name: "SCTP_beside_TCP_and_UDP", rule: "One port number under three protocols is three service ports.",
		services: []service{
			{external: true, endpoints: ready(pod1, remote0), options: []ServiceOption{sctp}},
			{external: true, options: []ServiceOption{sctp}},
		},
		probes: append(everyWay(masqueradedTo(pod1, remote0)), toSecond(everyWay(isRejected()))...),
	})
}

func playMany(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	s.report(t, (&scenario{}).combos(), func(c combo) []result {
		counts, err := s.draw(ctx, c, manyDraws)
		if err != nil {
			return single("used", err)
		}
		if len(counts) < manyDistinct {
			err = fmt.Errorf("%d connections reached %d of %d endpoints, want at least %d", manyDraws, len(counts), manyEndpoints, manyDistinct)
		}
		return single("used", err)
	})
}
