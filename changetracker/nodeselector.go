package changetracker

import (
	"fmt"

	"k8s.io/apimachinery/pkg/labels"
)

// NodeSelector selects nodes by their labels, in the text form of Kubernetes' label selectors, such as
// "pool in (edge, border), !spare". The empty one selects all nodes.
type NodeSelector string

// NoNode selects no node: none both has and lacks a label.
const NoNode NodeSelector = "!serviceplane.io/none,serviceplane.io/none"

// longestSelector and mostRequirements bound the time of Matches.
const longestSelector, mostRequirements = 1024, 16

// ParseNodeSelector checks a selector, and brings it into a canonical form.
func ParseNodeSelector(text string) (NodeSelector, error) {
	if len(text) > longestSelector {
		return NoNode, fmt.Errorf("the selector has %d bytes: want %d at most", len(text), longestSelector)
	}
	selector, err := labels.Parse(text)
	if err != nil {
		return NoNode, err
	}
	requirements, _ := selector.Requirements()
	canonical := selector.String()
	if n := len(requirements); n > mostRequirements || len(canonical) > longestSelector {
		return NoNode, fmt.Errorf("the selector has %d requirements in %d bytes: want %d in %d at most", n, len(canonical), mostRequirements, longestSelector)
	}
	return NodeSelector(canonical), nil
}

// Matches reports whether a node has the labels. A selector that cannot be parsed matches none.
func (s NodeSelector) Matches(node *Node) bool {
	if s == "" {
		return true
	}
	selector, err := labels.Parse(string(s))
	return err == nil && selector.Matches(labels.Set(node.Labels))
}

// On returns the service port as a node has it, of which the Labels matter: see ExposeOn. It is p itself if the
// node has it as the tracker's node does.
func (p *ServicePort) On(node *Node) *ServicePort {
	all := p
	if p.elsewhere != nil {
		all = p.elsewhere
	}
	switch {
	case all.ExposeOn.Matches(node):
		return all
	case p.elsewhere != nil:
		return p
	}
	c := *all
	c.ExternalIPs, c.LoadBalancerVIPs, c.LoadBalancerSourceRanges, c.DeniedSources, c.DenyAllSources = nil, nil, nil, nil, false
	c.NodePort, c.HealthCheckNodePort = 0, 0
	c.elsewhere = all
	return &c
}

// Elsewhere is the service port as the nodes have it that ExposeOn selects; nil on these.
func (p *ServicePort) Elsewhere() *ServicePort { return p.elsewhere }

// exposed returns the service ports as the node has them. It does not change the list.
func (f *family) exposed(ports []*ServicePort) []*ServicePort {
	if !selectNodes(ports) {
		return ports
	}
	list := make([]*ServicePort, len(ports))
	for i, p := range ports {
		list[i] = p.On(f.node)
	}
	return list
}

func selectNodes(ports []*ServicePort) bool {
	for _, p := range ports {
		if p.ExposeOn != "" {
			return true
		}
	}
	return false
}

// relabelled takes over the labels of the node.
func (f *family) relabelled() (changed bool) {
	for name, s := range f.services {
		from := "" // whose ports count
		if len(s.offers) > 0 {
			from = s.offers[0].from
		}
		for i := range s.offers {
			s.offers[i].ports = f.exposed(s.offers[i].ports)
		}
		if selectNodes(s.ports) && f.placePorts(from, name, s.ports) {
			changed = true
		}
	}
	return changed
}
