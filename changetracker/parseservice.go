package changetracker

import (
	"fmt"
	"math"
	"math/bits"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// defaultAffinity is the default of the API server (v1.DefaultClientIPServiceAffinitySeconds).
const defaultAffinity = time.Duration(v1.DefaultClientIPServiceAffinitySeconds) * time.Second

// parsedService holds the fields of a Service that all of its service ports share.
type parsedService struct {
	clusterIPs perFamily[netip.Addr]
	externals  perFamily[[]netip.Addr]
	vips       perFamily[[]netip.Addr]
	ranges     perFamily[[]netip.Prefix]
	// deny says that there are source ranges, but none of this family.
	deny       perFamily[bool]
	healthPort uint16
	affinity   time.Duration
	// internalLocal and externalLocal are the traffic policies.
	internalLocal, externalLocal bool
	created                      time.Time
	uid                          types.UID
}

// parseService returns the service ports of a Service by family, sorted by name. It adds
// problems to f.
func (c *config) parseService(service *v1.Service, f *findings) (ports perFamily[[]*ServicePort]) {
	if !proxied(service) || !c.selects(service) {
		return ports
	}
	p := parsedService{created: service.CreationTimestamp.UTC(), uid: service.UID}
	if !c.parseClusterIPs(&p, service, f) {
		return ports
	}
	if len(service.Spec.Ports) == 0 {
		f.add(ReasonNoPorts, "", "spec.ports")
		return ports
	}
	p.parseVIPs(service, &c.options, f)
	p.parseSourceRanges(service, f)
	p.boundSources(len(service.Spec.Ports), f)
	p.checkSourceRanges(c.options.StrictSourceRanges, f)
	p.parsePolicies(service, f)
	numbered := parseServicePorts(service, f)
	for family, clusterIP := range p.clusterIPs {
		if !clusterIP.IsValid() {
			continue
		}
		for _, port := range numbered {
			ports[family] = append(ports[family], p.servicePort(port, family, c.options.StrictSourceRanges))
		}
		c.decorateAll(ports[family], service, f)
	}
	return ports
}

// decorateAll decorates the service ports of an IP family.
func (c *config) decorateAll(ports []*ServicePort, service *v1.Service, f *findings) {
	hashes, closed, slots := false, false, maxSlots(frontends(ports))
	for i, port := range ports {
		port.MaxSlots = slots
		ports[i] = c.decorateService(port, service)
		hashes = hashes || ports[i].Balancing.Hashes()
		closed = closed || ports[i].DenyAllSources && !port.DenyAllSources && len(ports[i].LoadBalancerVIPs) > 0
	}
	if closed {
		f.add(ReasonNoSourceRange, fmt.Sprintf("%s: closed to everybody, because all sources are denied, or too many", ports[0].Family), "hook DecorateService")
	}
	if hashes && slots > 0 {
		f.add(ReasonTooMany, fmt.Sprintf("%s: %d frontends, each with at most %d slots of a hash", ports[0].Family, frontends(ports), slots), "spec.ports")
	}
}

// frontends counts the frontends of a Service in an IP family.
func frontends(ports []*ServicePort) (n int) {
	for _, p := range ports {
		n += 1 + len(p.ExternalIPs) + len(p.LoadBalancerVIPs) + int(min(p.NodePort, 1))
	}
	return n
}

// maxSlots is ServicePort.MaxSlots for a number of frontends.
func maxSlots(frontends int) uint16 {
	slots := maxPairs / max(frontends, 1)
	if slots > math.MaxUint16 {
		return 0
	}
	return 1 << (bits.Len(uint(max(slots, 1))) - 1)
}

// proxied reports whether a proxy handles the Service at all (TRK-01, TRK-02). Only the singular
// cluster IP decides.
func proxied(service *v1.Service) bool {
	ip := service.Spec.ClusterIP
	return ip != "" && ip != v1.ClusterIPNone && service.Spec.Type != v1.ServiceTypeExternalName
}

// parseClusterIPs parses the cluster IP of each tracked family (TRK-10).
func (c *config) parseClusterIPs(p *parsedService, service *v1.Service, f *findings) (any bool) {
	spec := &service.Spec
	if len(spec.IPFamilies) == 0 {
		addr, ok := ParseAddr(spec.ClusterIP)
		if !ok || !servable(addr) {
			f.add(ReasonInvalidAddress, spec.ClusterIP, "spec.clusterIP")
			return false
		}
		if !c.tracked[addrFamily(addr)] {
			return false
		}
		p.clusterIPs[addrFamily(addr)] = addr
		return true
	}
	for family, tracked := range c.tracked {
		if !tracked {
			continue
		}
		i := slices.Index(spec.IPFamilies, familyName(family))
		if i < 0 {
			continue
		}
		if addr, ok := parseListedClusterIP(spec, i, f); ok {
			p.clusterIPs[family] = addr
			any = true
		}
	}
	return any
}

// parseListedClusterIP parses the cluster IP of ipFamilies[i].
func parseListedClusterIP(spec *v1.ServiceSpec, i int, f *findings) (addr netip.Addr, ok bool) {
	const field = "spec.clusterIPs[%d]"
	if i >= len(spec.ClusterIPs) {
		f.add(ReasonMissing, "", field, i)
		return addr, false
	}
	addr, ok = ParseAddr(spec.ClusterIPs[i])
	switch {
	case !ok || !servable(addr):
		f.add(ReasonInvalidAddress, spec.ClusterIPs[i], field, i)
		return addr, false
	case familyOf(addr) != spec.IPFamilies[i]:
		f.add(ReasonWrongFamily, spec.ClusterIPs[i], field, i)
		return addr, false
	}
	return addr, true
}

// parseVIPs parses external IPs and load balancer IPs (TRK-11, TRK-14, TRK-18). Blank values are not
// reported.
func (p *parsedService) parseVIPs(service *v1.Service, options *Options, f *findings) {
	for i, text := range service.Spec.ExternalIPs {
		if strings.TrimSpace(text) == "" {
			continue
		}
		switch addr, ok := ParseAddr(text); {
		case !ok || !dialable(addr):
			f.add(ReasonInvalidAddress, text, fieldExternalIPs+"[%d]", i)
		case !servable(addr) || within(options.DeniedVIPs, addr) || !options.acceptsExternalIP(addr):
			f.add(ReasonRefused, text, fieldExternalIPs+"[%d]", i)
		default:
			p.externals[addrFamily(addr)] = append(p.externals[addrFamily(addr)], addr)
		}
	}
	p.parseLoadBalancerIPs(service, options.DeniedVIPs, f)
	limit := maxFrontends / max(len(service.Spec.Ports), 1)
	for family := range p.externals {
		p.externals[family] = bounded(canonicalAddrs(p.externals[family]), limit, fieldExternalIPs, f)
		p.vips[family] = bounded(canonicalAddrs(p.vips[family]), limit, fieldIngress, f)
	}
}

func (p *parsedService) parseLoadBalancerIPs(service *v1.Service, denied []netip.Prefix, f *findings) {
	for i := range service.Status.LoadBalancer.Ingress {
		ingress := &service.Status.LoadBalancer.Ingress[i]
		if ingress.IP == "" || ingress.IPMode != nil && *ingress.IPMode != v1.LoadBalancerIPModeVIP {
			continue
		}
		switch addr, ok := ParseAddr(ingress.IP); {
		case !ok || !dialable(addr):
			f.add(ReasonInvalidAddress, ingress.IP, fieldIngress+"[%d].ip", i)
		case !servable(addr) || within(denied, addr):
			f.add(ReasonRefused, ingress.IP, fieldIngress+"[%d].ip", i)
		default:
			p.vips[addrFamily(addr)] = append(p.vips[addrFamily(addr)], addr)
		}
	}
}

// Fields of lists that are bounded.
const (
	fieldExternalIPs  = "spec.externalIPs"
	fieldIngress      = "status.loadBalancer.ingress"
	fieldSourceRanges = "spec.loadBalancerSourceRanges"
)

// maxFrontends is how many frontends of a Service its external IPs may make in an IP family, and
// its load balancer IPs. The API server allows tens of thousands of ports and of addresses, which
// is more frontends than any node has memory for.
const maxFrontends = 1 << 16

// maxPairs is how many pairs of a frontend and an endpoint a Service may have in an IP family, and
// maxSources how many of a load balancer frontend and a source that it admits. Engines write each
// pair, and slots for weights and hashes: see ServicePort.MaxSlots. The kernel takes 5 s to add and
// delete 14,000 sources in a set of nftables, and more than 5 minutes for 220,000.
const maxPairs, maxSources = 1 << 19, 1 << 15

// bounded returns the first values, as many as a limit allows.
func bounded[T any](list []T, limit int, field string, f *findings) []T {
	if len(list) <= limit {
		return list
	}
	f.add(ReasonTooMany, fmt.Sprintf("%d values, of which the first %d are used", len(list), limit), "%s", field)
	return list[:limit]
}

// boundSources bounds the pairs of a load balancer frontend and a source that it admits: source ranges,
// and all load balancer IPs if the ranges admit the node.
func (p *parsedService) boundSources(ports int, f *findings) {
	for family, ranges := range p.ranges {
		if len(ranges) == 0 {
			continue
		}
		perPort := maxSources / max(ports, 1)
		p.vips[family] = bounded(p.vips[family], max(1, int(math.Sqrt(float64(perPort/2)))), fieldIngress, f)
		vips := len(p.vips[family])
		p.ranges[family] = bounded(ranges, max(1, perPort/max(vips, 1)-vips), fieldSourceRanges, f)
	}
}

// parseSourceRanges parses the sources that may use the load balancer IPs (TRK-12).
func (p *parsedService) parseSourceRanges(service *v1.Service, f *findings) {
	restricted := false
	var open perFamily[bool] // by a /0, which canonicalPrefixes removes
	for i, text := range service.Spec.LoadBalancerSourceRanges {
		if strings.TrimSpace(text) == "" {
			continue
		}
		restricted = true
		prefix, ok := ParseRange(text)
		if !ok {
			f.add(ReasonInvalidCIDR, text, fieldSourceRanges+"[%d]", i)
			continue
		}
		family := addrFamily(prefix.Addr())
		open[family] = open[family] || prefix.Bits() == 0
		p.ranges[family] = append(p.ranges[family], prefix)
	}
	for family := range p.ranges {
		p.ranges[family] = canonicalPrefixes(p.ranges[family])
		p.deny[family] = restricted && !open[family] && p.ranges[family] == nil
	}
}

// checkSourceRanges reports the families whose load balancer IPs are restricted, but to no
// valid range.
func (p *parsedService) checkSourceRanges(strict bool, f *findings) {
	effect := "open to everybody"
	if strict {
		effect = "closed to everybody"
	}
	for family, deny := range p.deny {
		if deny && p.clusterIPs[family].IsValid() && len(p.vips[family]) > 0 {
			f.add(ReasonNoSourceRange, fmt.Sprintf("%s: %s", familyName(family), effect), fieldSourceRanges)
		}
	}
}

// parsePolicies parses traffic policies, session affinity and the health check node port
// (TRK-23 to TRK-26).
func (p *parsedService) parsePolicies(service *v1.Service, f *findings) {
	spec := &service.Spec
	p.internalLocal = spec.InternalTrafficPolicy != nil &&
		*spec.InternalTrafficPolicy == v1.ServiceInternalTrafficPolicyLocal
	p.externalLocal = spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal && acceptsExternal(spec)
	if spec.SessionAffinity == v1.ServiceAffinityClientIP {
		p.affinity = affinityTimeout(spec.SessionAffinityConfig)
	}
	if spec.Type != v1.ServiceTypeLoadBalancer || !p.externalLocal {
		return
	}
	const field = "spec.healthCheckNodePort"
	port, ok := portNumber(spec.HealthCheckNodePort)
	switch {
	case !ok:
		f.add(ReasonInvalidPort, strconv.Itoa(int(spec.HealthCheckNodePort)), field)
	case port == 0:
		f.add(ReasonMissing, "", field)
	}
	p.healthPort = port
}

// acceptsExternal says that externalTrafficPolicy has a meaning for the Service.
// An empty type is the API's default, ClusterIP.
func acceptsExternal(spec *v1.ServiceSpec) bool {
	switch spec.Type {
	case v1.ServiceTypeLoadBalancer, v1.ServiceTypeNodePort:
		return true
	case v1.ServiceTypeClusterIP, "":
		return len(spec.ExternalIPs) > 0
	case v1.ServiceTypeExternalName:
		return false
	default:
		return false
	}
}

func affinityTimeout(config *v1.SessionAffinityConfig) time.Duration {
	if config == nil || config.ClientIP == nil || config.ClientIP.TimeoutSeconds == nil ||
		*config.ClientIP.TimeoutSeconds <= 0 {
		return defaultAffinity
	}
	return time.Duration(*config.ClientIP.TimeoutSeconds) * time.Second
}

// numberedPort is one item of spec.ports.
type numberedPort struct {
	name           ServicePortName
	port, nodePort uint16
	index          int
}

// parseServicePorts parses spec.ports and sorts them by name. Each invalid item is set aside
// alone. Of several items with the same name the first one counts.
func parseServicePorts(service *v1.Service, f *findings) []numberedPort {
	ports := make([]numberedPort, 0, len(service.Spec.Ports))
	for i := range service.Spec.Ports {
		if port, ok := parseServicePort(service, i, f); ok {
			ports = append(ports, port)
		}
	}
	slices.SortStableFunc(ports, func(a, b numberedPort) int { return a.name.Compare(b.name) })
	return slices.CompactFunc(ports, func(first, again numberedPort) bool {
		if first.name != again.name {
			return false
		}
		f.add(ReasonDuplicate, again.name.Port+"/"+string(again.name.Protocol), "spec.ports[%d].name", again.index)
		return true
	})
}

func parseServicePort(service *v1.Service, i int, f *findings) (p numberedPort, ok bool) {
	api := &service.Spec.Ports[i]
	protocol := api.Protocol
	if protocol == "" {
		protocol = v1.ProtocolTCP
	}
	if !validProtocol(protocol) {
		f.add(ReasonInvalidProtocol, string(protocol), "spec.ports[%d].protocol", i)
		return p, false
	}
	port, ok := portNumber(api.Port)
	if !ok || port == 0 {
		f.add(ReasonInvalidPort, strconv.Itoa(int(api.Port)), "spec.ports[%d].port", i)
		return p, false
	}
	nodePort, ok := portNumber(api.NodePort)
	if !ok {
		f.add(ReasonInvalidPort, strconv.Itoa(int(api.NodePort)), "spec.ports[%d].nodePort", i)
	}
	name := types.NamespacedName{Namespace: service.Namespace, Name: service.Name}
	return numberedPort{
		name: ServicePortName{NamespacedName: name, Port: api.Name, Protocol: protocol},
		port: port, nodePort: nodePort, index: i,
	}, true
}

func (p *parsedService) servicePort(port numberedPort, family int, strict bool) *ServicePort {
	return &ServicePort{
		Name:                     port.name,
		Family:                   familyName(family),
		ClusterIP:                p.clusterIPs[family],
		Port:                     port.port,
		NodePort:                 port.nodePort,
		HealthCheckNodePort:      p.healthPort,
		ExternalIPs:              p.externals[family],
		LoadBalancerVIPs:         p.vips[family],
		LoadBalancerSourceRanges: p.ranges[family],
		DenyAllSources:           strict && p.deny[family],
		SessionAffinity:          p.affinity,
		InternalPolicyLocal:      p.internalLocal,
		ExternalPolicyLocal:      p.externalLocal,
		CreationTimestamp:        p.created,
		UID:                      p.uid,
	}
}
