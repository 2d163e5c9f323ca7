package proxiertest

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// stage is a scenario in progress. The Provider has its services as API objects, in the
// order of the scenario.
type stage struct {
	*suite

	provider proxier.Provider
	services []*published
}

// published is one service of a stage. Its number makes its addresses unique, so that no
// conntrack entry of an earlier scenario matches.
type published struct {
	number   int
	nodePort int32
	vip      func(v1.IPFamily) netip.Addr
	ownIP    func(v1.IPFamily) netip.Addr
	object   *v1.Service
	slices   []*discovery.EndpointSlice
}

const (
	firstNodePort = 30000
	// maxSliceEndpoints is the EndpointSlice controller's default.
	maxSliceEndpoints = 100
)

func families() []v1.IPFamily { return []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} }

// publish replaces the stage's services, and waits until they are programmed. A service
// with the index of an earlier one updates it.
func (s *stage) publish(ctx context.Context, t *testing.T, services ...service) {
	t.Helper()
	for i, service := range services {
		if i < len(s.services) {
			s.update(s.services[i], service)
			continue
		}
		s.add(service)
	}
	for _, gone := range s.services[len(services):] {
		s.remove(gone)
	}
	s.services = s.services[:len(services)]
	s.sync(ctx, t)
}

// withdraw deletes the API objects of the stage's services, and waits for nothing.
func (s *stage) withdraw() {
	for _, p := range s.services {
		s.remove(p)
	}
	s.services = nil
}

func (s *stage) add(spec service) {
	s.serial++
	p := &published{number: s.serial}
	p.render(spec)
	s.services = append(s.services, p)
	s.announce(p)
}

// announce adds the API objects of a service.
func (s *stage) announce(p *published) {
	s.provider.OnServiceAdd(p.object)
	for _, slice := range p.slices {
		s.provider.OnEndpointSliceAdd(slice)
	}
}

func (s *stage) update(p *published, spec service) {
	before := *p
	p.render(spec)
	s.provider.OnServiceUpdate(before.object, p.object)
	for i, slice := range p.slices {
		if i < len(before.slices) {
			s.provider.OnEndpointSliceUpdate(before.slices[i], slice)
		} else {
			s.provider.OnEndpointSliceAdd(slice)
		}
	}
	for _, slice := range before.slices[min(len(p.slices), len(before.slices)):] {
		s.provider.OnEndpointSliceDelete(slice)
	}
}

func (s *stage) remove(p *published) {
	s.provider.OnServiceDelete(p.object)
	for _, slice := range p.slices {
		s.provider.OnEndpointSliceDelete(slice)
	}
}

// render sets the API objects of a service.
func (p *published) render(spec service) {
	spec.namespace = cmp.Or(spec.namespace, "conformance")
	spec.name = cmp.Or(spec.name, fmt.Sprintf("web-%d", p.number))
	spec.tcpPort, spec.udpPort = cmp.Or(spec.tcpPort, "tcp"), cmp.Or(spec.udpPort, "udp")
	p.nodePort = cmp.Or(spec.nodePort, firstNodePort+int32(p.number))
	p.vip, p.ownIP = spec.vip, spec.clusterIP
	opts := []ServiceOption{ClusterIPs(inBoth(p.clusterIP)...)}
	if spec.external {
		opts = append(opts,
			NodePort(spec.tcpPort, v1.ProtocolTCP, servicePort, p.nodePort),
			NodePort(spec.udpPort, v1.ProtocolUDP, servicePort, p.nodePort))
		opts = append(opts, ExternalIPs(inBoth(p.external)...), LoadBalancer(inBoth(p.loadBalancer)...))
	} else {
		opts = append(opts, Port(spec.tcpPort, v1.ProtocolTCP, servicePort), Port(spec.udpPort, v1.ProtocolUDP, servicePort))
	}
	p.object = Service(spec.namespace, spec.name, append(opts, spec.options...)...)
	p.slices = nil
	for _, family := range families() {
		p.renderSlices(spec, family)
	}
}

func (p *published) renderSlices(spec service, family v1.IPFamily) {
	chunk := 0
	for endpoints := range slices.Chunk(spec.endpoints, maxSliceEndpoints) {
		opts := []SliceOption{SliceName(fmt.Sprintf("%s-%s-%d", spec.name, family, chunk))}
		for _, port := range p.object.Spec.Ports {
			opts = append(opts, SlicePort(port.Name, port.Protocol, cmp.Or(spec.podPort, podPort)))
		}
		for _, e := range endpoints {
			opts = append(opts, e.render(family))
		}
		p.slices = append(p.slices, Slice(spec.namespace, spec.name, discovery.AddressType(family), opts...))
		chunk++
	}
}

func (e endpoint) render(family v1.IPFamily) SliceOption {
	host := "elsewhere"
	if slices.Contains([]place{pod0, pod1, pod2}, e.at) {
		host = nodeName
	}
	var opts []EndpointOption
	if host = cmp.Or(e.node, host); host != nameless {
		opts = append(opts, OnNode(host))
	}
	if e.condition != nil {
		opts = append(opts, e.condition)
	}
	return Endpoint(e.addr(family).String(), opts...)
}

// addr returns the endpoint's address.
func (e endpoint) addr(family v1.IPFamily) netip.Addr {
	if e.addrs != nil {
		return e.addrs(family)
	}
	if e.extra != 0 {
		return crowdAddr(family, e.extra)
	}
	return podAddr(e.at)(family)
}

// podAddr returns the addresses of a pod of Topology.
func podAddr(at place) func(family v1.IPFamily) netip.Addr {
	subnet := map[byte]byte{'p': 1, 'r': 2}[at[0]]
	n := at[len(at)-1] - '0'
	return func(family v1.IPFamily) netip.Addr {
		return familyAddr(family, fmt.Sprintf("10.244.%d.%d", subnet, 16*n+2), fmt.Sprintf("fd00:10:244:%d:%d::2", subnet, n))
	}
}

// serviceAddr returns the service's unique address in a range.
func (p *published) serviceAddr(prefix4, subnet6 string, family v1.IPFamily) netip.Addr {
	return familyAddr(family, fmt.Sprintf("%s.%d.%d", prefix4, p.number>>8, p.number&0xff), fmt.Sprintf("fd00:10:%s::%x", subnet6, p.number))
}

func (p *published) clusterIP(family v1.IPFamily) netip.Addr {
	if p.ownIP != nil {
		return p.ownIP(family)
	}
	return p.serviceAddr("10.96", "96", family)
}

func (p *published) external(family v1.IPFamily) netip.Addr {
	return p.serviceAddr("198.18", "18", family)
}

// sharedAddr is an external IP that scenarios give to several services.
func sharedAddr(family v1.IPFamily) netip.Addr {
	return familyAddr(family, "198.18.255.1", "fd00:10:18:ffff::1")
}

func (p *published) loadBalancer(family v1.IPFamily) netip.Addr {
	if p.vip != nil {
		return p.vip(family)
	}
	return p.serviceAddr("198.19", "19", family)
}

// address returns where the first service has a target.
func (s *stage) address(at target, family v1.IPFamily) netip.AddrPort {
	return s.services[0].targets(s.world, family)[at]
}

// targets returns the addresses of all targets.
func (p *published) targets(world *Topology, family v1.IPFamily) map[target]netip.AddrPort {
	own := p.clusterIP(family)
	ofNode := func(n int) netip.Addr { return world.Node.sender(n, family).addr } // in the order of NewTopology
	port := uint16(p.nodePort)
	return map[target]netip.AddrPort{
		clusterIP:          netip.AddrPortFrom(own, servicePort),
		undefinedPort:      netip.AddrPortFrom(own, servicePort+1),
		otherPortOfVIP:     netip.AddrPortFrom(p.loadBalancer(family), servicePort+1),
		nodesServiceIP:     netip.AddrPortFrom(localServiceIP(family), hostPort),
		unallocatedIP:      netip.AddrPortFrom(p.serviceAddr("10.96", "96", family).Prev(), servicePort),
		externalIP:         netip.AddrPortFrom(p.external(family), servicePort),
		sharedExternalIP:   netip.AddrPortFrom(sharedAddr(family), servicePort),
		loadBalancer:       netip.AddrPortFrom(p.loadBalancer(family), servicePort),
		cloudLoadBalancer:  netip.AddrPortFrom(cloudVIP(family), servicePort),
		nodePort:           netip.AddrPortFrom(ofNode(0), port),
		nodePortSecondary:  netip.AddrPortFrom(ofNode(1), port),
		nodePortClientLink: netip.AddrPortFrom(ofNode(2), port),
		nodePortPodLink:    netip.AddrPortFrom(ofNode(3), port),
		nodePortLocalVIP:   netip.AddrPortFrom(localVIP(family), port),
		nodePortLoopback:   netip.AddrPortFrom(loopback(family), port),
		healthOfNode:       netip.AddrPortFrom(ofNode(1), hostPort),
		healthOfLocalVIP:   netip.AddrPortFrom(localVIP(family), hostPort),
		healthOfVIP:        netip.AddrPortFrom(p.loadBalancer(family), hostPort),
		healthOfClusterIP:  netip.AddrPortFrom(own, hostPort),
		nodePortLoopback2:  netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 5}), port),
		podAddress:         netip.AddrPortFrom(podAddr(pod2)(family), servicePort),
	}
}
