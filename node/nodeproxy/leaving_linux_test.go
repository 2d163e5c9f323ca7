package nodeproxy

import (
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/endings"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/node/programmed/cluster"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// leavingService is an Ending in a fabric.
type leavingService struct {
	*endings.Ending
	*fabric

	number int
	ended  chan error // by the hook
}

// leaving gives an Ending its addresses. Others may have them when it is removed.
func (f *fabric) leaving(e *endings.Ending, number int) *leavingService {
	const slots = 50
	slot := number % slots
	e.Name = fmt.Sprintf("leaving-%d", number)
	e.IP, e.Near = fmt.Sprintf("10.244.1.%d", 128+slot), fmt.Sprintf("10.244.1.%d", 128+slots+slot)
	if e.Far = fmt.Sprintf("10.244.2.%d", 128+slot); e.Others == "ejected" {
		e.Far = "10.244.2.3" // nobody answers
	}
	return &leavingService{e, f, number, make(chan error, 1)}
}

func (s *leavingService) vip() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 1, byte(1 + s.number)}), 80)
}

func (s *leavingService) nodePort() uint16 { return uint16(30100 + 2*s.number) }

// publish writes the objects, with the pod in this condition; nil means ready.
func (s *leavingService) publish(condition proxiertest.EndpointOption) {
	s.t.Helper()
	service := s.Service(proxiertest.ClusterIPs(s.vip().Addr().String()),
		proxiertest.NodePort("web-tcp", v1.ProtocolTCP, 80, int32(s.nodePort())), proxiertest.NodePort("web-udp", v1.ProtocolUDP, 80, int32(s.nodePort())+1))
	if s.Others == "ejected" {
		service.Annotations = map[string]string{healthAnnotation: "tcp interval=1s"}
	}
	s.api.Put(s.t, service)
	for _, slice := range s.Slices(condition) {
		if s.Others == "with weight 0" && strings.HasSuffix(slice.Name, "-others") {
			slice.Annotations = map[string]string{weightAnnotation: "0"}
		}
		s.api.Put(s.t, slice)
	}
}

// unlist deletes the EndpointSlices.
func (s *leavingService) unlist() {
	s.t.Helper()
	for _, slice := range s.Slices(nil) {
		s.api.Delete(s.t, slice)
	}
}

// reach opens connections and sends datagrams to every frontend, from pods, the node and outside, and returns
// how many it made, and which the pod answered. No other answer, or none, is a fault here.
func (s *leavingService) reach(rounds int) (made int64, reached []string) {
	s.t.Helper()
	var count atomic.Int64
	var mu sync.Mutex // guards reached
	var asking sync.WaitGroup
	ask := func(from *netns.NS, network string, to netip.AddrPort) {
		for range rounds {
			options := netns.AskOptions{Timeout: time.Second}
			if network == "udp" { // with the port of an earlier flow, it would be the same flow
				options.From, options.FromPort = netip.IPv4Unspecified(), 11_000+uint16(s.flows.Add(1)%19_000)
			}
			asking.Go(func() {
				count.Add(1)
				answer, err := netns.Ask(s.t.Context(), from, network, to, options)
				if err == nil && answer.Local.Addr() == netip.MustParseAddr(s.IP) {
					mu.Lock()
					defer mu.Unlock()
					reached = append(reached, fmt.Sprintf("%s from %v to %v", network, answer.Source, to))
				}
			})
		}
	}
	for _, n := range s.nodes {
		for i, network := range []string{"tcp", "udp"} {
			ask(n.client, network, s.vip())
			ask(n.ns, network, s.vip())
			ask(s.hub, network, netip.AddrPortFrom(netip.MustParseAddr(n.address), s.nodePort()+uint16(i)))
		}
	}
	asking.Wait()
	return count.Load(), reached
}

// waitUntilLeft is the hook of the pod, from its network.
func (s *leavingService) waitUntilLeft() error {
	from := s.nodes[0].pods
	config := &rest.Config{Host: "http://172.20.1.1:6444", Dial: from.Dial}
	client, err := cluster.New(config)
	if err != nil {
		return err
	}
	asking := &http.Client{Transport: &http.Transport{DialContext: from.Dial, MaxIdleConnsPerHost: 1}}
	defer asking.CloseIdleConnections()
	return client.WaitUntilLeft(s.t.Context(), cluster.Pod{Namespace: "shop", Name: s.Name, IPs: []string{s.IP}}, client.Dial(cluster.NodeOptions{Client: asking}))
}

// begin has the pod ready on all nodes, and the other endpoint ejected if that is wanted.
func (s *leavingService) begin() {
	s.t.Helper()
	s.publish(nil)
	s.follow(s.nodes...)
	if s.Others == "ejected" {
		other := []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr(s.Far), 8080)}
		// Ports of UDP are not checked, and on other nodes it may be the last one, which stays.
		poll.Until(s.t, "the node of the pod ejects the other endpoint", func() bool {
			err := s.lacks(s.nodes[0], programmed.ServiceChange{Left: other})
			return err == nil || !strings.Contains(err.Error(), `"web-tcp"`)
		})
	}
	poll.Until(s.t, s.String()+": connections reach the pod before it ends", func() bool { _, reached := s.reach(1); return len(reached) > 0 })
}

// end starts the hook, and writes that the pod ends. It returns the nodes that can know it.
func (s *leavingService) end() (following []*fabricNode) {
	s.t.Helper()
	hook := func() { go func() { s.ended <- s.waitUntilLeft() }() }
	late := s.nodes[2].line
	switch s.Objects {
	case "known":
		s.publish(proxiertest.Terminating())
		hook()
	case "late":
		hook()
		s.publish(proxiertest.Terminating())
	case "listed again":
		hook()
		s.api.Stop()
		s.publish(proxiertest.Terminating())
		s.api.Compact()
		s.api.Start(s.t)
	case "late at one node":
		late.cut()
		hook()
		s.publish(proxiertest.Terminating())
		return s.nodes[:2]
	case "deleted before":
		late.cut()
		s.unlist()
		hook()
		return s.nodes[:2]
	}
	return s.nodes
}

func (s *leavingService) hasEnded() bool {
	select {
	case err := <-s.ended:
		s.ended <- err
		return true
	default:
		return false
	}
}

// stillReached reports whether connections reach the pod, and the hook waits for that. After the hook, none may.
func (s *leavingService) stillReached() bool {
	s.t.Helper()
	ended := s.hasEnded()
	made, reached := s.reach(4)
	if ended && len(reached) > 0 {
		s.t.Errorf("%v: the hook has ended, and of %d connections reach the pod: %q", s, made, reached)
	}
	return len(reached) > 0 && !s.hasEnded()
}

// test ends the pod. The hook must not end while some node sends to the pod, and after the hook, none does. It returns
// how long the hook took after no node sent to the pod any more.
func (s *leavingService) test() (took time.Duration) {
	s.t.Helper()
	s.begin()
	following := s.end()
	s.follow(following...)
	began, reached := time.Now(), s.stillReached()
	if len(following) < len(s.nodes) {
		s.nodes[2].line.open()
		s.follow(s.nodes...)
		began, reached = time.Now(), s.stillReached()
	}
	if reached {
		s.publish(proxiertest.NotServing())
		s.follow(s.nodes...)
		began = time.Now()
	}
	err := <-s.ended
	took = time.Since(began)
	made, hits := s.reach(12)
	if err != nil || made < 200 || len(hits) > 0 {
		s.t.Errorf("%v: the hook ended with %v, then of %d connections reached the pod: %q, want no error and none of 200 or more", s, err, made, hits)
	}
	s.api.Delete(s.t, s.Service())
	s.unlist()
	s.follow(s.nodes...)
	return took
}

// No connection reaches the pod after the hook, in every mode that this kernel has, whatever the traffic policies,
// the topology, the other endpoints and the EndpointSlices are, and whenever the nodes and the hook see them: with
// real nodes, packets and hooks.
func TestNoConnectionReachesThePodAfterTheHook(t *testing.T) {
	t.Parallel()
	modes := []mode{modeNFTables, modeIPTables, modeEBPF, modeUserspace}
	if inVM() {
		modes = []mode{modeIPVS}
	}
	for _, m := range modes {
		t.Run(string(m), func(t *testing.T) {
			t.Parallel()
			f := newFabric(t, 0, func() []string {
				flags := []string{"--endpoint-health", "--proxy-mode=" + string(m)}
				if m == modeEBPF {
					flags = append(flags, newBPFWorld(t).flags()...)
				}
				return flags
			})
			for i, n := range f.nodes {
				server, err := netns.Serve(t.Context(), n.pods, fmt.Sprintf("pods-%d", i+1), 8080)
				netnstest.Check(t, err)
				t.Cleanup(func() { netnstest.Check(t, server.Close()) })
			}
			for i, e := range chance.Some(t, 5, endings.Pairs()...) {
				s := f.leaving(e, i)
				t.Logf("%v: the hook ended %v after no node sent to the pod any more", s, s.test().Round(time.Millisecond))
			}
		})
	}
}
