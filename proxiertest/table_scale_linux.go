package proxiertest

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

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
		all = append(all, checks(fmt.Sprintf("spreading/%d_endpoints", l.endpoints), "Connections spread uniformly over the endpoints.",
			checkSpread(l.endpoints, l.limit), service{endpoints: manyPods(l.endpoints)}))
	}
	return all
}

func checkSpread(endpoints int, limit float64) checker {
	return func(ctx context.Context, s *stage, c combo) []result {
		counts, err := s.draw(ctx, c, clusterIP, draws)
		if err == nil {
			err = distributed(counts, slices.Repeat([]int{1}, endpoints), limit, c)
		}
		return single("uniform", err)
	}
}

// distributed is Pearson's chi-squared test of answers by a extra with these weights.
func distributed(counts map[netip.Addr]int, weights []int, limit float64, c combo) error {
	asked, total, sum := 0, 0, 0.0
	for _, n := range counts {
		asked += n
	}
	for _, w := range weights {
		total += w
	}
	for i, w := range weights {
		got, expected := float64(counts[crowdAddr(c.family, i+1)]), float64(asked*w)/float64(total)
		switch {
		case w > 0:
			sum += (got - expected) * (got - expected) / expected
		case got > 0:
			return fmt.Errorf("%v connections to endpoint %d, whose weight is 0", got, i+1)
		}
	}
	if len(counts) > len(weights) || sum > limit {
		return fmt.Errorf("%d connections to endpoints with weights %v are distributed as %v: chi-squared %.1f, want at most %.1f", asked, weights, counts, sum, limit)
	}
	return nil
}

// draw counts the answers of each server to connections to the first service.
func (s *stage) draw(ctx context.Context, c combo, at target, n int) (map[netip.Addr]int, error) {
	from, to := s.sender(client, c.family), s.address(at, c.family)
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
		checks("many_endpoints", "A Service with more than a thousand endpoints uses all of them.",
			checkMany, service{endpoints: manyPods(manyEndpoints)}),
		packets("longest_names", "The longest names that the API allows can be programmed.",
			setupDefault, []service{{
				namespace: long("n"), name: long("s"), tcpPort: long("t"), udpPort: long("u"),
				external: true, endpoints: ready(pod1, remote0), options: []ServiceOption{ExternalPolicyLocal(), ClientAffinity(longAffinity)},
			}},
			every([]place{client}, external(), keptBy(pod1))),
		packets("longest_names/rejected", "The longest names that the API allows can be rejected.",
			setupDefault, []service{{namespace: long("n"), name: long("s"), tcpPort: long("t"), udpPort: long("u"), external: true}},
			everyWay(isRejected())),
	}
	if f.NoSCTP {
		return scenarios
	}
	return append(scenarios, packets("SCTP_beside_TCP_and_UDP", "One port number under three protocols is three service ports.",
		setupDefault, []service{
			{external: true, endpoints: ready(pod1, remote0), options: []ServiceOption{sctp}},
			{external: true, options: []ServiceOption{sctp}},
		},
		everyWay(masqueradedTo(pod1, remote0)), toSecond(everyWay(isRejected()))))
}

func checkMany(ctx context.Context, s *stage, c combo) []result {
	counts, err := s.draw(ctx, c, clusterIP, manyDraws)
	if err == nil && len(counts) < manyDistinct {
		err = fmt.Errorf("%d connections reached %d of %d endpoints, want at least %d", manyDraws, len(counts), manyEndpoints, manyDistinct)
	}
	return single("used", err)
}
