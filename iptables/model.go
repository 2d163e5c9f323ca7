package iptables

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// model holds the wanted chains of one IP family. It is pure.
type model struct {
	planner

	ports map[changetracker.ServicePortName]*portPlan
	// The trees of both tables, and how many service ports need each address and port.
	natVIPs, natNodePorts, hairpins     *tree
	filterVIPs, filterNodePorts, health *tree
	hairpinUses                         map[netip.Addr]int
	healthUses                          map[uint16]int
	// changed are the changed chains of service ports by name; nil was deleted.
	changed map[string][]rule
}

func newModel(c *Config, family v1.IPFamily, g desired.Globals) *model {
	n := c.chains()
	bits := v4Bits
	if family == v1.IPv6Protocol {
		bits = v6Bits
	}
	return &model{
		planner: planner{
			names: n, v6: family == v1.IPv6Protocol, mark: c.Masquerade.Mark, globals: g,
			perEndpoint: c.Names.ChainPrefix == proxier.KubeProxyNames().ChainPrefix,
			options:     options{localhostNodePorts: c.LocalhostNodePorts, keepInvalid: c.KeepInvalid, portals: c.Portals, healthChecksOnly: c.HealthChecksOnly},
		},
		ports:           map[changetracker.ServicePortName]*portPlan{},
		natVIPs:         newTree(n.services(), n.vipTree(), bits),
		natNodePorts:    newTree(n.nodePorts(), n.nodePortTree(), 0),
		hairpins:        newTree(n.hairpin(), n.hairpinTree(), bits),
		filterVIPs:      newTree(n.services(), n.vipTree(), bits),
		filterNodePorts: newTree(n.nodePorts(), n.nodePortTree(), 0),
		health:          newTree(n.health(), n.healthTree(), 0),
		hairpinUses:     map[netip.Addr]int{},
		healthUses:      map[uint16]int{},
		changed:         map[string][]rule{},
	}
}

// set replaces the plan of a service port; nil removes it.
func (m *model) set(name changetracker.ServicePortName, next *portPlan) {
	before := m.ports[name]
	if before == nil {
		before = &portPlan{}
	}
	if next == nil {
		delete(m.ports, name)
		next = &portPlan{}
	} else {
		m.ports[name] = next
	}
	for chain := range before.chains {
		if next.chains[chain] == nil {
			m.changed[chain] = nil
		}
	}
	for chain, rules := range next.chains {
		if was := before.chains[chain]; was == nil || !slices.Equal(was, rules) {
			m.changed[chain] = rules
		}
	}
	m.replaceDestinations(name, before.nat, next.nat, m.natVIPs, m.natNodePorts)
	m.replaceDestinations(name, before.filter, next.filter, m.filterVIPs, m.filterNodePorts)
	m.countUses(name, next, 1)
	m.countUses(name, before, -1)
}

// replaceDestinations replaces the destinations of a service port. Those that another
// service port has taken over stay.
func (m *model) replaceDestinations(name changetracker.ServicePortName, before, next []destination, vips, nodePorts *tree) {
	in := func(key desired.Key) *tree {
		if key.VIP.IsValid() {
			return vips
		}
		return nodePorts
	}
	for i := range before {
		key := before[i].key
		byKey := func(l destination, key desired.Key) int { return l.key.Compare(key) }
		if _, found := slices.BinarySearchFunc(next, key, byKey); found {
			continue
		}
		if owner, ok := in(key).owner(key); ok && owner == name {
			in(key).put(destination{key: key})
		}
	}
	for i := range next {
		in(next[i].key).put(next[i])
	}
}

// countUses adds by to the uses of what service ports share: hairpin addresses and health
// check node ports.
func (m *model) countUses(name changetracker.ServicePortName, p *portPlan, by int) {
	for _, addr := range p.hairpin {
		was := m.hairpinUses[addr]
		m.hairpinUses[addr] = was + by
		switch {
		case was == 0:
			m.hairpins.put(m.hairpinDestination(addr))
		case was+by == 0:
			delete(m.hairpinUses, addr)
			m.hairpins.put(destination{key: desired.Key{VIP: addr}})
		}
	}
	if p.health == 0 {
		return
	}
	was := m.healthUses[p.health]
	m.healthUses[p.health] = was + by
	switch l := m.healthDestination(p.health, name); {
	case was == 0:
		m.health.put(l)
	case was+by == 0:
		delete(m.healthUses, p.health)
		m.health.put(destination{key: l.key})
	}
}

// changedChains returns the chains of both tables that changed since the last call; nil
// was deleted.
func (m *model) changedChains() map[string]ruleset {
	nat := ruleset(m.changed)
	m.changed = map[string][]rule{}
	filter := ruleset{}
	for _, t := range []*tree{m.natVIPs, m.natNodePorts, m.hairpins} {
		m.collect(t, nat, t.takeChanged())
	}
	for _, t := range []*tree{m.filterVIPs, m.filterNodePorts, m.health} {
		m.collect(t, filter, t.takeChanged())
	}
	return map[string]ruleset{tableNAT: nat, tableFilter: filter}
}

func (m *model) collect(t *tree, into ruleset, nodes map[string]*node) {
	for chain, n := range nodes {
		if n == nil {
			into[chain] = nil
			continue
		}
		rules := t.rules(n)
		if chain == m.names.services() {
			rules = append(rules, m.toNodePorts()...)
		}
		into[chain] = notNil(rules)
	}
}

// allChains returns the chains of both tables.
func (m *model) allChains() map[string]ruleset {
	m.changedChains() // forget the changes: they are included
	gather := func(t *tree) map[string]*node {
		nodes := map[string]*node{}
		t.all(func(n *node) { nodes[n.chain] = n })
		return nodes
	}
	if m.options.healthChecksOnly {
		filter := ruleset{}
		m.collect(m.health, filter, gather(m.health))
		return map[string]ruleset{tableNAT: {}, tableFilter: filter}
	}
	nat, filter := m.fixedNAT(), m.fixedFilter()
	for _, p := range m.ports {
		maps.Copy(nat, p.chains)
	}
	for _, t := range []*tree{m.natVIPs, m.natNodePorts, m.hairpins} {
		m.collect(t, nat, gather(t))
	}
	for _, t := range []*tree{m.filterVIPs, m.filterNodePorts, m.health} {
		m.collect(t, filter, gather(t))
	}
	return map[string]ruleset{tableNAT: nat, tableFilter: filter}
}

// owners are the service ports that a line of a script belongs to.
func (m *model) owners(line string) []changetracker.ServicePortName {
	command, rest, _ := strings.Cut(line, " ")
	chain, text, _ := strings.Cut(rest, " ")
	if command != "-A" {
		chain, _, _ = strings.Cut(strings.TrimPrefix(line, ":"), " ")
		text = ""
	}
	has := func(d destination) bool { return text != "" && slices.Contains(d.rules, rule(text)) }
	var names []changetracker.ServicePortName
	for name, p := range m.ports {
		if _, ok := p.chains[chain]; ok || slices.ContainsFunc(p.nat, has) || slices.ContainsFunc(p.filter, has) {
			names = append(names, name)
		}
	}
	return names
}
