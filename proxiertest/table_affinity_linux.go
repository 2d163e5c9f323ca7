package proxiertest

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/internal/pause"
)

const (
	longAffinity = 10 * time.Minute
	// shortAffinity is a timeout that the test waits for: it is refreshed at a third of it, and
	// has ended after quietTime.
	shortAffinity = 4 * time.Second
	refreshEvery  = shortAffinity / 3
	quietTime     = shortAffinity + time.Second
)

// affinityScenarios are about session affinity. Twenty clients, each with its own address,
// do not all get the same endpoint again by chance.
func affinityScenarios(f Features) []scenario {
	var outlived []string
	if f.AffinityOutlivesTimeout {
		outlived = []string{"udp"}
	}
	anywhere := sticky(longAffinity, ready(pod0, pod1, remote0))
	return []scenario{
		checks("PKT-60", "With session affinity, a client reaches the same endpoint through every frontend of a service port.",
			checkStickiness, anywhere),
		checks("PKT-60/timeout", "Session affinity ends after the timeout without a connection; every connection restarts the timeout.",
			checkTimeout, sticky(shortAffinity, ready(pod0, pod1, remote0))).over(outlived...),
		plays("PKT-60/ports", "Each port of a Service has session affinity of its own.", playPortsApart, anywhere),
		plays("PKT-61", "A client whose endpoint is gone gets another one, and stays there; other clients stay where they are.",
			playLostEndpoint, anywhere),
		checks("PKT-61/policy", "Session affinity never sends a client to an endpoint that the traffic policy excludes.",
			checkPolicyOverAffinity, sticky(longAffinity, ready(pod1, remote0, remote1), ExternalPolicyLocal())),
		checks("PKT-62", "All processes with one source address are one client.", checkSharedAddress, anywhere),
	}
}

func sticky(timeout time.Duration, endpoints []endpoint, opts ...ServiceOption) service {
	return service{external: true, endpoints: endpoints, options: append(opts, ClientAffinity(timeout))}
}

// round is the endpoint of each client.
type round []string

// ask sends one request of every client.
func (s *stage) ask(ctx context.Context, c combo, at target) (round, error) {
	return s.askInTurn(ctx, c, at, false)
}

func (s *stage) askInTurn(ctx context.Context, c combo, at target, backwards bool) (round, error) {
	to := s.address(at, c.family)
	servers := make(round, clientAddrs)
	for i := range servers {
		if backwards {
			i = clientAddrs - 1 - i
		}
		answer, err := s.client(i, c).ask(ctx, c.network, to, answerTimeout)
		if err != nil {
			return nil, fmt.Errorf("client %d -> %s %s: %w", i, c.network, to, err)
		}
		servers[i] = answer.Server
	}
	return servers, nil
}

// client returns the n-th client, whose address no other probe uses.
func (s *stage) client(i int, c combo) sender {
	return s.world.Client.sender(2+i, c.family) // after those of client and otherClient
}

// expect asks again, and compares with the endpoints before.
func (s *stage) expect(ctx context.Context, c combo, at target, before round) error {
	now, err := s.ask(ctx, c, at)
	if err == nil && !slices.Equal(now, before) {
		err = fmt.Errorf("%s: clients reach %v, want the same as before, %v", at, now, before)
	}
	return err
}

func checkStickiness(ctx context.Context, s *stage, c combo) (results []result) {
	var first round
	for _, at := range []target{clusterIP, nodePort, externalIP, loadBalancer} {
		var err error
		if first == nil || s.features.AffinityPerFrontend {
			first, err = s.ask(ctx, c, at)
			results = append(results, single("first_to_"+string(at), err, spread(first))...)
		}
		for n := range 3 {
			results = append(results, single(fmt.Sprintf("again_to_%s_%d", at, n), s.expect(ctx, c, at, first))...)
		}
	}
	return results
}

// playPortsApart compares the two ports of the Service, which differ in protocol.
// The clients ask the second one in the opposite order: so they get other endpoints, unless
// the ports share session affinity.
func playPortsApart(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	for _, family := range families() {
		t.Run(string(family), func(t *testing.T) {
			tcp, err := s.ask(ctx, combo{family: family, network: "tcp"}, clusterIP)
			if err != nil {
				t.Fatal(err)
			}
			udp, err := s.askInTurn(ctx, combo{family: family, network: "udp"}, clusterIP, true)
			if err != nil {
				t.Fatal(err)
			}
			if slices.Equal(tcp, udp) { // by chance: 3^-20
				t.Errorf("all %d clients reach the same endpoint on both ports", len(tcp))
			}
		})
	}
}

// spread returns an error if all clients reached one server, as with session affinity by
// Service instead of by client.
func spread(r round) error {
	if len(r) > 0 && len(slices.Compact(slices.Clone(r))) == 1 {
		return fmt.Errorf("all %d clients reach %s", len(r), r[0])
	}
	return nil
}

func checkTimeout(ctx context.Context, s *stage, c combo) []result {
	last, err := s.refresh(ctx, c)
	results := single("refreshed", err)
	if err != nil {
		return results
	}
	if !pause.For(ctx, quietTime) {
		return single("ended", ctx.Err())
	}
	later, err := s.ask(ctx, c, clusterIP)
	if err == nil && slices.Equal(last, later) { // by chance: 3^-20
		err = fmt.Errorf("all %d clients reach the same endpoint %v after their last connection", len(later), quietTime)
	}
	return append(results, single("ended", err)...)
}

// refresh connects again and again, for longer than the timeout, and expects that all clients
// stay where they are. It begins again if more than the timeout may have passed between two
// connections of a client, at most a few times.
func (s *stage) refresh(ctx context.Context, c combo) (round, error) {
	const attempts = 6
	for range attempts {
		last, inTime, err := s.refreshOnce(ctx, c)
		if inTime {
			return last, err
		}
	}
	return nil, fmt.Errorf("each time, connections of %d clients took longer than the timeout of %v: test on a machine that is less busy",
		clientAddrs, shortAffinity)
}

func (s *stage) refreshOnce(ctx context.Context, c combo) (first round, inTime bool, err error) {
	began := time.Now()
	first, err = s.ask(ctx, c, clusterIP)
	for before := began; err == nil && time.Since(began) < shortAffinity+refreshEvery; {
		if !pause.For(ctx, time.Until(before.Add(refreshEvery))) {
			return nil, true, ctx.Err()
		}
		now := time.Now()
		err = s.expect(ctx, c, clusterIP, first)
		if time.Since(before) >= shortAffinity {
			return nil, false, nil
		}
		before = now
	}
	return first, true, err
}

func playLostEndpoint(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	rounds := map[combo]round{}
	for _, c := range combos() {
		first, err := s.ask(ctx, c, clusterIP)
		if err != nil {
			t.Fatal(err)
		}
		rounds[c] = first
	}
	s.publish(ctx, t, sticky(longAffinity, ready(pod0, remote0)))
	moved := map[combo]round{}
	for c, before := range rounds {
		now, err := s.ask(ctx, c, clusterIP)
		if err != nil {
			t.Fatal(err)
		}
		moved[c] = now
		for i := range before {
			if stayed := now[i] == before[i]; stayed == (before[i] == string(pod1)) {
				t.Errorf("%s: client %d reached %s, and without %s it reaches %s", c, i, before[i], pod1, now[i])
			}
		}
	}
	s.publish(ctx, t, sticky(longAffinity, ready(pod0, pod1, remote0)))
	s.report(t, combos(), func(c combo) []result {
		stays := single("stays_after_return", s.expect(ctx, c, clusterIP, moved[c]))
		if s.features.AffinityPerFrontend {
			return stays
		}
		return append(stays, single("stays_after_return_elsewhere", s.expect(ctx, c, loadBalancer, moved[c]))...)
	})
}

func checkPolicyOverAffinity(ctx context.Context, s *stage, c combo) []result {
	inside, err := s.ask(ctx, c, clusterIP)
	results := single("inside", err)
	if !slices.Contains(inside, string(remote0)) && !slices.Contains(inside, string(remote1)) {
		results = append(results, single("inside", fmt.Errorf("no client reaches a remote endpoint: %v", inside))...)
	}
	onlyLocal := slices.Repeat(round{string(pod1)}, clientAddrs)
	return append(results, single("outside",
		s.expect(ctx, c, nodePort, onlyLocal), s.expect(ctx, c, loadBalancer, onlyLocal), s.expect(ctx, c, externalIP, onlyLocal))...)
}

func checkSharedAddress(ctx context.Context, s *stage, c combo) (results []result) {
	for _, from := range []place{node, client, pod2} {
		results = append(results, single(string(from), s.oneServer(ctx, s.sender(from, c.family), c.network, s.address(clusterIP, c.family)))...)
	}
	return results
}

// oneServer asks often, from a new port each time, and wants the same server.
func (s *stage) oneServer(ctx context.Context, from sender, network string, to netip.AddrPort) error {
	first := ""
	for range 3 * minAsks {
		answer, err := from.ask(ctx, network, to, answerTimeout)
		if err != nil {
			return err
		}
		if first == "" {
			first = answer.Server
		}
		if answer.Server != first {
			return fmt.Errorf("%s -> %s %s: answered by %s and then by %s, want always the same", from.addr, network, to, first, answer.Server)
		}
	}
	return nil
}
