package iptables

import (
	"crypto/sha256"
	"fmt"
	"net/netip"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/chainname"
	"github.com/serviceplane/serviceplane/internal/enum"
	v1 "k8s.io/api/core/v1"
)

// planner turns service ports into chains and rules. It is pure.
type planner struct {
	config Config // with KeepInvalid also if conntrack is liberal
	names  chainNames
	v6     bool
	// counts means that nfacct works, and that its objects exist.
	counts bool
	// perEndpoint gives every endpoint a chain.
	perEndpoint bool
	// keepsLocalnet keeps the rule about loopback addresses although no node port is
	// accepted there.
	keepsLocalnet bool
	globals       desired.Globals
}

// portPlan holds the chains and rules of one service port.
type portPlan struct {
	// chains are its own chains in the nat table.
	chains map[string][]rule
	// nat and filter are its rules in chains that service ports share.
	nat, filter []destination
	// hairpin are its endpoints on this node, which may connect to themselves.
	hairpin []netip.Addr
	health  uint16 // health check node port, or 0
}

// planPort plans a service port.
func (p *planner) planPort(s *desired.Service) *portPlan {
	one := &portPlanner{
		planner: p, s: s, id: identity(s.Name),
		portPlan: &portPlan{chains: map[string][]rule{}, hairpin: s.OnNode, health: s.Port.HealthCheckNodePort},
	}
	for i := range s.Frontends {
		one.frontend(&s.Frontends[i])
	}
	one.endpoints()
	return one.portPlan
}

// portPlanner builds the plan of one service port.
type portPlanner struct {
	*planner
	*portPlan

	s  *desired.Service
	id string
	// masquerades are the rules of ClusterIPs that mark for masquerade, by scope; nil if no
	// frontend uses the scope.
	masquerades [2][]rule
}

func scopeIndex(s desired.Scope) int { return int(s - desired.ScopeCluster) }

// scopeChain returns the chain that chooses an endpoint of a scope.
func (p *portPlanner) scopeChain(s desired.Scope) string {
	i := scopeIndex(s)
	p.masquerades[i] = notNil(p.masquerades[i])
	if s == desired.ScopeLocal {
		return p.names.local(p.id)
	}
	return p.names.cluster(p.id)
}

// frontend plans the rules of one frontend.
func (p *portPlanner) frontend(f *desired.Frontend) {
	l := destination{key: p.s.Key(f), owner: p.s.Name}
	if f.Action == desired.Forward || f.ShortCircuit {
		l.rules = append(p.countLocalhost(f), p.match(f).jump(p.entry(f)))
	}
	mayBeNodes := f.Kind == desired.LoadBalancer || f.Kind == desired.ExternalIP || p.globals.AcceptsNodePorts(f.VIP)
	if f.VIP.IsValid() && mayBeNodes && (f.Restricted || f.Action != desired.Forward) {
		// The address may belong to the node: packets that are refused must not reach the
		// node port of another Service instead.
		l.rules = append(l.rules, p.match(f).target("-j ACCEPT"))
	}
	if len(l.rules) > 0 {
		p.nat = append(p.nat, l)
	}
	if l.rules = p.refusals(f); len(l.rules) > 0 {
		p.filter = append(p.filter, l)
	}
}

// countLocalhost returns a rule that counts connections to a node port at a loopback
// address. It has no target, so that they go on to the next rule.
func (p *portPlanner) countLocalhost(f *desired.Frontend) []rule {
	if !p.counts || f.Kind != desired.NodePort || !p.localhost() {
		return nil
	}
	r := newRule().to(netip.MustParsePrefix("127.0.0.0/8")).protocol(p.s.Protocol).port(p.s.Protocol, f.Port)
	return []rule{r.nfacct(p.names.localhostCounter())}
}

// match matches the destination; a comment names the service port.
func (p *portPlanner) match(f *desired.Frontend) *ruleText {
	return p.addMatch(newRule(), f, kindText(f.Kind))
}

func (p *portPlanner) addMatch(r *ruleText, f *desired.Frontend, remark string) *ruleText {
	if f.VIP.IsValid() {
		r.toAddr(f.VIP)
	}
	return r.protocol(p.s.Protocol).comment("%s %s", p.s.Name, remark).port(p.s.Protocol, f.Port)
}

func kindText(k desired.Kind) string {
	return enum.Name(k, "", "cluster IP", "loadbalancer IP", "external IP", "node port")
}

// entry returns the first chain for a frontend.
func (p *portPlanner) entry(f *desired.Frontend) string {
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

// marker returns the chain that sets the masquerade mark; "" for none.
func (p *planner) marker(m desired.Masquerading) string {
	switch m {
	case desired.MasqueradeAll:
		return p.names.mark()
	case desired.MasqueradeNonPod:
		return p.names.markNonPod()
	case desired.MasqueradeNone:
	}
	return ""
}

// sources plans the chain that admits the source ranges. Other packets keep their
// destination, and the filter table drops them.
func (p *portPlanner) sources(f *desired.Frontend) string {
	chain, external := p.names.sources(p.id), p.external(f)
	var rules []rule
	for _, r := range f.SourceRanges {
		rules = append(rules, newRule().from(r).comment("%s source range", p.s.Name).jump(external))
	}
	p.chains[chain] = notNil(rules) // empty if all sources are denied
	return chain
}

// external plans the chain for external traffic, which all kinds of frontends share.
func (p *portPlanner) external(f *desired.Frontend) string {
	chain := p.names.external(p.id)
	if p.chains[chain] != nil {
		return chain
	}
	var rules []rule
	if f.ShortCircuit {
		cluster := p.scopeChain(desired.ScopeCluster)
		rules = append(rules, p.fromPods("pods are not bound by policy Local", "-j "+cluster)...)
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

// fromPods returns rules that match packets from pods.
func (p *planner) fromPods(comment, target string) []rule {
	if p.globals.PodInterface != "" {
		return []rule{newRule().add("-i %s", interfaceText(p.globals.PodInterface)).comment("%s", comment).target(target)}
	}
	var rules []rule
	for _, cidr := range p.globals.PodCIDRs {
		rules = append(rules, newRule().from(cidr).comment("%s", comment).target(target))
	}
	return rules
}

// interfaceText writes a wildcard at the end of an interface's name as iptables does.
func interfaceText(name string) string {
	if n := len(name) - 1; n >= 0 && name[n] == '*' {
		return name[:n] + "+"
	}
	return name
}

// refusals returns the rules of the filter table for packets without an endpoint. They
// still have their original destination.
func (p *portPlanner) refusals(f *desired.Frontend) []rule {
	reject := "-j REJECT --reject-with icmp-port-unreachable"
	switch {
	case p.s.Protocol == desired.TCP: // the kernel drops ICMPv6 errors while connect holds the socket (tcp_v6_err)
		reject = "-j REJECT --reject-with tcp-reset"
	case p.v6:
		reject = "-j REJECT --reject-with icmp6-port-unreachable"
	}
	var rules []rule
	refuse := func(r *ruleText, why, target string) {
		rules = append(rules, p.addMatch(r, f, why).target(target))
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

// endpoints plans the chains that choose an endpoint.
func (p *portPlanner) endpoints() {
	for _, scope := range []desired.Scope{desired.ScopeCluster, desired.ScopeLocal} {
		rules := p.masquerades[scopeIndex(scope)]
		if rules == nil {
			continue
		}
		chain, endpoints := p.scopeChain(scope), p.s.Endpoints(scope).Slice()
		if p.s.Affinity > 0 {
			rules = append(rules, p.affinity(endpoints)...)
		}
		p.chains[chain] = append(rules, p.choose(chain, choices{endpoints, p.s.Weights(scope)}, 0)...)
	}
}

// affinity returns the rules that send a client to its previous endpoint.
func (p *portPlanner) affinity(endpoints []netip.AddrPort) []rule {
	rules := make([]rule, len(endpoints))
	for i, e := range endpoints {
		chain := p.endpoint(e)
		rules[i] = newRule().comment("%s -> %s", p.s.Name, e).
			add("-m recent --rcheck --seconds %d --reap %s", p.s.Affinity/time.Second, p.recentList(chain)).jump(chain)
	}
	return rules
}

// recentList names the xt_recent list that holds the clients of one endpoint.
func (p *planner) recentList(chain string) string {
	mask := "255.255.255.255"
	if p.v6 {
		mask = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
	}
	return fmt.Sprintf("--name %s --mask %s --rsource", chain, mask)
}

// endpoint plans the chain of one endpoint.
func (p *portPlanner) endpoint(e netip.AddrPort) string {
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

// maxChoices is how many endpoints a chain chooses from at most. More endpoints are
// divided into groups by a hash, so that a new endpoint changes one group only.
const maxChoices = 16

// choices are endpoints with their weights, nil if they are all equal.
type choices struct {
	endpoints []netip.AddrPort
	weights   []uint16
}

func (c *choices) weight(i int) int {
	if c.weights == nil {
		return 1
	}
	return int(c.weights[i])
}

func (c *choices) total() (sum int) {
	for i := range c.endpoints {
		sum += c.weight(i)
	}
	return sum
}

// add adds an endpoint of o.
func (c *choices) add(o *choices, i int) {
	c.endpoints = append(c.endpoints, o.endpoints[i])
	if o.weights != nil {
		c.weights = append(c.weights, o.weights[i])
	}
}

// choose returns the rules that choose an endpoint, with probabilities in proportion to
// the weights.
func (p *portPlanner) choose(path string, from choices, depth int) []rule {
	if len(from.endpoints) <= maxChoices {
		return p.chooseEndpoint(from)
	}
	var groups [16]choices
	for i, e := range from.endpoints {
		sum := sha256.Sum256([]byte(e.String()))
		digit := sum[depth/2] >> (chainname.DigitBits * (depth % 2)) & 15
		groups[digit].add(&from, i)
	}
	var rules []rule
	left := from.total()
	for i := range groups {
		group := &groups[i]
		if len(group.endpoints) == 0 {
			continue
		}
		chain := p.names.group(fmt.Sprintf("%s %s %d", p.id, path, i))
		r := newRule().comment("%s: %d of %d endpoints", p.s.Name, len(group.endpoints), len(from.endpoints))
		rules = append(rules, r.chance(group.total(), left).jump(chain))
		p.chains[chain] = p.choose(chain, *group, depth+1)
		left -= group.total()
	}
	return rules
}

func (p *portPlanner) chooseEndpoint(from choices) []rule {
	rules := make([]rule, len(from.endpoints))
	left := from.total()
	for i, e := range from.endpoints {
		r := newRule()
		var target string
		if p.perEndpoint || p.s.Affinity > 0 {
			target = "-j " + p.endpoint(e)
		} else {
			r.protocol(p.s.Protocol)
			target = dnat(p.s.Protocol, e)
		}
		rules[i] = r.comment("%s -> %s", p.s.Name, e).chance(from.weight(i), left).target(target)
		left -= from.weight(i)
	}
	return rules
}

// hexMark is the masquerade mark as iptables prints it.
func (p *planner) hexMark() string { return fmt.Sprintf("%#x", p.config.Masquerade.Mark) }

// hairpinDestination masquerades the connections of an endpoint to itself.
func hairpinDestination(addr netip.Addr) destination {
	r := newRule().fromAddr(addr).toAddr(addr).comment("an endpoint that comes back to itself").target("-j MASQUERADE --random-fully")
	return destination{key: desired.Key{VIP: addr}, rules: []rule{r}}
}

func healthKey(port uint16) desired.Key { return desired.Key{Protocol: desired.TCP, Port: port} }

// healthDestination accepts packets to a health check node port.
func healthDestination(port uint16, owner changetracker.ServicePortName) destination {
	r := newRule().protocol(desired.TCP).comment("%s health check node port", owner.NamespacedName).port(desired.TCP, port).target("-j ACCEPT")
	return destination{key: healthKey(port), owner: owner, rules: []rule{r}}
}

// Plan is for proxier.Abilities: it returns the input of iptables-restore that
// programs the update from scratch.
func (e *engine) Plan(update desired.Update) (text string, err error) {
	return plan(&e.config, e.family, &update), nil
}

// plan returns the input of iptables-restore that programs an update from scratch.
func plan(c *Config, family v1.IPFamily, update *desired.Update) string {
	m := newModel(c, family, update.Globals)
	m.plan(update)
	want := m.allChains()
	nat, filter := changeOf(nil, want[tableNAT], false), changeOf(nil, want[tableFilter], false)
	_, nat.first.inserts, _ = repairJumps(m.jumps()[tableNAT], nil)
	_, filter.first.inserts, _ = repairJumps(m.jumps()[tableFilter], nil)
	return compose(nat, filter).b.String()
}
