package main

import (
	"fmt"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/programmed"
	"github.com/serviceplane/serviceplane/programmed/cluster"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// leaving is a Service whose pod on node-1 ends, with another endpoint or none.
type leaving struct {
	name    string
	options []proxiertest.ServiceOption
	other   proxiertest.SliceOption // nil: none
	port    string                  // of the slice of the other; empty: that of the Service
	twice   bool                    // the pod is listed in two slices
	unnamed bool                    // its endpoint names no pod
	drained bool                    // the other has weight 0
	stays   bool                    // some node sends to the pod while it serves
}

const leavingPod, leavingOther, leavingLocal = "10.244.1.200", "10.244.2.200", "10.244.1.201"

func leavings() []leaving {
	elsewhere := proxiertest.Endpoint(leavingOther, proxiertest.OnNode("node-2"))
	external, internal := proxiertest.ExternalPolicyLocal(), proxiertest.InternalPolicyLocal()
	local := []proxiertest.ServiceOption{external, internal}
	return []leaving{
		{name: "another is ready", other: elsewhere},
		{name: "no other", stays: true},
		{name: "another is not ready", other: proxiertest.Endpoint(leavingOther, proxiertest.OnNode("node-2"), proxiertest.NotServing()), stays: true},
		{name: "another lacks the port", other: elsewhere, port: "another", stays: true},
		{name: "another has weight 0", other: elsewhere, drained: true, stays: true},
		{name: "external policy, last of its node", options: local[:1], other: elsewhere, stays: true},
		{name: "internal policy, last of its node", options: local[1:], other: elsewhere, stays: true},
		{name: "both policies, another on its node", options: local, other: proxiertest.Endpoint(leavingLocal, proxiertest.OnNode("node-1"))},
		{name: "session affinity", options: []proxiertest.ServiceOption{proxiertest.ClientAffinity(time.Hour)}, other: elsewhere},
		{name: "listed twice", other: elsewhere, twice: true},
		{name: "not named", other: elsewhere, unnamed: true},
	}
}

// leavingService is a leaving in a fabric.
type leavingService struct {
	*leaving
	*fabric

	number int
}

func (s *leavingService) vip() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 1, byte(1 + s.number)}), 80)
}

func (s *leavingService) nodePort() uint16 { return uint16(30100 + 2*s.number) }

func (s *leavingService) service() string { return fmt.Sprintf("leaving-%d", s.number) }

// publish writes the objects, with the pod in this condition.
func (s *leavingService) publish(condition ...proxiertest.EndpointOption) {
	s.t.Helper()
	ports := func(name string) []proxiertest.SliceOption {
		return []proxiertest.SliceOption{proxiertest.SlicePort(name+"-tcp", v1.ProtocolTCP, 8080), proxiertest.SlicePort(name+"-udp", v1.ProtocolUDP, 8080)}
	}
	slice := func(name, port string, endpoint proxiertest.SliceOption) {
		of := proxiertest.Slice("shop", s.service(), discovery.AddressTypeIPv4, append(ports(port), proxiertest.SliceName(s.service()+name), endpoint)...)
		if s.drained && name == "-other" {
			of.Annotations = map[string]string{weightAnnotation: "0"}
		}
		s.api.Put(s.t, of)
	}
	pod := proxiertest.Endpoint(leavingPod, append(condition, proxiertest.OnNode("node-1"), func(e *discovery.Endpoint) {
		if !s.unnamed {
			e.TargetRef = &v1.ObjectReference{Kind: "Pod", Name: s.service()}
		}
	})...)
	if s.other != nil {
		port := s.port
		if port == "" {
			port = "web"
		}
		slice("-other", port, s.other)
	}
	slice("-pod", "web", pod)
	if s.twice {
		slice("-again", "web", pod)
	}
}

// reach opens connections and sends datagrams to every frontend, from pods, the node and outside, and returns
// how many it made, and how many the pod answered. No other answer, or none, is a fault here.
func (s *leavingService) reach(rounds int) (made, reached int64) {
	s.t.Helper()
	var count, hits atomic.Int64
	var asking sync.WaitGroup
	ask := func(from *netns.NS, network string, to netip.AddrPort) {
		for range rounds {
			asking.Go(func() {
				count.Add(1)
				answer, err := netns.Ask(s.t.Context(), from, network, to, netns.AskOptions{Timeout: time.Second})
				if err == nil && answer.Local.Addr() == netip.MustParseAddr(leavingPod) {
					hits.Add(1)
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
	return count.Load(), hits.Load()
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
	return client.WaitUntilLeft(s.t.Context(), programmed.Pod{Namespace: "shop", Name: s.service(), IPs: []string{leavingPod}}, client.Dial(cluster.NodeOptions{Client: asking}))
}

// test ends the pod. The hook must not end while some node sends to the pod, and after the hook, none does.
func (s *leavingService) test() {
	s.t.Helper()
	options := append([]proxiertest.ServiceOption{
		proxiertest.ClusterIPs(s.vip().Addr().String()), proxiertest.NodePort("web-tcp", v1.ProtocolTCP, 80, int32(s.nodePort())),
		proxiertest.NodePort("web-udp", v1.ProtocolUDP, 80, int32(s.nodePort())+1),
	}, s.options...)
	s.api.Put(s.t, proxiertest.Service("shop", s.service(), options...))
	s.publish()
	s.follow(s.nodes...)
	poll.Until(s.t, s.name+": connections reach the pod before it ends", func() bool { _, reached := s.reach(1); return reached > 0 })
	ended := make(chan error, 1)
	go func() { ended <- s.waitUntilLeft() }()
	s.publish(proxiertest.Terminating())
	s.follow(s.nodes...)
	began := time.Now()
	if s.stays {
		if made, reached := s.reach(4); reached == 0 {
			s.t.Errorf("%s: none of %d connections reaches the pod, although no node has a better endpoint", s.name, made)
		}
		select {
		case err := <-ended:
			s.t.Errorf("%s: the hook has ended with %v, but nodes still send to the pod", s.name, err)
			return
		default:
		}
		s.publish(proxiertest.NotServing())
		s.follow(s.nodes...)
		began = time.Now()
	}
	err := <-ended
	took := time.Since(began)
	made, reached := s.reach(12)
	if err != nil || made < 200 || reached > 0 {
		s.t.Errorf("%s: the hook ended with %v, then %d of %d connections reached the pod, want no error and none of 200 or more", s.name, err, reached, made)
	}
	s.t.Logf("%s: the hook ended %v after all nodes had the change; then none of %d new connections and datagrams reached the pod", s.name, took.Round(time.Millisecond), made)
}

// TestNoConnectionReachesThePodAfterTheHook, in every mode that this kernel has, whatever the traffic policies, the
// other endpoints and the EndpointSlices are: with real nodes, packets and hooks.
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
				if m == modeEBPF {
					return append(newBPFWorld(t).flags(), "--proxy-mode=ebpf")
				}
				return []string{"--proxy-mode=" + string(m)}
			})
			for i, n := range f.nodes {
				server, err := netns.Serve(t.Context(), n.pods, fmt.Sprintf("pods-%d", i+1), 8080)
				netnstest.Check(t, err)
				t.Cleanup(func() { netnstest.Check(t, server.Close()) })
			}
			for i, l := range chance.Some(t, 5, leavings()...) {
				s := &leavingService{&l, f, i}
				s.test()
			}
		})
	}
}
