package iptables

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/internal/chainname"
)

// jumps returns the rules of the built-in chains of each table in the order of insertion: the last
// one comes first in its chain.
func (p *planner) jumps() map[string][]jump {
	n := p.names
	to := func(hook, chain string, r *ruleText, comment string) jump {
		return jump{hook, chain, r.comment("%s", comment).jump(chain)}
	}
	letIn := to("INPUT", n.health(), newRule(), "kubernetes health check service ports")
	if p.config.HealthChecksOnly {
		return map[string][]jump{tableFilter: {letIn}}
	}
	arriving, leaving := n.services(), n.services()
	if p.portalChains() {
		arriving, leaving = n.portalsContainer(), n.portalsHost()
	}
	nat := []jump{
		to("PREROUTING", arriving, newRule(), "kubernetes service portals"),
		to("OUTPUT", leaving, newRule(), "kubernetes service portals"),
		to("POSTROUTING", n.postrouting(), newRule(), "kubernetes postrouting rules"),
	}
	filter := []jump{to("FORWARD", n.forward(), newRule(), "kubernetes forwarding rules")}
	for _, hook := range []string{"INPUT", "FORWARD", "OUTPUT"} {
		r := newRule().add("-m conntrack --ctstate NEW")
		if p.config.Portals { // direct connections to the sockets' addresses are refused
			r.add("-m conntrack ! --ctstate DNAT")
		}
		filter = append(filter, to(hook, n.services(), r, "kubernetes service portals"))
	}
	filter = append(filter, letIn)
	if p.localhost() || p.keepsLocalnet {
		for _, hook := range []string{"FORWARD", "INPUT"} {
			filter = append(filter, to(hook, n.localnet(), newRule(), "block incoming localnet connections"))
		}
	}
	return map[string][]jump{tableNAT: nat, tableFilter: filter}
}

// portalChains reports whether packets pass the chains of kube-proxy's userspace mode.
func (p *planner) portalChains() bool {
	return p.config.Portals && p.names.prefix == chainname.KubePrefix
}

// localhost reports whether node ports are accepted on loopback addresses.
func (p *planner) localhost() bool {
	loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	return p.config.RouteLocalnet && !p.v6 &&
		slices.ContainsFunc(p.globals.NodePortAddresses, func(p netip.Prefix) bool { return p.Contains(loopback) })
}

// fixedNAT returns the chains of the nat table that do not depend on Services.
func (p *planner) fixedNAT() ruleset {
	n, mark := p.names, p.hexMark()
	set := "-j MARK --set-xmark " + mark + "/" + mark
	chains := ruleset{
		n.mark(): {newRule().target(set)},
		n.postrouting(): {
			newRule().add("-m conntrack --ctstate DNAT").comment("connections of endpoints to themselves").jump(n.hairpin()),
			newRule().add("-m mark ! --mark %s/%s", mark, mark).target("-j RETURN"),
			newRule().target("-j MARK --set-xmark " + mark + "/0x0"),
			newRule().comment("kubernetes service traffic requiring SNAT").target("-j MASQUERADE --random-fully"),
		},
	}
	if p.portalChains() {
		for _, chain := range []string{n.portalsContainer(), n.portalsHost()} {
			chains[chain] = []rule{newRule().comment("kubernetes service portals").jump(n.services())}
		}
	}
	if p.globals.DetectsPods() {
		chains[n.markNonPod()] = append(p.fromPods("pods keep their source", "-j RETURN"), newRule().target(set))
	}
	return chains
}

// fixedFilter returns the chains of the filter table that do not depend on Services.
func (p *planner) fixedFilter() ruleset {
	n, mark := p.names, p.hexMark()
	forward := []rule{
		newRule().comment("kubernetes forwarding rules").add("-m mark --mark %s/%s", mark, mark).target("-j ACCEPT"),
		newRule().comment("kubernetes forwarding conntrack rule").add("-m conntrack --ctstate RELATED,ESTABLISHED").target("-j ACCEPT"),
	}
	if !p.config.KeepInvalid {
		invalid := newRule().add("-m conntrack --ctstate INVALID")
		if p.counts {
			invalid.add("%s", newRule().nfacct(n.invalidCounter()))
		}
		forward = append([]rule{invalid.target("-j DROP")}, forward...)
	}
	chains := ruleset{n.forward(): forward}
	if p.localhost() {
		chains[n.localnet()] = localnetRules()
	}
	return chains
}

// localnetRules drop packets from other hosts with loopback addresses: to them (CVE-2020-8558), and
// from them. With route_localnet, the kernel refuses a source of 127.0.0.1 only; the answers stay
// on the node, but one packet is enough for a datagram.
func localnetRules() []rule {
	return []rule{
		`! -s 127.0.0.0/8 -d 127.0.0.0/8 ! -i lo -m comment --comment "from other hosts" ` +
			`-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP`,
		`-s 127.0.0.0/8 ! -i lo -m comment --comment "not from this host" -j DROP`,
	}
}

// toNodePorts returns the rules that jump to the node ports, after those for VIPs.
func (p *planner) toNodePorts() []rule {
	loopback := netip.MustParsePrefix("127.0.0.0/8")
	if p.v6 {
		loopback = netip.MustParsePrefix("::1/128")
	}
	var rules []rule
	if p.localhost() { // otherwise they are open to other hosts: the packets do not get to INPUT
		rules = append(rules, newRule().to(loopback).add("-m addrtype ! --src-type LOCAL").target("-j RETURN"))
	}
	addJump := func(r *ruleText) {
		rules = append(rules, r.add("-m addrtype --dst-type LOCAL").
			comment("kubernetes service nodeports; NOTE: this must be the last rule in this chain").jump(p.names.nodePorts()))
	}
	for _, accepting := range p.globals.NodePortAddresses {
		switch {
		case accepting.Bits() == 0 && p.localhost():
			addJump(newRule())
		case accepting.Bits() == 0:
			addJump(newRule().add("! -d %s", prefixText(loopback)))
		default:
			if accepting.Overlaps(loopback) && !p.localhost() {
				rules = append(rules, newRule().to(loopback).target("-j RETURN"))
			}
			addJump(newRule().to(accepting))
		}
	}
	return rules
}
