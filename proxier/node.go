package proxier

import (
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// globalsFor returns what all Services of a family share.
func (c *Config) globalsFor(family v1.IPFamily, node changetracker.Node, serviceCIDRs []netip.Prefix) desired.Globals {
	return desired.Globals{
		ServiceCIDRs:      desired.Minimal(serviceCIDRs, family),
		NodePortAddresses: c.nodePortAddresses(family, node),

		LocalhostNodePorts: c.localhostNodePorts(family),

		NodeAddresses: ofFamily(node.Addresses, family),
		PodCIDRs:      c.Masquerade.podCIDRs(family, node),
		PodInterface:  c.Masquerade.podInterface(),
	}
}

func ofFamily(addresses []netip.Addr, family v1.IPFamily) (list []netip.Addr) {
	for _, a := range addresses {
		if a.Is4() == (family == v1.IPv4Protocol) {
			list = append(list, a)
		}
	}
	return list
}

// programs reports whether frontends of a kind are programmed.
func (c *Config) programs(kind desired.Kind) bool {
	return len(c.Kinds) == 0 || slices.Contains(c.Kinds, kind)
}

// servesLoadBalancers reports whether load balancers may send traffic to this node, to load
// balancer IPs or to node ports.
func (c *Config) servesLoadBalancers() bool {
	return c.programs(desired.LoadBalancer) || c.programs(desired.NodePort)
}

func (c *Config) nodePortAddresses(family v1.IPFamily, node changetracker.Node) []netip.Prefix {
	if !c.programs(desired.NodePort) {
		return nil
	}
	n := &c.NodePorts
	accepting := slices.Clone(n.Addresses)
	if n.Primary {
		accepting = append(accepting, primaryAddress(family, node)...)
	}
	if n.Localhost {
		accepting = append(accepting, host(desired.Localhost(family)))
	}
	if own := desired.Minimal(accepting, family); len(own) > 0 || n.Primary {
		return own
	}
	return []netip.Prefix{everything(family)}
}

// localhostNodePorts reports whether localhost accepts node ports.
func (c *Config) localhostNodePorts(family v1.IPFamily) bool {
	localhost := desired.Localhost(family)
	return c.programs(desired.NodePort) && (c.NodePorts.Localhost ||
		slices.ContainsFunc(c.NodePorts.Addresses, func(p netip.Prefix) bool { return p.Bits() > 0 && p.Contains(localhost) }))
}

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func primaryAddress(family v1.IPFamily, node changetracker.Node) []netip.Prefix {
	i := slices.IndexFunc(node.Addresses, func(a netip.Addr) bool {
		return a.Is4() == (family == v1.IPv4Protocol) && !a.IsLoopback()
	})
	if i < 0 {
		return nil
	}
	return []netip.Prefix{host(node.Addresses[i])}
}

func everything(family v1.IPFamily) netip.Prefix {
	if family == v1.IPv4Protocol {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

func (m *Masquerade) podCIDRs(family v1.IPFamily, node changetracker.Node) []netip.Prefix {
	if m.NodePodCIDRs {
		return desired.Minimal(node.PodCIDRs, family)
	}
	return desired.Minimal(m.PodCIDRs, family)
}

func (m *Masquerade) podInterface() string {
	if m.PodInterfacePrefix != "" {
		return m.PodInterfacePrefix + "*"
	}
	return m.PodInterface
}
