package iptables

import (
	"crypto/sha256"
	"fmt"
	"net/netip"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/enum"
)

// planner turns service ports into chains and destinations. It is pure.
type planner struct {
	names chainNames
	v6    bool
	// perEndpoint gives every endpoint a chain.
	perEndpoint bool
	mark        uint32
	globals     desired.Globals
}

// placed is what one service port needs.
type placed struct {
	// chains are its own, in the nat table.
	chains map[string][]rule
	// nat and filter are what is done for its destinations.
	nat, filter []leaf
	// hairpin are the addresses that its connections may come back to, and health is
	// its health check node port.
	hairpin []netip.Addr
	health  uint16
}

// place plans a service port.
func (p *planner) place(s *desired.Service) *placed {
	one := &placing{
		planner: p, s: s, id: identity(s.Name),
		placed: &placed{chains: map[string][]rule{}, hairpin: s.OnNode, health: s.Port.HealthCheckNodePort},
	}
	for i := range s.Frontends {
		one.frontend(&s.Frontends[i])
	}
	one.endpoints()
	return one.placed
}

// placing is a service port under way.
type placing struct {
	*planner
	*placed

	s  *desired.Service
	id string
	// masquerades are the rules of ClusterIPs for the source, by the scope they lead to.
	masquerades [2][]rule
	uses        [2]bool
	hasExternal bool
}

func scopeIndex(s desired.Scope) int { return int(s - desired.ScopeCluster) }

// scopeChain is the chain that draws an endpoint of a scope.
func (p *placing) scopeChain(s desired.Scope) string {
	p.uses[scopeIndex(s)] = true
	if s == desired.ScopeLocal {
		return p.names.local(p.id)
	}
	return p.names.cluster(p.id)
}

// frontend plans what is done for one destination.
func (p *placing) frontend(f *desired.Frontend) {
	l := leaf{key: p.s.Key(f), owner: p.s.Name}
	if f.Action == desired.Forward || f.ShortCircuit {
		l.rules = []rule{p.match(f).jump(p.entry(f))}
	}
	if isExternal := f.Kind == desired.LoadBalancer || f.Kind == desired.ExternalIP; isExternal && (f.Restricted || f.Action != desired.Forward) {
		// The address may be one of the node's: what is refused must not get to the node
		// port of another Service instead.
		l.rules = append(l.rules, p.match(f).target("-j ACCEPT"))
	}
	if len(l.rules) > 0 {
		p.nat = append(p.nat, l)
	}
	if l.rules = p.refusals(f); len(l.rules) > 0 {
		p.filter = append(p.filter, l)
	}
}

// match matches the destination, with a comment that says whose it is.
func (p *placing) match(f *desired.Frontend) *ruleText { return p.matchFrom(f, newRule()) }

func (p *placing) matchFrom(f *desired.Frontend, r *ruleText) *ruleText {
	if f.VIP.IsValid() {
		r.toAddr(f.VIP)
	}
	return r.protocol(p.s.Protocol).comment("%s %s", p.s.Name, kindText(f.Kind)).port(p.s.Protocol, f.Port)
}

func kindText(k desired.Kind) string {
	return enum.Name(k, "", "cluster IP", "loadbalancer IP", "external IP", "node port")
}

// entry is the chain that a destination leads to.
func (p *placing) entry(f *desired.Frontend) string {
	switch {
	case f.Kind == desired.ClusterIP:
		chain := p.scopeChain(f.Scope)
		if to := p.marker(f.Masquerade); to != "" {
			i := scopeIndex(f.Scope)
			p.masquerades[i] = append(p.masquerades[i], p.match(f).jump(to))
		}
		return chain
	case f.Restricted:
		return p.sources(f)
	default:
		return p.external(f)
	}
}

// marker is the chain that marks what is to be masqueraded; empty for nothing.
func (p *planner) marker(m desired.Masquerade) string {
	switch m {
	case desired.MasqueradeAll:
		return p.names.mark()
	case desired.MasqueradeNonPod:
		return p.names.markNonPod()
	case desired.MasqueradeNone:
	}
	return ""
}

// sources plans the chain that lets source ranges pass. What does not pass keeps
// its destination, and is dropped in the filter table.
func (p *placing) sources(f *desired.Frontend) string {
	chain, external := p.names.sources(p.id), p.external(f)
	var rules []rule
	for _, r := range f.SourceRanges {
		rules = append(rules, newRule().from(r).comment("%s source range", p.s.Name).jump(external))
	}
	p.chains[chain] = notNil(rules) // empty if all sources are denied
	return chain
}

// external plans the chain for what comes from outside. It is the same for all
// kinds of frontends.
func (p *placing) external(f *desired.Frontend) string {
	chain := p.names.external(p.id)
	if p.hasExternal {
		return chain
	}
	p.hasExternal = true
	var rules []rule
	if f.ShortCircuit {
		cluster := p.scopeChain(desired.ScopeCluster)
		rules = append(rules, p.fromPods("pods are not bound by policy Local", cluster)...)
		rules = append(rules,
			newRule().comment("masquerade the node itself").add("-m addrtype --src-type LOCAL").jump(p.names.mark()),
			newRule().comment("the node itself is not bound by policy Local").add("-m addrtype --src-type LOCAL").jump(cluster))
	}
	if f.Action == desired.Forward {
		if to := p.marker(f.Masquerade); to != "" {
			rules = append(rules, newRule().comment("masquerade what comes from outside").jump(to))
		}
		rules = append(rules, newRule().jump(p.scopeChain(f.Scope)))
	}
	p.chains[chain] = rules
	return chain
}

// fromPods are the rules that tell pods.
func (p *planner) fromPods(comment, chain string) []rule {
	if p.globals.PodInterface != "" {
		return []rule{newRule().add("-i %s", interfaceText(p.globals.PodInterface)).comment("%s", comment).jump(chain)}
	}
	var rules []rule
	for _, cidr := range p.globals.PodCIDRs {
		rules = append(rules, newRule().from(cidr).comment("%s", comment).jump(chain))
	}
	return rules
}

// interfaceText is iptables' spelling of a name's beginning.
func interfaceText(name string) string {
	if n := len(name) - 1; n >= 0 && name[n] == '*' {
		return name[:n] + "+"
	}
	return name
}

// refusals are the rules of the filter table for what does not get an endpoint:
// it still has the destination that it was sent to.
func (p *placing) refusals(f *desired.Frontend) []rule {
	reject := "-j REJECT --reject-with icmp-port-unreachable"
	if p.v6 {
		reject = "-j REJECT --reject-with icmp6-port-unreachable"
	}
	var rules []rule
	refuse := func(r *ruleText, why, target string) {
		if f.VIP.IsValid() {
			r.toAddr(f.VIP)
		}
		rules = append(rules, r.protocol(p.s.Protocol).comment("%s %s", p.s.Name, why).port(p.s.Protocol, f.Port).target(target))
	}
	switch {
	case f.Restricted:
		for _, r := range f.SourceRanges {
			if f.Action == desired.Reject {
				refuse(newRule().from(r), "has no endpoints", reject)
			}
		}
		refuse(newRule(), "is not for this source", "-j DROP")
	case f.Action == desired.Reject:
		refuse(newRule(), "has no endpoints", reject)
	case f.Action == desired.Drop:
		refuse(newRule(), "has no endpoints on this node", "-j DROP")
	}
	return rules
}

// endpoints plans the chains that draw an endpoint.
func (p *placing) endpoints() {
	for _, scope := range []desired.Scope{desired.ScopeCluster, desired.ScopeLocal} {
		if !p.uses[scopeIndex(scope)] {
			continue
		}
		chain, endpoints := p.scopeChain(scope), p.s.Endpoints(scope)
		rules := p.masquerades[scopeIndex(scope)]
		if p.s.Affinity > 0 {
			rules = append(rules, p.remembered(endpoints)...)
		}
		p.chains[chain] = append(rules, p.draw(chain, endpoints, 0)...)
	}
}

// remembered sends a client to the endpoint that it was sent to before.
func (p *placing) remembered(endpoints []netip.AddrPort) []rule {
	rules := make([]rule, len(endpoints))
	for i, e := range endpoints {
		chain := p.endpoint(e)
		rules[i] = newRule().comment("%s -> %s", p.s.Name, e).
			add("-m recent --rcheck --seconds %d --reap %s", p.s.Affinity/time.Second, p.recentList(chain)).jump(chain)
	}
	return rules
}

// recentList names the list of the clients of one endpoint.
func (p *planner) recentList(chain string) string {
	mask := "255.255.255.255"
	if p.v6 {
		mask = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
	}
	return fmt.Sprintf("--name %s --mask %s --rsource", chain, mask)
}

// endpoint plans the chain of one endpoint.
func (p *placing) endpoint(e netip.AddrPort) string {
	chain := p.names.endpoint(p.id, e)
	if p.chains[chain] == nil {
		r := newRule().protocol(p.s.Protocol).comment("%s", p.s.Name)
		if p.s.Affinity > 0 {
			r.add("-m recent --set %s", p.recentList(chain))
		}
		p.chains[chain] = []rule{r.target(dnat(p.s.Protocol, e))}
	}
	return chain
}

func dnat(protocol desired.Protocol, to netip.AddrPort) string {
	return fmt.Sprintf("-m %s -j DNAT --to-destination %s", protocolText(protocol), to)
}

// mostDraws is how many draws a chain has at most. More endpoints than that are
// divided into groups, by a hash of each, so that one that comes or goes touches one
// group.
const mostDraws = 16

// draw gives each endpoint the same chance.
func (p *placing) draw(path string, endpoints []netip.AddrPort, depth int) []rule {
	if len(endpoints) <= mostDraws {
		return p.drawOne(endpoints)
	}
	var groups [16][]netip.AddrPort
	for _, e := range endpoints {
		sum := sha256.Sum256([]byte(e.String()))
		digit := sum[depth/2] >> (digitBits * (depth % 2)) & 15
		groups[digit] = append(groups[digit], e)
	}
	var rules []rule
	left := len(endpoints)
	for i, group := range groups {
		if len(group) == 0 {
			continue
		}
		chain := p.names.group(fmt.Sprintf("%s %s %d", p.id, path, i))
		r := newRule().comment("%s: %d of %d endpoints", p.s.Name, len(group), len(endpoints))
		rules = append(rules, r.chance(len(group), left).jump(chain))
		p.chains[chain] = p.draw(chain, group, depth+1)
		left -= len(group)
	}
	return rules
}

func (p *placing) drawOne(endpoints []netip.AddrPort) []rule {
	rules := make([]rule, len(endpoints))
	for i, e := range endpoints {
		r := newRule()
		inline := !p.perEndpoint && p.s.Affinity == 0
		if inline {
			r.protocol(p.s.Protocol)
		}
		r.comment("%s -> %s", p.s.Name, e).chance(1, len(endpoints)-i)
		if inline {
			rules[i] = r.target(dnat(p.s.Protocol, e))
		} else {
			rules[i] = r.jump(p.endpoint(e))
		}
	}
	return rules
}

// hexMark is how iptables prints the mark.
func (p *planner) hexMark() string { return fmt.Sprintf("%#x", p.mark) }

// hairpinLeaf masquerades the connections of an endpoint to itself.
func (p *planner) hairpinLeaf(addr netip.Addr) leaf {
	return leaf{
		key: desired.Key{VIP: addr},
		rules: []rule{
			newRule().fromAddr(addr).toAddr(addr).comment("an endpoint that comes back to itself").target("-j MASQUERADE --random-fully"),
		},
	}
}

// healthLeaf lets load balancers ask.
func (p *planner) healthLeaf(port uint16, owner changetracker.ServicePortName) leaf {
	return leaf{
		key: desired.Key{Protocol: desired.TCP, Port: port}, owner: owner,
		rules: []rule{
			newRule().protocol(desired.TCP).comment("%s health check node port", owner.NamespacedName).port(desired.TCP, port).target("-j ACCEPT"),
		},
	}
}
