package desired

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/serviceplane/serviceplane/changetracker"
)

// ResolveNodes is Resolve for many nodes at once, for a program that writes the data planes of all nodes. It
// returns what a service port means on each node, in their order, or nil if the State has no such service port.
// The Resolver's own Node does not matter, nor that of the trackers.
//
// Nodes on which it means the same share one *Service: without topology hints, all that have no endpoint of it. A program can
// write such rows once. It costs the endpoints of the service port for each different node, and little for
// each other one. With EditSelection, no nodes share.
func (r *Resolver) ResolveNodes(state *changetracker.State, name changetracker.ServicePortName, nodes []changetracker.Node) []*Service {
	known, ok := state.Service(name)
	if !ok {
		return nil
	}
	whereabouts := whereaboutsOf(state, name)
	shared := map[string]*Service{}
	all := make([]*Service, len(nodes))
	for i := range nodes {
		own := *r
		own.Node = nodes[i]
		port, class := known.On(&nodes[i]), ""
		if r.EditSelection == nil && !whereabouts.concerns(&own.Node) {
			class = own.class(port, whereabouts.zones)
		}
		if all[i] = shared[class]; all[i] != nil {
			continue
		}
		t, _ := own.resolve(state, port, selected{})
		if all[i] = t.service; class != "" {
			shared[class] = t.service
		}
	}
	return all
}

// whereabouts are where the endpoints of a service port are, or for whom.
type whereabouts struct {
	hosts map[string]bool // in short
	addrs []netip.Addr    // sorted
	zones bool            // some have hints
}

func whereaboutsOf(state *changetracker.State, name changetracker.ServicePortName) *whereabouts {
	w := &whereabouts{hosts: map[string]bool{}}
	state.EachEndpoint(name, func(e *changetracker.Endpoint) {
		if e.Node != "" { // else it may be on any node
			w.hosts[shortHost(e.Node)] = true
		}
		for _, node := range e.NodeHints {
			w.hosts[shortHost(node)] = true
		}
		w.addrs = append(w.addrs, e.Addr.Addr())
		w.zones = w.zones || len(e.ZoneHints) > 0
	})
	slices.SortFunc(w.addrs, netip.Addr.Compare)
	return w
}

// shortHost is the same for all names of a host: see sameHost.
func shortHost(name string) string {
	name, _, _ = strings.Cut(name[strings.LastIndexByte(name, '/')+1:], ".")
	return strings.ToLower(name)
}

// concerns reports whether an endpoint may be on the node, or for it.
func (w *whereabouts) concerns(n *changetracker.Node) bool {
	return n.Name == "" || w.hosts[shortHost(n.Name)] || slices.ContainsFunc(n.PodCIDRs, func(p netip.Prefix) bool {
		at, _ := slices.BinarySearchFunc(w.addrs, p.Masked().Addr(), netip.Addr.Compare)
		return at < len(w.addrs) && p.Contains(w.addrs[at])
	})
}

// class has all that matters of a node that no endpoint concerns.
func (r *Resolver) class(p *changetracker.ServicePort, zones bool) string {
	var class strings.Builder
	if zones {
		class.WriteString(r.Node.Zone)
	}
	bit := func(b bool) { class.WriteString(" " + strconv.FormatBool(b)) }
	for _, vip := range p.LoadBalancerVIPs {
		bit(r.refuses(LoadBalancer, p, vip))
	}
	for _, vip := range p.ExternalIPs {
		bit(r.refuses(ExternalIP, p, vip))
	}
	bit(p.Elsewhere() == nil)
	bit(len(p.LoadBalancerSourceRanges) > 0 && r.admits(p, p.LoadBalancerSourceRanges))
	return class.String()
}
