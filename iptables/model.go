package iptables

import (
	"cmp"
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// model holds the wanted chains of one IP family. It is pure.
type model struct {
	planner

	ports map[changetracker.ServicePortName]*portPlan
	// The trees of both tables, and how many service ports need each key of hairpins and health.
	natVIPs, natNodePorts, hairpins     *tree
	filterVIPs, filterNodePorts, health *tree
	uses                                map[desired.Key]int
	// changed are the changed chains of service ports by name; nil was deleted.
	changed ruleset
}

func newModel(c *Config, family v1.IPFamily, g desired.Globals) *model {
	n := c.chains()
	bits := v4Bits
	if family == v1.IPv6Protocol {
		bits = v6Bits
	}
	return &model{
		planner: planner{
			config: *c, names: n, v6: family == v1.IPv6Protocol, globals: g,
			perEndpoint: c.Names.ChainPrefix == proxier.KubeProxyNames().ChainPrefix,
		},
		ports:           map[changetracker.ServicePortName]*portPlan{},
		natVIPs:         newTree(n.services(), n.vipTree(), bits),
		natNodePorts:    newTree(n.nodePorts(), n.nodePortTree(), 0),
		hairpins:        newTree(n.hairpin(), n.hairpinTree(), bits),
		filterVIPs:      newTree(n.services(), n.vipTree(), bits),
		filterNodePorts: newTree(n.nodePorts(), n.nodePortTree(), 0),
		health:          newTree(n.health(), n.healthTree(), 0),
		uses:            map[desired.Key]int{},
		changed:         ruleset{},
	}
}

// noPlan is the plan of a service port that does not exist.
var noPlan = &portPlan{} // read-only

// plan sets the plans of the service ports of an update.
func (m *model) plan(update *desired.Update) {
	for s := range update.Services() {
		m.set(s.Name, m.planPort(s))
	}
}

// set replaces the plan of a service port; nil removes it.
func (m *model) set(name changetracker.ServicePortName, next *portPlan) {
	before := cmp.Or(m.ports[name], noPlan)
	if m.ports[name] = next; next == nil {
		delete(m.ports, name)
		next = noPlan
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
		if _, found := search(next, key); found {
			continue
		}
		if leaf, at, ok := in(key).find(key); ok && leaf.destinations[at].owner == name {
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
		if m.countUse(m.hairpins, desired.Key{VIP: addr}, by) {
			m.hairpins.put(hairpinDestination(addr))
		}
	}
	if p.health != 0 && m.countUse(m.health, healthKey(p.health), by) {
		m.health.put(healthDestination(p.health, name))
	}
}

// countUse adds by to the uses of a key, and removes it from its tree after the last one. It
// returns true for the first one.
func (m *model) countUse(t *tree, key desired.Key, by int) (isFirst bool) {
	was := m.uses[key]
	m.uses[key] = was + by
	if was+by == 0 {
		delete(m.uses, key)
		t.put(destination{key: key})
	}
	return was == 0
}

// changedChains returns the chains of both tables that changed since the last call; nil
// was deleted.
func (m *model) changedChains() map[string]ruleset {
	nat, filter := m.changed, ruleset{}
	m.changed = ruleset{}
	m.collect(nat, (*tree).takeChanged, m.natVIPs, m.natNodePorts, m.hairpins)
	m.collect(filter, (*tree).takeChanged, m.filterVIPs, m.filterNodePorts, m.health)
	return map[string]ruleset{tableNAT: nat, tableFilter: filter}
}

// allChains returns the chains of both tables.
func (m *model) allChains() map[string]ruleset {
	if m.config.HealthChecksOnly {
		m.changedChains() // forget the changes
		filter := ruleset{}
		m.collect(filter, (*tree).takeAll, m.health)
		return map[string]ruleset{tableNAT: {}, tableFilter: filter}
	}
	m.changed = ruleset{} // it is included
	nat, filter := m.fixedNAT(), m.fixedFilter()
	for _, p := range m.ports {
		maps.Copy(nat, p.chains)
	}
	m.collect(nat, (*tree).takeAll, m.natVIPs, m.natNodePorts, m.hairpins)
	m.collect(filter, (*tree).takeAll, m.filterVIPs, m.filterNodePorts, m.health)
	return map[string]ruleset{tableNAT: nat, tableFilter: filter}
}

// collect adds the chains that take returns for each tree.
func (m *model) collect(into ruleset, take func(*tree) map[string]*node, trees ...*tree) {
	for _, t := range trees {
		for chain, n := range take(t) {
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
}

// owners returns a function that finds the service port of a chain, or of a rule in a chain that
// all share; it returns the zero name for others.
func (m *model) owners() func(chain string, r rule) changetracker.ServicePortName {
	byChain, byRule := map[string]changetracker.ServicePortName{}, map[rule]changetracker.ServicePortName{}
	for name, p := range m.ports {
		for chain := range p.chains {
			byChain[chain] = name
		}
		for _, d := range slices.Concat(p.nat, p.filter) {
			for _, r := range d.rules {
				byRule[r] = name
			}
		}
	}
	return func(chain string, r rule) changetracker.ServicePortName {
		if name, ok := byChain[chain]; ok {
			return name
		}
		return byRule[r]
	}
}
