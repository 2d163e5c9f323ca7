package nftables

import (
	"fmt"
	"slices"
	"time"

	"github.com/google/nftables/expr"

	"github.com/serviceplane/serviceplane/desired"
)

// chainSpec is one chain of the table. A base chain has a hook.
type chainSpec struct {
	name  string
	hook  *hookSpec
	rules []ruleSpec
}

type hookSpec struct {
	number   uint32
	name     string
	priority int32
}

// ruleSpec is a rule twice: as nft would print it, for people, and as the kernel
// wants it.
type ruleSpec struct {
	text  string
	exprs []expr.Any
}

// then adds to a rule.
func (r ruleSpec) then(text string, e ...expr.Any) ruleSpec {
	return ruleSpec{text: r.text + " " + text, exprs: append(r.exprs, e...)}
}

// Netfilter hook numbers, NF_INET_* of linux/netfilter.h.
const (
	hookPrerouting  = 0
	hookOutput      = 3
	hookPostrouting = 4
)

// layout builds the chains of one family's table from what is fixed while the
// engine lives.
type layout struct {
	rules        rules
	dnatPriority int32
	snatPriority int32
}

func (l *layout) family() uint8 {
	if l.rules.v6 {
		return familyIPv6
	}
	return familyIPv4
}

// addrLen is the length of an address in bytes.
func (l *layout) addrLen() int { return 4 * l.rules.addrRegs() }

// chains returns the constant part of the table.
func (l *layout) chains() []chainSpec {
	r := &l.rules
	toServices := []ruleSpec{r.jump(chainServices)}
	return append(l.affinityChains(), []chainSpec{
		{name: chainReject, rules: []ruleSpec{r.reject()}},
		{name: chainDrop, rules: []ruleSpec{r.drop()}},
		{name: chainPick, rules: r.pick()},
		{name: chainShortCircuit, rules: r.shortCircuit()},
		{name: chainLocal, rules: r.local()},
		{name: chainFirewall, rules: r.firewall()},
		{name: chainServices, rules: r.services()},
		{name: "prerouting", hook: &hookSpec{hookPrerouting, "prerouting", l.dnatPriority}, rules: toServices},
		{name: "output", hook: &hookSpec{hookOutput, "output", l.dnatPriority}, rules: toServices},
		{name: "postrouting", hook: &hookSpec{hookPostrouting, "postrouting", l.snatPriority}, rules: r.postrouting()},
	}...)
}

// classChain returns the chain of a class.
func (l *layout) classChain(c class) chainSpec {
	r, spec := &l.rules, chainSpec{name: c.chain()}
	switch t := c.treatment(); {
	case c.isTimeout():
		spec.rules = r.affinityTimeout(c.timeout())
	case c.isDraw():
		spec.rules = []ruleSpec{r.index(c.endpoints(), ownBit+offset(t.scope))}
	default:
		index := r.index(c.endpoints(), offset(t.scope))
		if !r.inFront {
			index = index.then("goto "+chainPick, gotoChain(chainPick))
		}
		spec.rules = append(r.masquerade(t.masquerade), index)
	}
	return spec
}

// affinityChains are what all service ports with session affinity share.
func (l *layout) affinityChains() []chainSpec {
	r := &l.rules
	specs := []chainSpec{
		{name: chainAffinityDraw, rules: r.affinityDraw()},
		{name: chainAffinityRecord, rules: r.affinityRecord()},
		{name: affinityChain(desired.ScopeCluster), rules: r.affinity(desired.ScopeCluster)},
		{name: affinityChain(desired.ScopeLocal), rules: r.affinity(desired.ScopeLocal)},
	}
	for t := range treatments() {
		next := affinityChain(t.scope)
		rules := append(r.masquerade(t.masquerade), ruleSpec{text: "goto " + next, exprs: []expr.Any{gotoChain(next)}})
		specs = append(specs, chainSpec{name: affinityClassChain(t), rules: rules})
	}
	return specs
}

// rules writes the rules of one family's table.
type rules struct {
	v6           bool
	mark         uint32
	detectsPods  bool   // by address or by interface
	podInterface string // exact, or a prefix when it ends in "*"; empty means by address
	inFront      bool   // of another engine: nothing is translated
	specs        []setSpec
}

func (r *rules) ip() string {
	if r.v6 {
		return "ip6"
	}
	return "ip"
}

func (r *rules) services() []ruleSpec {
	specs := []ruleSpec{
		r.carry("%s daddr . meta l4proto . th dport", r.tuple, setServices),
		r.dispatch(setClasses),
		r.nodePorts(),
		r.dispatch(setClasses),
	}
	if r.inFront {
		specs = append(specs, r.healthChecks())
	}
	return append(specs,
		// In front, what is closed is on the node because the engine behind has put it there.
		r.refuse(setClusterIPs, chainReject, !r.inFront),
		r.refuse(setServiceCIDRs, chainDrop, true),
	)
}

// healthChecks lets load balancers ask at VIPs that are addresses of the node, as
// they may at its others.
func (r *rules) healthChecks() ruleSpec {
	e := append([]expr.Any{r.daddr(0), lookupSet(setClusterIPs, reg(0))}, r.nodePort()...)
	return ruleSpec{
		text:  r.ip() + " daddr @cluster-ips meta l4proto . th dport @health-ports return",
		exprs: append(e, lookupSet(setHealthPorts, reg(0)), &expr.Verdict{Kind: expr.VerdictReturn}),
	}
}

// nodePorts looks at the port before the address: most new connections are for
// no Service at all, and a hash lookup costs less than a routing lookup.
func (r *rules) nodePorts() ruleSpec {
	loopback, bits := "ip daddr != 127.0.0.0/8", 8
	value := []byte{127, 0, 0, 0}
	if r.v6 {
		loopback, bits = "ip6 daddr != ::1", 128
		value = append(make([]byte, 15), 1)
	}
	e := append(r.nodePort(), lookup(setNodePorts, reg(0), reg(12)),
		&expr.Fib{Register: reg(0), ResultADDRTYPE: true, FlagDADDR: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg(0), Data: nativeUint32(rtnLocal)},
		r.daddr(0))
	e = append(e, notInPrefix(reg(0), value, bits)...)
	e = append(e, r.daddr(0), lookupSet(setNodePortAddresses, reg(0)), setPriority(reg(12)))
	return ruleSpec{
		text: "fib daddr type local " + loopback + " " + r.ip() +
			" daddr @nodeport-addresses meta priority set meta l4proto . th dport map @nodeports",
		exprs: e,
	}
}

func (r *rules) firewall() []ruleSpec {
	admitted := append(r.tuple(), r.saddr(r.tupleLen()))
	return []ruleSpec{
		{
			text:  fmt.Sprintf("%[1]s daddr . meta l4proto . th dport . %[1]s saddr != @source-ranges goto drop", r.ip()),
			exprs: append(admitted, lookupNotInSet(setSourceRanges, reg(0)), gotoChain(chainDrop)),
		},
		r.carry("%s daddr . meta l4proto . th dport", r.tuple, setFirewalled),
		r.dispatch(setFirewalledClasses),
	}
}

// local is for externalTrafficPolicy Local, which binds only outside traffic.
func (r *rules) local() []ruleSpec {
	var specs []ruleSpec
	if r.detectsPods {
		text, match := r.fromPod(expr.CmpOpEq)
		specs = append(specs, ruleSpec{text: text + " goto short-circuit", exprs: append(match, gotoChain(chainShortCircuit))})
	}
	fromNode := []expr.Any{
		&expr.Fib{Register: reg(0), ResultADDRTYPE: true, FlagSADDR: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg(0), Data: nativeUint32(rtnLocal)},
	}
	text, mark := r.setMark()
	return append(specs,
		ruleSpec{text: "fib saddr type local " + text + " goto short-circuit", exprs: append(append(fromNode, mark...), gotoChain(chainShortCircuit))},
		r.carry("%s daddr . meta l4proto . th dport", r.tuple, setLocals),
		r.dispatch(setLocalClasses),
		r.carry("meta l4proto . th dport", r.nodePort, setNodePortLocals),
		r.dispatch(setLocalClasses),
	)
}

func (r *rules) shortCircuit() []ruleSpec {
	return []ruleSpec{
		r.carry("%s daddr . meta l4proto . th dport", r.tuple, setShortCircuits),
		r.dispatch(setShortCircuitClasses),
		r.carry("meta l4proto . th dport", r.nodePort, setNodePortShortCircuits),
		r.dispatch(setShortCircuitClasses),
	}
}

// pick translates to the endpoint at the index in skb->priority, and leaves the
// priority 0. It is the only rule bound to each of the two large maps: every
// further one would make each element dearer to add.
func (r *rules) pick() []ruleSpec {
	return []ruleSpec{
		r.dnat("%s daddr . meta l4proto . th dport . meta priority", append(r.tuple(), priority(r.tupleLen())), setEndpoints),
		r.dnat("meta l4proto . th dport . meta priority", append(r.nodePort(), priority(2)), setNodePortEndpoints),
	}
}

// masquerade marks what the class masquerades.
func (r *rules) masquerade(m desired.Masquerade) []ruleSpec {
	text, mark := r.setMark()
	switch {
	case m == desired.MasqueradeAll:
		return []ruleSpec{{text: text, exprs: mark}}
	case m == desired.MasqueradeNonPod && r.detectsPods:
		notPod, match := r.fromPod(expr.CmpOpNeq)
		return []ruleSpec{{text: notPod + " " + text, exprs: append(match, mark...)}}
	default:
		return nil
	}
}

// index draws the index of an endpoint, with equal chances.
func (r *rules) index(endpoints int, from uint32) ruleSpec {
	if r.inFront {
		return ruleSpec{text: "meta priority set 0", exprs: []expr.Any{&expr.Immediate{Register: reg(0), Data: nativeUint32(0)}, setPriority(reg(0))}}
	}
	text := fmt.Sprintf("meta priority set numgen random mod %d", endpoints)
	if from != 0 {
		text += fmt.Sprintf(" offset %d", from)
	}
	return ruleSpec{
		text: text,
		exprs: []expr.Any{
			&expr.Numgen{Register: reg(0), Modulus: uint32(endpoints), Type: ngRandom, Offset: from},
			setPriority(reg(0)),
		},
	}
}

// affinity forwards a client that has a record to the endpoint in it, if that is
// still one of the scope. Otherwise it draws one, writes a record and reads it
// again, so that there is one way only in which a record gets its timeout. Where the
// map of records is full, the client is forwarded to any endpoint without one.
func (r *rules) affinity(scope desired.Scope) []ruleSpec {
	toRecord := append([]ruleSpec{r.jump(chainAffinityRecord)}, r.affinityTranslation(scope)...)
	draw := r.jump(chainAffinityDraw)
	return slices.Concat(toRecord, []ruleSpec{draw, r.affinityWrite()}, toRecord, []ruleSpec{draw, r.affinityDNAT()})
}

// affinityTranslation forwards to the endpoint in skb->priority, if the scope has it.
func (r *rules) affinityTranslation(scope desired.Scope) []ruleSpec {
	if scope == desired.ScopeCluster {
		return []ruleSpec{r.affinityDNAT()}
	}
	return []ruleSpec{
		{
			text:  fmt.Sprintf("meta priority set meta priority | %#x", affinityLocal),
			exprs: []expr.Any{priority(0), or(0, affinityLocal), setPriority(reg(0))},
		},
		r.affinityDNAT(),
	}
}

func (r *rules) affinityDNAT() ruleSpec {
	return r.dnat("meta priority", []expr.Any{priority(0)}, setAffinityEndpoints)
}

// affinityRecord goes to the chain of the timeout, with affinity id and timeout in
// skb->priority. It comes back with the endpoint there, if the client has a record.
func (r *rules) affinityRecord() []ruleSpec {
	return []ruleSpec{
		// A packet to a node port is to no VIP: there the second rule finds nothing.
		r.carry("meta l4proto . th dport", r.nodePort, setNodePortAffinityKeys),
		r.carry("%s daddr . meta l4proto . th dport", r.tuple, setAffinityKeys),
		{
			text: fmt.Sprintf("meta priority & %#x vmap @%s", affinitySlotMask, setName(setAffinityTimeouts)),
			exprs: []expr.Any{
				priority(0), and(0, 0, affinitySlotMask),
				&expr.Lookup{SourceRegister: reg(0), SetName: setName(setAffinityTimeouts), IsDestRegSet: true},
			},
		},
	}
}

// affinityTimeout puts the endpoint of the client's record into skb->priority and makes
// the record last for another timeout.
func (r *rules) affinityTimeout(timeout time.Duration) []ruleSpec {
	const isTimeout = firstTimeout // all of its bits are set in a timeout, and in no endpoint
	update := []expr.Any{priority(0), and(0, 0, isTimeout), &expr.Cmp{Op: expr.CmpOpNeq, Register: reg(0), Data: nativeUint32(isTimeout)}}
	return []ruleSpec{
		{
			text:  "meta priority set " + r.recordKeyText() + " map @affinity",
			exprs: append(r.recordKey(), lookup(setAffinity, reg(0), reg(12)), setPriority(reg(12))),
		},
		{
			text:  fmt.Sprintf("meta priority & %#[1]x != %#[1]x update @affinity { %[2]s }", isTimeout, r.recordText(timeout)),
			exprs: append(update, r.record(dynsetUpdate, timeout)...),
		},
	}
}

// affinityDraw puts any endpoint of the service port and scope that are in
// skb->priority there. It finds its class by them, since classes of frontends do not
// tell how many endpoints there are.
func (r *rules) affinityDraw() []ruleSpec {
	tupleIndex := func() []expr.Any { return append(r.tuple(), priority(r.tupleLen())) }
	nodePortIndex := func() []expr.Any { return append(r.nodePort(), priority(2)) }
	const serviceAndScope = affinityIDMask | affinityLocal
	return []ruleSpec{
		{
			text: fmt.Sprintf("meta priority set meta priority & %#x map @%s", serviceAndScope, setName(setAffinityCounts)),
			exprs: []expr.Any{
				priority(0), and(0, 0, serviceAndScope), lookup(setAffinityCounts, reg(0), reg(12)), setPriority(reg(12)),
			},
		},
		r.dispatch(setAffinityDraws),
		r.carry("%s daddr . meta l4proto . th dport . meta priority", tupleIndex, setAffinityPicks),
		r.carry("meta l4proto . th dport . meta priority", nodePortIndex, setNodePortAffinityPicks),
	}
}

// provisionalTimeout is how long a record lasts that gets its own timeout a few
// rules later.
const provisionalTimeout = time.Second

// affinityWrite writes a record of the endpoint in skb->priority. A record that is
// there keeps its data on "add" and "update".
func (r *rules) affinityWrite() ruleSpec {
	return ruleSpec{
		text:  fmt.Sprintf("delete @affinity { %[1]s } add @affinity { %[1]s }", r.recordText(provisionalTimeout)),
		exprs: append(r.record(dynsetDelete, 0), r.record(dynsetAdd, provisionalTimeout)...),
	}
}

func (r *rules) recordText(timeout time.Duration) string {
	return fmt.Sprintf("%s timeout %s : meta priority & %#x", r.recordKeyText(), seconds(timeout), affinityMask)
}

// record changes the client's record: affinity id and source to endpoint id, without
// the bit of the scope, because all frontends share it.
func (r *rules) record(op uint32, timeout time.Duration) []expr.Any {
	return append([]expr.Any{priority(12), and(12, 12, affinityMask)}, append(r.recordKey(),
		&expr.Dynset{SrcRegKey: reg(0), SrcRegData: reg(12), SetName: setName(setAffinity), Operation: op, Timeout: timeout})...)
}

// recordKey loads what the client's record is found by: affinity id and source.
func (r *rules) recordKey() []expr.Any {
	return []expr.Any{priority(0), and(0, 0, affinityIDMask), r.saddr(1)}
}

func (r *rules) recordKeyText() string {
	return fmt.Sprintf("meta priority & %#x . %s saddr", affinityIDMask, r.ip())
}

func (r *rules) postrouting() []ruleSpec {
	clear := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg(0)}, and(1, 0, r.mark), notZero(1),
		and(0, 0, ^r.mark), &expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: reg(0)},
		&expr.Masq{FullyRandom: true},
	}
	if r.inFront {
		return r.postroutingInFront(clear)
	}
	addrLen := r.addrRegs()
	hairpin := []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: reg(0)}, and(0, 0, ctStatusDNAT), notZero(0),
		r.saddr(0), r.daddr(addrLen), lookupSet(setHairpin, reg(0)), &expr.Masq{FullyRandom: true},
	}
	return []ruleSpec{
		r.masqueradeMarked(clear),
		{
			text:  fmt.Sprintf("ct status dnat %[1]s saddr . %[1]s daddr @hairpin masquerade fully-random", r.ip()),
			exprs: hairpin,
		},
	}
}

func (r *rules) masqueradeMarked(exprs []expr.Any) ruleSpec {
	return ruleSpec{
		text:  fmt.Sprintf("meta mark & %#[1]x != 0 meta mark set meta mark & %#[2]x masquerade fully-random", r.mark, ^r.mark),
		exprs: exprs,
	}
}

// postroutingInFront is for an engine behind this one, which translates where
// connection tracking does not see it. Where it has put the VIPs on the node, these are
// what the node's own connections come from.
func (r *rules) postroutingInFront(clear []expr.Any) []ruleSpec {
	return []ruleSpec{
		r.masqueradeMarked(clear),
		{
			text:  fmt.Sprintf("%[1]s saddr . %[1]s daddr @hairpin masquerade fully-random", r.ip()),
			exprs: []expr.Any{r.saddr(0), r.daddr(r.addrRegs()), lookupSet(setHairpin, reg(0)), &expr.Masq{FullyRandom: true}},
		},
		{
			text:  fmt.Sprintf("%s saddr @cluster-ips masquerade fully-random", r.ip()),
			exprs: []expr.Any{r.saddr(0), lookupSet(setClusterIPs, reg(0)), &expr.Masq{FullyRandom: true}},
		},
	}
}
