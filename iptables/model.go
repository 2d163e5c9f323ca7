package iptables

import (
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// ruleset are chains with their rules.
type ruleset map[string][]rule

func (s ruleset) count() (rules int) {
	for _, chain := range s {
		rules += len(chain)
	}
	return rules
}

// options are what a model needs to know of the configuration.
type options struct {
	localhostNodePorts, keepInvalid, portals, healthChecksOnly bool
}

// model is what one IP family's chains must be. It is pure: it knows no kernel.
type model struct {
	planner

	options options
	// keepsLocalnet says that the rule about loopback addresses is needed without node
	// ports there.
	keepsLocalnet bool
	placed        map[changetracker.ServicePortName]*placed
	// The trees of both tables, and how often each address and port is needed.
	natVIPs, natNodePorts, hairpins     *tree
	filterVIPs, filterNodePorts, health *tree
	hairpinUses                         map[netip.Addr]int
	healthUses                          map[uint16]int
	// changed are the chains of service ports that differ, by name; nil is gone.
	changed map[string][]rule
}

const v4Bits, v6Bits = 32, 128

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
		},
		options:         options{localhostNodePorts: c.LocalhostNodePorts, keepInvalid: c.KeepInvalid, portals: c.Portals, healthChecksOnly: c.HealthChecksOnly},
		placed:          map[changetracker.ServicePortName]*placed{},
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

// set puts a service port in the place of what it was; nil takes it out.
func (m *model) set(name changetracker.ServicePortName, next *placed) {
	before := m.placed[name]
	if before == nil {
		before = &placed{}
	}
	if next == nil {
		delete(m.placed, name)
		next = &placed{}
	} else {
		m.placed[name] = next
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
	m.exchange(name, before.nat, next.nat, m.natVIPs, m.natNodePorts)
	m.exchange(name, before.filter, next.filter, m.filterVIPs, m.filterNodePorts)
	m.count(name, next, 1)
	m.count(name, before, -1)
}

// exchange takes out what is not among next, unless somebody else has it by now.
func (m *model) exchange(name changetracker.ServicePortName, before, next []leaf, vips, nodePorts *tree) {
	in := func(key desired.Key) *tree {
		if key.VIP.IsValid() {
			return vips
		}
		return nodePorts
	}
	for i := range before {
		key := before[i].key
		byKey := func(l leaf, key desired.Key) int { return l.key.Compare(key) }
		if _, found := slices.BinarySearchFunc(next, key, byKey); found {
			continue
		}
		if owner, ok := in(key).owner(key); ok && owner == name {
			in(key).put(leaf{key: key})
		}
	}
	for i := range next {
		in(next[i].key).put(next[i])
	}
}

// count adds or withdraws what several service ports may need.
func (m *model) count(name changetracker.ServicePortName, p *placed, by int) {
	for _, addr := range p.hairpin {
		was := m.hairpinUses[addr]
		m.hairpinUses[addr] = was + by
		switch {
		case was == 0:
			m.hairpins.put(m.hairpinLeaf(addr))
		case was+by == 0:
			delete(m.hairpinUses, addr)
			m.hairpins.put(leaf{key: desired.Key{VIP: addr}})
		}
	}
	if p.health == 0 {
		return
	}
	was := m.healthUses[p.health]
	m.healthUses[p.health] = was + by
	switch l := m.healthLeaf(p.health, name); {
	case was == 0:
		m.health.put(l)
	case was+by == 0:
		delete(m.healthUses, p.health)
		m.health.put(leaf{key: l.key})
	}
}

// tables are what the chains of both tables must be, for those that changed since
// the last call; nil rules stand for a chain that is gone.
func (m *model) tables() map[string]ruleset {
	nat := ruleset(m.changed)
	m.changed = map[string][]rule{}
	filter := ruleset{}
	for _, t := range []*tree{m.natVIPs, m.natNodePorts, m.hairpins} {
		m.collect(t, nat, t.take())
	}
	for _, t := range []*tree{m.filterVIPs, m.filterNodePorts, m.health} {
		m.collect(t, filter, t.take())
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

// notNil tells an empty chain from none.
func notNil(rules []rule) []rule {
	if rules == nil {
		return []rule{}
	}
	return rules
}

// everything is what all chains of both tables must be.
func (m *model) everything() map[string]ruleset {
	m.tables() // what changed is part of it
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
	for _, p := range m.placed {
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
