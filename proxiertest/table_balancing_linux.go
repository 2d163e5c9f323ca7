package proxiertest

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// annotationBalancing chooses the load balancing policy of a Service.
const annotationBalancing = "proxiertest/balancing"

func balanced(b changetracker.Balancing) ServiceOption {
	return annotated(annotationBalancing, b.String())
}

func annotated(name, value string) ServiceOption {
	return func(s *v1.Service) {
		if s.Annotations == nil {
			s.Annotations = map[string]string{}
		}
		s.Annotations[name] = value
	}
}

func chooseBalancing(p *changetracker.ServicePort, s *v1.Service) {
	chooseEnding(p, s)
	chooseLimit(p, s)
	if text := s.Annotations[annotationBalancing]; text != "" {
		_ = p.Balancing.UnmarshalText([]byte(text)) // it is the text of balanced
	}
}

// weight gives an endpoint a weight. One of weight 0 gets no new connections, and keeps
// those that it has.
func weight(n int) EndpointOption {
	return func(e *discovery.Endpoint) { e.Hostname = new("weight-" + strconv.Itoa(n)) }
}

// group makes an endpoint stand by while one of a lower group serves.
func group(n int, at ...place) []endpoint {
	return inCondition(func(e *discovery.Endpoint) { e.Hostname = new("group-" + strconv.Itoa(n)) }, at)
}

func chooseWeight(e *changetracker.Endpoint, api *discovery.Endpoint, _ *discovery.EndpointSlice) {
	if api.Hostname == nil {
		return
	}
	what, text, _ := strings.Cut(*api.Hostname, "-")
	switch n, _ := strconv.Atoi(text); what {
	case "weight":
		e.Weight, e.Maintenance = uint16(n), n == 0
	case "group":
		e.Priority = uint8(n)
	}
}

// weightedCrowd is a extra with weights.
func weightedCrowd(weights ...int) []endpoint {
	endpoints := manyPods(len(weights))
	for i, w := range weights {
		endpoints[i].condition = weight(w)
	}
	return endpoints
}

const (
	// weightedDraws is the number of connections in a test of weights, and weightedLimit the
	// quantile of the chi-squared distribution with two degrees of freedom for one false alarm
	// in a million.
	weightedDraws = 400
	weightedLimit = 27.63
	// hashedFlows is the number of flows in a test of a consistent hash, and maxMoved the
	// greatest share of them that may move beside those of the endpoint that has gone.
	hashedFlows, firstHashedPort = 400, 20000
	maxMoved                     = 0.02
	// heldConnections are open at the same time in a test of least connections.
	heldConnections = 12
)

// balancingScenarios are about load balancing policies and weights.
func balancingScenarios(f Features) []scenario {
	hashed := func(b changetracker.Balancing, options ...ServiceOption) service {
		return service{external: true, endpoints: manyPods(10), options: append(options, balanced(b))}
	}
	weights := []int{1, 2, 5, 0}
	local := service{external: true, endpoints: weightedCrowd(weights...), options: []ServiceOption{ExternalPolicyLocal()}}
	local.endpoints = append(local.endpoints, endpoint{at: remote0, condition: weight(100)})
	least := balanced(changetracker.LeastConnections)
	all := []scenario{
		checks("PKT-90", "Connections are distributed in proportion to the weights of the endpoints. One of weight 0 gets none.",
			checkWeights(weights, clusterIP, nodePort), service{external: true, endpoints: weightedCrowd(weights...)}),
		checks("PKT-90/policy", "Weights apply to the endpoints that the traffic policy allows.", checkWeights(weights, nodePort), local),
		checks("PKT-90/affinity", "With weights and any policy, session affinity keeps a client at its endpoint.",
			checkStickiness, sticky(longAffinity, []endpoint{{at: pod0, condition: weight(2)}, {at: pod1}, {at: remote0}}, least)),
	}
	all = slices.Concat(all, failoverScenarios(), exposureScenarios())
	if !f.NoHash {
		all = append(all,
			plays("PKT-91",
				"With policy source-hash, a client gets the same endpoint at every frontend, and on every node with the same endpoints.",
				playHash, hashed(changetracker.SourceHash)),
			plays("PKT-92", "When one of ten endpoints goes, at most 2 % of the flows move beside its own.",
				playDisruption, hashed(changetracker.SourcePortHash)),
			plays("PKT-92/affinity", "A consistent hash chooses the first endpoint of a client with session affinity.",
				playHash, hashed(changetracker.SourceHash, ClientAffinity(longAffinity))))
	}
	if f.ClientLimits {
		all = append(all, limitScenarios()...)
	}
	if f.LeastConnections {
		all = append(all, checks("PKT-93", "With policy least-connections, a connection goes to the endpoint with the fewest open ones, by weight.",
			checkLeast, service{external: true, endpoints: weightedCrowd(1, 1, 2), options: []ServiceOption{least}}).over("tcp"))
	}
	return all
}

func checkWeights(weights []int, at ...target) checker {
	return func(ctx context.Context, s *stage, c combo) (results []result) {
		for _, to := range at {
			counts, err := s.draw(ctx, c, to, weightedDraws)
			if err == nil {
				err = distributed(counts, weights, weightedLimit, c)
			}
			results = append(results, single("to_"+string(to), err)...)
		}
		return results
	}
}

// endpoints are those that flows reach, in order.
type reached []netip.Addr

// numbered asks from each of these numbers, which are the clients or the ports of one.
func (s *stage) numbered(n int, ask func(i int) (Answer, error)) (all reached, err error) {
	for i := range n {
		answer, err := ask(i)
		if err != nil {
			return nil, fmt.Errorf("number %d: %w", i, err)
		}
		all = append(all, answer.Local.Addr())
	}
	return all, nil
}

func (s *stage) byClient(ctx context.Context, c combo, at target) (reached, error) {
	to := s.address(at, c.family)
	return s.numbered(clientAddrs, func(i int) (Answer, error) { return s.client(i, c).ask(ctx, c.network, to, answerTimeout) })
}

// playHash compares frontends, connections and nodes. The other node learns of the last
// endpoints first.
func playHash(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	other := &stage{suite: &suite{world: NewTopology(t), features: s.features, factory: s.factory, adjust: s.adjust}}
	other.provider = other.use(ctx, t, setupDefault)
	defer other.stop(ctx, t)
	spec := service{external: true, endpoints: manyPods(10), options: []ServiceOption{balanced(changetracker.SourceHash)}}
	few, reversed := spec, spec
	few.endpoints = manyPods(10)[7:]
	reversed.endpoints = manyPods(10)
	slices.Reverse(reversed.endpoints)
	other.publish(ctx, t, few)
	other.publish(ctx, t, reversed)
	otherwise := 0 // clients
	if s.features.HashFollowsHistory {
		otherwise = 1
	}
	s.report(t, combos(), func(c combo) []result {
		first, err := s.byClient(ctx, c, clusterIP)
		results := single("first", err)
		if distinct := slices.Compact(slices.SortedFunc(slices.Values(first), netip.Addr.Compare)); err == nil && len(distinct) < 4 {
			results = append(results, single("spread", fmt.Errorf("%d clients reach %v only", clientAddrs, distinct))...)
		}
		for _, at := range []target{clusterIP, nodePort, loadBalancer} {
			again, err := s.byClient(ctx, c, at)
			if err == nil && !slices.Equal(first, again) {
				err = fmt.Errorf("clients reach %v, want the same as before, %v", again, first)
			}
			results = append(results, single("again_to_"+string(at), err)...)
		}
		elsewhere, err := other.byClient(ctx, c, nodePort)
		if n := moved(first, elsewhere); err == nil && n > otherwise {
			err = fmt.Errorf("%d of %d clients reach another endpoint through another node, want %d at most: %v, and here %v", n, clientAddrs, otherwise, elsewhere, first)
		}
		return append(results, single("through_another_node", err)...)
	})
}

// moved counts the flows that reach another endpoint.
func moved(before, after reached) (n int) {
	for i := range min(len(before), len(after)) {
		if before[i] != after[i] {
			n++
		}
	}
	return n
}

// byPort asks from many ports of one client.
func (s *stage) byPort(ctx context.Context, c combo, at target) (reached, error) {
	from, to := s.sender(client, c.family), s.address(at, c.family)
	return s.numbered(hashedFlows, func(i int) (Answer, error) {
		return from.host.Ask(ctx, c.network, to, AskOptions{From: from.addr, FromPort: uint16(firstHashedPort + i), Timeout: answerTimeout})
	})
}

// playDisruption asks at another frontend each time, as the same ports are in use at the one
// before, and flushes conntrack: the kernel would give the flows other ports.
func playDisruption(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	combos := combos()
	before := make([]reached, len(combos))
	for i, c := range combos {
		var err error
		if before[i], err = s.byPort(ctx, c, clusterIP); err != nil {
			t.Fatal(err)
		}
	}
	s.flush(t)
	const gone = 3 // its number in the extra
	s.publish(ctx, t, service{
		external: true, endpoints: slices.Delete(manyPods(10), gone-1, gone), options: []ServiceOption{balanced(changetracker.SourcePortHash)},
	})
	s.report(t, combos, func(c combo) []result {
		was := before[slices.Index(combos, c)]
		now, err := s.byPort(ctx, c, loadBalancer)
		if err != nil {
			return single("asked", err)
		}
		own := 0
		for i := range was {
			if was[i] == crowdAddr(c.family, gone) {
				own++
				was[i] = now[i]
			}
		}
		others := moved(was, now)
		if own < hashedFlows/20 || own > hashedFlows/5 {
			err = fmt.Errorf("%d of %d flows were at one of ten endpoints", own, hashedFlows)
		}
		if float64(others) > maxMoved*hashedFlows {
			err = fmt.Errorf("%d of %d flows moved, and %d with their endpoint; want at most %v of the others", others, hashedFlows, own, maxMoved)
		}
		return single("moved", err)
	})
}

// checkLeast holds connections, and ends those to the last endpoint: it gets the next ones.
func checkLeast(ctx context.Context, s *stage, c combo) []result {
	held := map[netip.Addr][]established{}
	defer func() { closeAll(held) }()
	if err := s.hold(ctx, c, heldConnections, held); err != nil {
		return single("held", err)
	}
	for n, want := range []int{heldConnections / 4, heldConnections / 4, heldConnections / 2} {
		if got := len(held[crowdAddr(c.family, n+1)]); got != want {
			return single("held", fmt.Errorf("endpoint %d has %d of %d open connections, want %d", n+1, got, heldConnections, want))
		}
	}
	last := crowdAddr(c.family, 3)
	closeAll(map[netip.Addr][]established{last: held[last]})
	delete(held, last)
	var err error
	poll.Soon(func() bool { // the engine sees their ends somewhat later
		next := map[netip.Addr][]established{}
		defer closeAll(next)
		if err = s.hold(ctx, c, heldConnections/2, next); err == nil && len(next[last]) != heldConnections/2 {
			err = fmt.Errorf("the endpoint without connections gets %d of %d, want all", len(next[last]), heldConnections/2)
		}
		return err == nil
	})
	return single("held", err)
}

// hold opens connections, by their endpoints.
func (s *stage) hold(ctx context.Context, c combo, n int, held map[netip.Addr][]established) error {
	for range n {
		e, err := s.open(ctx, probe{from: client, to: clusterIP}, c)
		if err != nil {
			return err
		}
		at := e.first.Local.Addr()
		held[at] = append(held[at], e)
	}
	return nil
}

func closeAll(held map[netip.Addr][]established) {
	for _, flows := range held {
		for _, e := range flows {
			_ = e.flow.Close()
		}
	}
}
