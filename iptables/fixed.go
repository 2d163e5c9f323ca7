package iptables

import (
	"net/netip"
)

// The tables that the engine uses.
const (
	tableNAT    = "nat"
	tableFilter = "filter"
)

// jump leads from a chain of the kernel's to one of ours.
type jump struct {
	table, chain string
	to           string // the chain of ours
	rule         rule
}

// jumps are in the order in which they are put in front: the last one comes first.
func (e *model) jumps() []jump {
	n := e.names
	letIn := jump{tableFilter, "INPUT", n.health(), newRule().comment("kubernetes health check service ports").jump(n.health())}
	if e.options.healthChecksOnly {
		return []jump{letIn}
	}
	arriving, leaving := n.services(), n.services()
	if e.portalChains() {
		arriving, leaving = n.portalsContainer(), n.portalsHost()
	}
	all := []jump{
		{tableNAT, "PREROUTING", arriving, newRule().comment("kubernetes service portals").jump(arriving)},
		{tableNAT, "OUTPUT", leaving, newRule().comment("kubernetes service portals").jump(leaving)},
		{tableNAT, "POSTROUTING", n.postrouting(), newRule().comment("kubernetes postrouting rules").jump(n.postrouting())},
		{tableFilter, "FORWARD", n.forward(), newRule().comment("kubernetes forwarding rules").jump(n.forward())},
	}
	isNew := func(comment, chain string) rule {
		r := newRule().add("-m conntrack --ctstate NEW")
		if e.options.portals { // the sockets have addresses that refuse who comes there directly
			r = r.add("-m conntrack ! --ctstate DNAT")
		}
		return r.comment("%s", comment).jump(chain)
	}
	for _, hook := range []string{"INPUT", "FORWARD", "OUTPUT"} {
		all = append(all, jump{tableFilter, hook, n.services(), isNew("kubernetes service portals", n.services())})
	}
	all = append(all, letIn)
	if e.localhost() || e.keepsLocalnet {
		all = append(all, jump{tableFilter, "INPUT", n.localnet(), newRule().comment("block incoming localnet connections").jump(n.localnet())})
	}
	return all
}

// portalChains says that packets come by chains of kube-proxy's userspace mode.
func (e *model) portalChains() bool { return e.options.portals && e.names.prefix == kubePrefix }

// localhost says that node ports are accepted on loopback addresses.
func (e *model) localhost() bool {
	return e.options.localhostNodePorts && !e.v6 &&
		containsAddr(e.globals.NodePortAddresses, netip.AddrFrom4([4]byte{127, 0, 0, 1}))
}

func containsAddr(prefixes []netip.Prefix, a netip.Addr) bool {
	for _, p := range prefixes {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// fixedNAT are the chains of the nat table that do not depend on Services.
func (e *model) fixedNAT() ruleset {
	n, mark := e.names, e.hexMark()
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
	if e.portalChains() {
		for _, chain := range []string{n.portalsContainer(), n.portalsHost()} {
			chains[chain] = []rule{newRule().comment("kubernetes service portals").jump(n.services())}
		}
	}
	if e.globals.DetectsPods() {
		chains[n.markNonPod()] = append(e.returnPods(), newRule().target(set))
	}
	return chains
}

func (e *model) returnPods() []rule {
	var rules []rule
	for _, r := range e.fromPods("pods keep their source", "") {
		rules = append(rules, r[:len(r)-len("-j ")]+"-j RETURN")
	}
	return rules
}

// fixedFilter are those of the filter table.
func (e *model) fixedFilter() ruleset {
	n, mark := e.names, e.hexMark()
	forward := []rule{
		newRule().comment("kubernetes forwarding rules").add("-m mark --mark %s/%s", mark, mark).target("-j ACCEPT"),
		newRule().comment("kubernetes forwarding conntrack rule").add("-m conntrack --ctstate RELATED,ESTABLISHED").target("-j ACCEPT"),
	}
	if !e.options.keepInvalid {
		forward = append([]rule{newRule().add("-m conntrack --ctstate INVALID").target("-j DROP")}, forward...)
	}
	chains := ruleset{n.forward(): forward}
	if e.localhost() {
		chains[n.localnet()] = localnetRules()
	}
	return chains
}

// localnetRules keep other hosts from loopback addresses (CVE-2020-8558).
func localnetRules() []rule {
	return []rule{
		newRule().add("! -s 127.0.0.0/8 -d 127.0.0.0/8 ! -i lo").comment("from other hosts").
			add("-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT").target("-j DROP"),
	}
}

// toNodePorts are the rules that lead to the tree of node ports, at the end of the
// tree of addresses.
func (e *model) toNodePorts() []rule {
	loopback := netip.MustParsePrefix("127.0.0.0/8")
	if e.v6 {
		loopback = netip.MustParsePrefix("::1/128")
	}
	var rules []rule
	lead := func(r *ruleText) {
		rules = append(rules, r.add("-m addrtype --dst-type LOCAL").
			comment("kubernetes service nodeports; NOTE: this must be the last rule in this chain").jump(e.names.nodePorts()))
	}
	for _, p := range e.globals.NodePortAddresses {
		switch {
		case p.Bits() == 0 && e.localhost():
			lead(newRule())
		case p.Bits() == 0:
			lead(newRule().add("! -d %s", prefixText(loopback)))
		default:
			if p.Overlaps(loopback) && !e.localhost() {
				rules = append(rules, newRule().to(loopback).target("-j RETURN"))
			}
			lead(newRule().to(p))
		}
	}
	return rules
}
