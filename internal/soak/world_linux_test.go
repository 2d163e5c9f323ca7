package soak

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// namespace is that of all Services.
const namespace = "soak"

// used is how many of the Services have clients. They always have an endpoint that answers.
const used = 10

// world is the content of an API server, whose changes go to a Provider.
type world struct {
	events  proxier.EventHandler
	dice    *rand.Rand
	pods    []netip.Addr // which answer on port 8080
	objects []objects
}

// objects are those of one Service; nil ones are deleted.
type objects struct {
	service *v1.Service
	slices  [2]*discovery.EndpointSlice // IPv4 and IPv6
}

// newWorld returns a world of n Services, and announces its objects. They depend on n only.
func newWorld(events proxier.EventHandler, seed uint64, pods []netip.Addr, n int) *world {
	w := &world{events: events, dice: rand.New(rand.NewPCG(seed, 0)), pods: pods, objects: make([]objects, n)}
	w.restore()
	events.OnServiceSynced()
	events.OnEndpointSlicesSynced()
	return w
}

// restore makes all objects what they were in the beginning.
func (w *world) restore() {
	for i := range w.objects {
		w.setService(i, service(i))
		for family := range w.objects[i].slices {
			w.setSlice(i, family, w.firstSlice(i, family))
		}
	}
}

func name(i int) string { return fmt.Sprintf("service-%d", i) }

// clusterIP is the ClusterIP of a Service in a family: 0 is IPv4, 1 is IPv6.
func clusterIP(i, family int) netip.Addr {
	if family == 0 {
		return netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
	}
	return netip.MustParseAddr(fmt.Sprintf("fd00:10:96::%x", i))
}

// service is the first version of a Service.
func service(i int, options ...proxiertest.ServiceOption) *v1.Service {
	options = append([]proxiertest.ServiceOption{
		proxiertest.ClusterIPs(clusterIP(i, 0).String(), clusterIP(i, 1).String()),
		proxiertest.NodePort("tcp", v1.ProtocolTCP, 80, int32(20000+i)),
		proxiertest.Port("udp", v1.ProtocolUDP, 80),
	}, options...)
	return proxiertest.Service(namespace, name(i), options...)
}

// otherService is a random version.
func (w *world) otherService(i int) *v1.Service {
	possible := []proxiertest.ServiceOption{
		proxiertest.ClientAffinity(time.Duration(1+w.dice.IntN(3)) * time.Hour),
		proxiertest.InternalPolicyLocal(),
		proxiertest.ExternalPolicyLocal(),
		proxiertest.Port("more", v1.ProtocolTCP, int32(1000+w.dice.IntN(1000))),
		proxiertest.ExternalIPs(netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}).String()),
		proxiertest.LoadBalancer(netip.AddrFrom4([4]byte{203, 1, byte(i >> 8), byte(i)}).String()),
		proxiertest.SourceRanges(fmt.Sprintf("198.51.%d.0/24", w.dice.IntN(200))),
	}
	var options []proxiertest.ServiceOption
	for _, option := range possible {
		if w.dice.IntN(3) == 0 {
			options = append(options, option)
		}
	}
	return service(i, options...)
}

func (w *world) slice(i, family int, endpoints ...proxiertest.SliceOption) *discovery.EndpointSlice {
	addressType := []discovery.AddressType{discovery.AddressTypeIPv4, discovery.AddressTypeIPv6}[family]
	s := proxiertest.Slice(namespace, name(i), addressType, endpoints...)
	proxiertest.SlicePort("tcp", v1.ProtocolTCP, 8080)(s)
	proxiertest.SlicePort("udp", v1.ProtocolUDP, 8080)(s)
	proxiertest.SlicePort("more", v1.ProtocolTCP, 9090)(s)
	return s
}

// firstSlice has three endpoints: those of used Services answer.
func (w *world) firstSlice(i, family int) *discovery.EndpointSlice {
	var endpoints []proxiertest.SliceOption
	for n := range 3 {
		endpoints = append(endpoints, proxiertest.Endpoint(w.address(i, family, n)))
	}
	return w.slice(i, family, endpoints...)
}

// address is one of the endpoints that a Service may have.
func (w *world) address(i, family, n int) string {
	if i < used {
		var ofFamily []netip.Addr
		for _, pod := range w.pods {
			if pod.Is4() == (family == 0) {
				ofFamily = append(ofFamily, pod)
			}
		}
		return ofFamily[n%len(ofFamily)].String()
	}
	if family == 0 {
		return netip.AddrFrom4([4]byte{10, byte(100 + n), byte(i >> 8), byte(i)}).String()
	}
	return fmt.Sprintf("fd00:10:%x::%x", 100+n, i)
}

// otherSlice is a random version. A used Service keeps an endpoint that is ready.
func (w *world) otherSlice(i, family int) *discovery.EndpointSlice {
	var endpoints []proxiertest.SliceOption
	stays := w.dice.IntN(3)
	for n := range 6 {
		ready := i < used && n == stays
		if !ready && (w.dice.IntN(2) == 0 || i < used && n >= 3) {
			continue
		}
		var options []proxiertest.EndpointOption
		if !ready && w.dice.IntN(4) == 0 {
			options = append(options, []proxiertest.EndpointOption{proxiertest.Terminating(), proxiertest.NotServing(), proxiertest.OnNode("node")}[w.dice.IntN(3)])
		}
		endpoints = append(endpoints, proxiertest.Endpoint(w.address(i, family, n), options...))
	}
	return w.slice(i, family, endpoints...)
}

// event changes one object of a random Service: mostly its endpoints. Used Services are not
// deleted, and keep their first version.
func (w *world) event() {
	i, family := w.dice.IntN(len(w.objects)), w.dice.IntN(2)
	o := &w.objects[i]
	switch kind := w.dice.IntN(20); {
	case i < used || kind < 12:
		w.setSlice(i, family, w.otherSlice(i, family))
	case kind < 17 || o.service == nil:
		w.setService(i, w.otherService(i))
	case kind < 18:
		w.setSlice(i, family, nil)
	default:
		w.setService(i, nil)
	}
}

func (w *world) setService(i int, s *v1.Service) {
	before := w.objects[i].service
	w.objects[i].service = s
	switch {
	case s != nil:
		w.events.OnServiceUpdate(before, s)
	case before != nil:
		w.events.OnServiceDelete(before)
	}
}

func (w *world) setSlice(i, family int, s *discovery.EndpointSlice) {
	before := w.objects[i].slices[family]
	w.objects[i].slices[family] = s
	switch {
	case s != nil:
		w.events.OnEndpointSliceUpdate(before, s)
	case before != nil:
		w.events.OnEndpointSliceDelete(before)
	}
}
