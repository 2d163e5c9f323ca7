package refusals

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/oracle"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

const (
	nodeName      = "node"
	servicePort   = 80
	firstNodePort = 30000
	firstHealth   = 31000
)

func families() []v1.IPFamily { return []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} }

func index(f v1.IPFamily) int { return slices.Index(families(), f) }

// setting is a configuration of the proxy.
type setting struct {
	name      string
	nodePorts []string // ranges of addresses
	closed    bool     // refuses what can be refused
}

func settings() []setting {
	return []setting{
		{name: "open", nodePorts: []string{"0.0.0.0/0", "::/0"}},
		{name: "closed", nodePorts: []string{"192.0.2.0/28", "2001:db8:2::10/124"}, closed: true},
	}
}

// newCluster returns a cluster without Services.
func newCluster(t *testing.T, world *proxiertest.Topology, s setting) *oracle.Cluster {
	t.Helper()
	return &oracle.Cluster{
		Services: map[string]*v1.Service{}, Slices: map[string]*discovery.EndpointSlice{},
		Node: changetracker.Node{
			Name: nodeName, Addresses: addresses(t, world.Node),
			PodCIDRs: prefixes("10.244.1.0/24", "fd00:10:244:1::/64"),
		},
		DetectsPods: true, StrictSourceRanges: s.closed, DenyNodeExternalIPs: s.closed,
		Kinds:             []string{"ClusterIP", "LoadBalancer", "ExternalIP", "NodePort"},
		NodePortAddresses: prefixes(s.nodePorts...),
		ServiceCIDRs:      prefixes("10.96.0.0/16", "fd00:10:96::/112"),
	}
}

// config is that of a proxy for a cluster.
func config(world *proxiertest.Topology, c *oracle.Cluster) proxier.Config {
	return proxier.Config{
		Node: c.Node, NetNS: world.Node.NetNS(), DenyNodeExternalIPs: c.DenyNodeExternalIPs,
		Tracker:    c.Tracker(),
		Masquerade: proxier.Masquerade{All: c.MasqueradeAll, NodePodCIDRs: c.DetectsPods},
		NodePorts:  proxier.NodePorts{Addresses: c.NodePortAddresses},
	}
}

func prefixes(texts ...string) (all []netip.Prefix) {
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

// addresses are all of a host but loopback and link-local ones, the main ones first.
func addresses(t *testing.T, host *proxiertest.Host) []netip.Addr {
	t.Helper()
	all := slices.Clone(host.Addrs)
	err := host.Do(func() error {
		list, err := net.InterfaceAddrs()
		for _, a := range list {
			p, parseErr := netip.ParsePrefix(a.String())
			if parseErr != nil {
				return parseErr
			}
			if ip := p.Addr(); !ip.IsLoopback() && !ip.IsLinkLocalUnicast() && !slices.Contains(all, ip) {
				all = append(all, ip)
			}
		}
		return err
	})
	if err != nil {
		t.Fatalf("list the addresses of %s: %v", host.Name, err)
	}
	return all
}

// pods are where endpoints may be: one on the node, one elsewhere.
func pods(world *proxiertest.Topology) map[string]*proxiertest.Host {
	return map[string]*proxiertest.Host{nodeName: world.LocalPods[1], "elsewhere": world.RemotePods[0]}
}

// spec is what distinguishes Services.
type spec struct {
	endpoints     []string // their nodes
	notServing    bool
	internal      bool // internalTrafficPolicy Local
	external      bool // externalTrafficPolicy Local
	ranges        []string
	options       []proxiertest.ServiceOption
	clusterIPOnly bool
	families      []v1.IPFamily
}

// clientsOnly are source ranges with the client's first address.
func clientsOnly() []string { return []string{"198.51.100.2/32", "2001:db8:c::2/128"} }

// specs are all combinations of policies, source ranges and endpoints, and some others.
func specs() (all []spec) {
	both := []string{nodeName, "elsewhere"}
	for _, endpoints := range [][]string{nil, {"elsewhere"}, {nodeName}, both} {
		for _, internal := range []bool{false, true} {
			for _, external := range []bool{false, true} {
				for _, ranges := range [][]string{nil, clientsOnly()} {
					all = append(all, spec{endpoints: endpoints, internal: internal, external: external, ranges: ranges})
				}
			}
		}
		all = append(all, spec{endpoints: endpoints, clusterIPOnly: true}, spec{endpoints: endpoints, clusterIPOnly: true, internal: true})
	}
	proxy := v1.LoadBalancerIPModeProxy
	return append(all,
		spec{endpoints: both, notServing: true, ranges: clientsOnly()},
		spec{endpoints: both, ranges: []string{"everybody", "10.0.0.0/99"}},
		spec{endpoints: both, ranges: clientsOnly()[:1]},
		spec{endpoints: both, ranges: clientsOnly()[1:]},
		spec{endpoints: both, families: families()[:1]},
		spec{endpoints: both, families: families()[1:]},
		spec{endpoints: both, options: []proxiertest.ServiceOption{proxiertest.Headless()}},
		spec{endpoints: both, options: []proxiertest.ServiceOption{proxiertest.ExternalName("example.org")}},
		spec{endpoints: both, options: []proxiertest.ServiceOption{func(s *v1.Service) {
			s.Labels = map[string]string{changetracker.LabelServiceProxyName: "another"}
		}}},
		spec{endpoints: both, options: []proxiertest.ServiceOption{func(s *v1.Service) {
			for i := range s.Status.LoadBalancer.Ingress {
				s.Status.LoadBalancer.Ingress[i].IPMode = &proxy
			}
		}}},
		// Addresses of the node, of a pod, loopback and link-local ones.
		spec{endpoints: both, options: []proxiertest.ServiceOption{proxiertest.ExternalIPs(
			"192.0.2.20", "198.51.100.1", "10.244.1.34", "127.0.0.1", "127.0.0.5", "169.254.1.1",
			"2001:db8:2::20", "2001:db8:c::1", "fd00:10:244:1:2::2", "::1", "fe80::1")}},
	)
}

func name(n int) string { return fmt.Sprintf("service-%d", n) }

// vips are the ClusterIP, external IP and load balancer IP of a Service.
func vips(n int, family v1.IPFamily) (all []string) {
	for i, second := range []int{96, 18, 19} {
		if first := []int{10, 198, 198}[i]; family == v1.IPv4Protocol {
			all = append(all, fmt.Sprintf("%d.%d.1.%d", first, second, n))
		} else {
			all = append(all, fmt.Sprintf("fd00:10:%d::%x", second, 0x100+n))
		}
	}
	return all
}

// add puts a Service and its slices into a cluster.
func add(c *oracle.Cluster, world *proxiertest.Topology, n int, s spec) {
	in := s.families
	if in == nil {
		in = families()
	}
	var options []proxiertest.ServiceOption
	var clusterIPs []string
	for _, family := range families() {
		v := vips(n, family)
		if slices.Contains(in, family) {
			clusterIPs = append(clusterIPs, v[0])
		}
		if !s.clusterIPOnly { // also in a family that the Service does not have
			options = append(options, proxiertest.ExternalIPs(v[1]), proxiertest.LoadBalancer(v[2]))
		}
	}
	options = append(options, proxiertest.ClusterIPs(clusterIPs...), proxiertest.Created(time.Unix(int64(n), 0)))
	for _, protocol := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
		if s.clusterIPOnly {
			options = append(options, proxiertest.Port(string(protocol), protocol, servicePort))
		} else {
			options = append(options, proxiertest.NodePort(string(protocol), protocol, servicePort, int32(firstNodePort+n)))
		}
	}
	if s.internal {
		options = append(options, proxiertest.InternalPolicyLocal())
	}
	if s.external {
		options = append(options, proxiertest.ExternalPolicyLocal(), func(s *v1.Service) { s.Spec.HealthCheckNodePort = int32(firstHealth + n) })
	}
	options = append(options, proxiertest.SourceRanges(s.ranges...))
	c.Services[name(n)] = proxiertest.Service("refusals", name(n), append(options, s.options...)...)
	c.Services[name(n)].UID = types.UID(name(n))
	for _, family := range in {
		slice := proxiertest.Slice("refusals", name(n), discovery.AddressType(family), proxiertest.SliceName(name(n)+"-"+string(family)))
		for _, protocol := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
			proxiertest.SlicePort(string(protocol), protocol, 8080)(slice)
		}
		for _, node := range s.endpoints {
			options := []proxiertest.EndpointOption{proxiertest.OnNode(node)}
			if s.notServing {
				options = append(options, proxiertest.NotServing())
			}
			proxiertest.Endpoint(pods(world)[node].Addr(family).String(), options...)(slice)
		}
		c.Slices[slice.Name] = slice
	}
}
