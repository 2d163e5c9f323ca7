package changetracker

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// portsNamed are service ports p0, p1, and so on.
func portsNamed(n int) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.Ports = nil
		for i := range n {
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "p" + strconv.Itoa(i), Protocol: v1.ProtocolTCP, Port: int32(80 + i)})
		}
	}
}

// bigSlice has a thousand endpoints, and as many ports as it should.
func bigSlice(number, ports int) *discovery.EndpointSlice {
	s := webSlice(fmt.Sprint("web-", number))
	s.Ports = nil
	for i := range ports {
		s.Ports = append(s.Ports, endpointPort("p"+strconv.Itoa(i), v1.ProtocolTCP, int32(8000+i)))
	}
	for i := range 1000 {
		s.Endpoints = append(s.Endpoints, at(netip.AddrFrom4([4]byte{10, byte(number), byte(i >> 8), byte(i)}).String()))
	}
	return s
}

// tooMany returns how many problems there are of too many values.
func tooMany(tracker *Tracker) int { return tracker.ProblemCounts()[ReasonTooMany] }

// A Service and a slice of 1 MB do not take the memory of ten million endpoints.
func TestEndpointsOfManyPortsAreBounded(t *testing.T) {
	const ports, endpoints = 10_000, 1000
	tracker := mustTracker(t)
	tracker.Services.Update(nil, webService(portsNamed(ports)))
	tracker.Endpoints.EndpointSliceUpdate(bigSlice(1, ports), false)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	state, _ := applyAll(t, tracker, v1.IPv4Protocol)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if used := int64(after.HeapAlloc) - int64(before.HeapAlloc); used > 64<<20 {
		t.Errorf("the State takes %d MB, want 64 or less", used>>20)
	}
	for i := range ports {
		got := state.Endpoints(portName("p"+strconv.Itoa(i), v1.ProtocolTCP))
		want := netip.AddrPortFrom(netip.MustParseAddr("10.1.0.12"), uint16(8000+i)) // the 13th
		if len(got) != maxServiceEndpoints/ports || got[len(got)-1].Addr != want {
			t.Fatalf("port %d has %d endpoints up to %v, want %d up to %v", i, len(got), got[len(got)-1].Addr, maxServiceEndpoints/ports, want)
		}
	}
	want := Problem{Object: "Service default/web", Field: "endpoints of IPv4", Value: "9870000 of all ports are not used", Reason: ReasonTooMany}
	if got := tracker.Problems(); !slices.Equal(got, []Problem{want}) || tooMany(tracker) != 1 {
		t.Errorf("problems %v, want %v", got, want)
	}
	tracker.Services.Update(webService(portsNamed(ports)), nil)
	if _, delta := applyAll(t, tracker, v1.IPv4Protocol); len(delta.Changes) != ports || tooMany(tracker) != 0 {
		t.Errorf("%d changes when the Service is deleted, and %v; want %d and no problem", len(delta.Changes), tracker.Problems(), ports)
	}
}

// TestPairsOfAServiceAreBounded: engines write each pair of a frontend and an endpoint, and of a load
// balancer frontend and a source. A Service of 1 MB with 60,000 external IPs and four slices of 1,000
// endpoints has 240 million pairs.
func TestPairsOfAServiceAreBounded(t *testing.T) {
	addresses := func(first byte, n int) (list []string) {
		for i := range n {
			list = append(list, netip.AddrFrom4([4]byte{first, 0, byte(i >> 8), byte(i)}).String())
		}
		return list
	}
	for name, c := range map[string]struct {
		ports, external, balancers, ranges    int
		endpoints, wantBalancers, wantSources int
		problems                              int
	}{
		"few":                        {2, 10, 2, 1000, 1000, 2, 1000, 0},
		"many external IPs":          {1, 5000, 0, 0, maxPairs / 5001, 0, 0, 1},
		"many ports and addresses":   {100, 400, 200, 0, maxPairs / (100 * 601), 200, 0, 1},
		"many sources":               {1, 0, 100, 5000, 1000, 100, maxSources/100 - 100, 1},
		"many that admit each other": {1, 0, 2000, 2, 1000, 128, 2, 1},
		"all":                        {100, 400, 200, 9000, maxPairs / (100 * 413), 12, maxSources/100/12 - 12, 3},
	} {
		tracker := mustTracker(t)
		service := webService(portsNamed(c.ports), func(s *v1.Service) {
			s.Spec.ExternalIPs = addresses(203, c.external)
			for _, ip := range addresses(204, c.balancers) {
				s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: ip})
			}
			for i := range c.ranges {
				s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, fmt.Sprintf("50.%d.%d.0/24", i>>8, i&255))
			}
		})
		tracker.Services.Update(nil, service)
		tracker.Endpoints.EndpointSliceUpdate(bigSlice(1, c.ports), false)
		state, _ := applyAll(t, tracker, v1.IPv4Protocol)
		p := mustService(t, state, portName("p0", v1.ProtocolTCP))
		endpoints := len(state.Endpoints(p.Name))
		if endpoints != c.endpoints || len(p.LoadBalancerVIPs) != c.wantBalancers || len(p.LoadBalancerSourceRanges) != c.wantSources {
			t.Errorf("%s: %d endpoints, %d load balancer IPs, %d source ranges, want %d, %d, %d", name,
				endpoints, len(p.LoadBalancerVIPs), len(p.LoadBalancerSourceRanges), c.endpoints, c.wantBalancers, c.wantSources)
		}
		if got := tooMany(tracker); got != c.problems {
			t.Errorf("%s: %d problems, want %d: %v", name, got, c.problems, tracker.Problems())
		}
		// With fewer addresses, the endpoints that were set aside come back.
		tracker.Services.Update(service, webService(portsNamed(c.ports)))
		state, _ = applyAll(t, tracker, v1.IPv4Protocol)
		if got := len(state.Endpoints(p.Name)); got != 1000 || tooMany(tracker) != 0 {
			t.Errorf("%s: %d endpoints without more addresses, and %v; want 1000 and no problem", name, got, tracker.Problems())
		}
	}
}

// Frontends share the slots, and a problem names a Service with a consistent hash that gets fewer slots.
func TestSlotsAreSharedByFrontends(t *testing.T) {
	for _, c := range []struct {
		ports, externalIPs int
		want               uint16
	}{{1, 0, 0}, {8, 0, 0}, {9, 0, 1 << 15}, {4, 1, 0}, {3, 2, 1 << 15}, {250, 0, 1 << 11}, {60_000, 0, 1 << 3}} {
		for _, policy := range []Balancing{Random, SourceHash} {
			tracker := mustTracker(t, func(o *Options) {
				o.DecorateService = func(p *ServicePort, _ *v1.Service) { p.Balancing = policy }
			})
			tracker.Services.Update(nil, webService(portsNamed(c.ports), func(s *v1.Service) {
				for i := range c.externalIPs {
					s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprint("203.0.113.", 1+i))
				}
			}))
			state, _ := applyAll(t, tracker, v1.IPv4Protocol)
			if p := mustService(t, state, portName("p0", v1.ProtocolTCP)); p.MaxSlots != c.want || (tooMany(tracker) > 0) != (policy.Hashes() && c.want > 0) {
				t.Errorf("%v, %+v: at most %d slots, and %v", policy, c, p.MaxSlots, tracker.Problems())
			}
		}
	}
}

// A Service that goes over the bound and under it again always has the endpoints that a new tracker
// gives it, and each Delta leads from one State to the next.
func TestTheBoundOfEndpointsDependsOnNoHistory(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	tracker, ports := mustTracker(t), 2
	held := map[int]*discovery.EndpointSlice{}
	had := map[ServicePortName]map[netip.AddrPort]Endpoint{}
	put := func(number int) {
		s := bigSlice(number, 2)
		s.Endpoints = s.Endpoints[random.IntN(500):]
		s.Endpoints = append(s.Endpoints, at(netip.AddrFrom4([4]byte{10, byte(number), 9, byte(random.IntN(250))}).String()))
		held[number] = s
		tracker.Endpoints.EndpointSliceUpdate(s, false)
	}
	for i := range 66 {
		held[i] = bigSlice(i, 2)
		tracker.Endpoints.EndpointSliceUpdate(held[i], false)
	}
	cut := 0
	for step := range 8 {
		switch number := random.IntN(70); {
		case step == 0: // as it is
		case step%4 == 0:
			ports = 1 + random.IntN(4)
		case step%4 == 1:
			put(number)
		case step%4 == 2 && held[number] != nil:
			tracker.Endpoints.EndpointSliceUpdate(held[number], true)
			delete(held, number)
		default:
			put(number % 3) // the lowest addresses
		}
		tracker.Services.Update(nil, webService(portsNamed(ports)))
		fresh := mustTracker(t)
		fresh.Services.Update(nil, webService(portsNamed(ports)))
		for _, s := range held {
			fresh.Endpoints.EndpointSliceUpdate(s, false)
		}
		want, _ := applyAll(t, fresh, v1.IPv4Protocol)
		state, delta := applyAll(t, tracker, v1.IPv4Protocol)
		for i := range delta.Changes {
			c := &delta.Changes[i]
			if had[c.Name] == nil {
				had[c.Name] = map[netip.AddrPort]Endpoint{}
			}
			for _, e := range c.Removed {
				delete(had[c.Name], e.Addr)
			}
			for _, e := range c.Added {
				had[c.Name][e.Addr] = e
			}
		}
		for name := range want.All() {
			all := want.Endpoints(name)
			if !slices.EqualFunc(state.Endpoints(name), all, sameAddr) || !slices.Equal(slices.SortedFunc(maps.Keys(had[name]), netip.AddrPort.Compare), addrPorts(all)) {
				t.Fatalf("step %d: %v has %d endpoints, %d by its changes, want the same %d", step, name, len(state.Endpoints(name)), len(had[name]), len(all))
			}
		}
		if tooMany(fresh) != tooMany(tracker) {
			t.Fatalf("step %d: problems %v, want %v", step, tracker.Problems(), fresh.Problems())
		}
		cut += tooMany(tracker)
	}
	if cut == 0 || cut == 8 {
		t.Errorf("in %d of 8 steps there are too many endpoints, want some", cut)
	}
}

func sameAddr(a, b Endpoint) bool { return a.Addr == b.Addr }

func addrPorts(all []Endpoint) (list []netip.AddrPort) {
	for i := range all {
		list = append(list, all[i].Addr)
	}
	return list
}
