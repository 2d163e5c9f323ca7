package nftables

import (
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables/expr"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/jhash"
	"golang.org/x/sys/unix"
)

// chainSpec is one chain of the table. A base chain has a hook.
type chainSpec struct {
	name  string
	hook  *hookSpec
	rules []rule
}

type hookSpec struct {
	kind     string
	number   uint32
	name     string
	priority int32
}

// rule is a rule in the kernel's terms. String prints it in nft's.
type rule []expr.Any

// layout builds the chains of one family's table from what is fixed while the
// engine lives.
type layout struct {
	rules        rules
	dnatPriority int32
	snatPriority int32
}

func (l *layout) family() uint8 {
	if l.rules.v6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

func either[T any](condition bool, yes, no T) T {
	if condition {
		return yes
	}
	return no
}

// nftFamily is the family as nft names it.
func (l *layout) nftFamily() string { return either(l.rules.v6, "ip6", "ip") }

// addrLen is the length of an address in bytes.
func (l *layout) addrLen() int { return 4 * l.rules.addrRegs() }

// chains returns the constant part of the table.
func (l *layout) chains() []chainSpec {
	r := &l.rules
	specs := append(l.affinityChains(), []chainSpec{
		{name: chainReject, rules: r.reject()},
		{name: chainDrop, rules: []rule{{&expr.Verdict{Kind: expr.VerdictDrop}}}},
		{name: chainPick, rules: r.pick()},
		{name: chainShortCircuit, rules: r.shortCircuit()},
		{name: chainLocal, rules: r.local()},
		{name: chainFirewall, rules: r.firewall()},
		{name: chainServices, rules: r.services()},
		{name: chainServicesAgain, rules: again(chainServices)},
		{name: chainNodePorts, rules: r.nodePorts()},
		{name: chainNodePortsAgain, rules: again(chainNodePorts)},
		{name: chainNoService, rules: r.noService()},
		{name: "prerouting", hook: &hookSpec{"nat", unix.NF_INET_PRE_ROUTING, "prerouting", l.dnatPriority}, rules: r.toServices()},
		{name: "output", hook: &hookSpec{"nat", unix.NF_INET_LOCAL_OUT, "output", l.dnatPriority}, rules: r.toServices()},
		{name: "postrouting", hook: &hookSpec{"nat", unix.NF_INET_POST_ROUTING, "postrouting", l.snatPriority}, rules: r.postrouting()},
	}...)
	if r.inFront {
		specs = append(specs,
			chainSpec{name: chainInvalid, rules: r.invalid()},
			chainSpec{name: "invalid-prerouting", hook: &hookSpec{"filter", unix.NF_INET_PRE_ROUTING, "prerouting", l.dnatPriority}, rules: toInvalid()},
			chainSpec{name: "invalid-output", hook: &hookSpec{"filter", unix.NF_INET_LOCAL_OUT, "output", l.dnatPriority}, rules: toInvalid()},
		)
	}
	if r.fastAfter > 0 {
		specs = append(specs, chainSpec{name: chainFastPath, hook: fastPathHook(), rules: r.fastPath()})
	}
	return specs
}

// classChain returns the chain of a class.
func (l *layout) classChain(c class) chainSpec {
	r, spec := &l.rules, chainSpec{name: c.chain()}
	switch t := c.treatment(); {
	case c.isLimit():
		spec.rules = r.clientLimit(c)
	case c.isGate():
		spec.rules = r.gate(c)
	case c.isTimeout():
		spec.rules = r.affinityTimeout(c.timeout())
	case c.isDraw():
		spec.rules = []rule{r.index(c, ownBit+offset(t.scope))}
	default:
		end := gotoChain(chainPick)
		if r.inFront {
			end = &expr.Verdict{Kind: expr.VerdictAccept}
		}
		index := append(r.index(c, offset(t.scope)), end)
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
		rules := append(r.masquerade(t.masquerade), rule{gotoChain(next)})
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
	counts       bool   // connections are counted
	fastAfter    uint32 // packets until the fast path; 0 is none
	limits       bool   // clients are limited
}

// toServices leads a packet to the rules of its frontend. A packet that comes during a transaction
// may find no endpoint there, because each lookup sees the elements of its own moment: the number of
// endpoints may be from before, the endpoints from after. And on kernels without commit b2f742c846ca,
// "netfilter: nf_tables: restart set lookup on base_seq change", a lookup may miss an element that
// is being replaced. The elements of the sets of frontends are never replaced. So what they have looks
// again, and never gets further: neither to a node port that has the number of its port, nor on its
// way without translation, which conntrack would keep for as long as the client tries.
func (r *rules) toServices() []rule {
	return []rule{
		jump(chainServices),
		append(r.isFrontend(), gotoChain(chainServicesAgain)),
		jump(chainNodePorts),
		append(r.isNodePort(lookupSet(setNodePortFrontends, reg(0))), gotoChain(chainNodePortsAgain)),
		jump(chainNoService),
	}
}

func (r *rules) services() []rule {
	return []rule{carry(r.tuple(), setServices), dispatch(setClasses)}
}

func (r *rules) nodePorts() []rule {
	return []rule{append(r.isNodePort(lookup(setNodePorts, reg(0), reg(12))), setPriority(reg(12))), dispatch(setClasses)}
}

// looksAgain is how often a packet looks again for what it has missed. It misses once more only if one
// more transaction changes its service port at that moment: two did so for one of a million, on a slow
// machine with 90 changes a second. More looks cost other packets nothing.
const looksAgain = 3

// again looks again, and then drops the packet: the client sends it again.
func again(chain string) []rule {
	return append(slices.Repeat([]rule{jump(chain)}, looksAgain), rule{&expr.Verdict{Kind: expr.VerdictDrop}})
}

// isFrontend matches packets to a frontend with a VIP.
func (r *rules) isFrontend() rule { return append(r.tuple(), lookupSet(setFrontends, reg(0))) }

// noService refuses packets to addresses of Services that no service port has.
func (r *rules) noService() (list []rule) {
	if r.inFront {
		list = append(list, r.healthChecks())
	}
	return append(list,
		// In front of another engine, a VIP is on the node only because that engine has put it there.
		r.refuse(setClusterIPs, chainReject, !r.inFront),
		r.refuse(setServiceCIDRs, chainDrop, true),
	)
}

// toInvalid leads packets that connection tracking calls INVALID to their chain.
func toInvalid() []rule {
	match := rule{&expr.Ct{Key: expr.CtKeySTATE, Register: reg(0)}, and(0, 0, ctStateInvalid), notZero(0)}
	return []rule{append(match, jump(chainInvalid)...)}
}

// invalid drops such packets if they are for a frontend: they meet no rule of NAT, so nothing
// has decided about them, but the engine behind would forward them. Where the node sees no answers, all packets
// of TCP but the first are such. There those without SYN pass: IPVS forwards them only with a connection that a SYN began.
func (r *rules) invalid() []rule {
	drop := &expr.Verdict{Kind: expr.VerdictDrop}
	direct := append(append(r.tuple(), lookupSet(setDirectVIPs, reg(0))), noSYN()...)
	return []rule{direct, append(r.isFrontend(), drop), append(r.isNodePort(lookupSet(setNodePortFrontends, reg(0))), drop)}
}

// healthChecks accepts the node's health check ports at VIPs that are addresses of the
// node, as at its other addresses.
func (r *rules) healthChecks() rule {
	e := append(rule{r.daddr(0), lookupSet(setClusterIPs, reg(0))}, nodePort()...)
	return append(e, lookupSet(setHealthPorts, reg(0)), &expr.Verdict{Kind: expr.VerdictReturn})
}

// isNodePort matches packets to a node port that port finds, under protocol and port from register 0 on.
// It checks the port before the address: most new connections are not for a Service, and a hash lookup
// costs less than a routing lookup.
func (r *rules) isNodePort(port expr.Any) rule {
	loopback := netip.MustParsePrefix("127.0.0.0/8")
	if r.v6 {
		loopback = netip.MustParsePrefix("::1/128")
	}
	e := append(nodePort(), port,
		daddrType(0), &expr.Cmp{Op: expr.CmpOpEq, Register: reg(0), Data: nativeUint32(unix.RTN_LOCAL)},
		r.daddr(0))
	e = append(e, notInPrefix(reg(0), loopback)...)
	return append(e, r.daddr(0), lookupSet(setNodePortAddresses, reg(0)))
}

func (r *rules) firewall() []rule {
	return []rule{
		r.outsideRanges(),
		carry(r.tuple(), setFirewalled),
		dispatch(setFirewalledClasses),
	}
}

// outsideRanges drops sources that are in no source range of the VIP.
func (r *rules) outsideRanges() rule {
	return append(r.tuple(), r.saddr(r.tupleLen()), lookupNotInSet(setSourceRanges, reg(0)), gotoChain(chainDrop))
}

// local is for externalTrafficPolicy Local, which concerns external traffic only.
func (r *rules) local() []rule {
	var list []rule
	if r.detectsPods {
		list = append(list, append(r.fromPod(expr.CmpOpEq), gotoChain(chainShortCircuit)))
	}
	fromNode := rule{
		&expr.Fib{Register: reg(0), ResultADDRTYPE: true, FlagSADDR: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg(0), Data: nativeUint32(unix.RTN_LOCAL)},
	}
	return append(list,
		append(append(fromNode, r.setMark()...), gotoChain(chainShortCircuit)),
		carry(r.tuple(), setLocals),
		dispatch(setLocalClasses),
		carry(nodePort(), setNodePortLocals),
		dispatch(setLocalClasses),
	)
}

func (r *rules) shortCircuit() []rule {
	return []rule{
		carry(r.tuple(), setShortCircuits),
		dispatch(setShortCircuitClasses),
		carry(nodePort(), setNodePortShortCircuits),
		dispatch(setShortCircuitClasses),
	}
}

// pick translates to the endpoint at the index in skb->priority, and leaves the
// priority 0. No other rules are bound to the two large maps: every further rule would make
// it more expensive to add an element.
func (r *rules) pick() []rule {
	return append(r.dnat(r.tupleAndIndex(), setEndpoints), r.dnat(nodePortAndIndex(), setNodePortEndpoints)...)
}

// masquerade marks the packets that the class masquerades.
func (r *rules) masquerade(m desired.Masquerading) []rule {
	switch {
	case m == desired.MasqueradeAll:
		return []rule{r.setMark()}
	case m == desired.MasqueradeNonPod && r.detectsPods:
		return []rule{append(r.fromPod(expr.CmpOpNeq), r.setMark()...)}
	default:
		return nil
	}
}

// index chooses the index of a slot for a class: at random, or by a hash of the source.
func (r *rules) index(c class, from uint32) rule {
	slots := uint32(c.slots())
	switch by := c.choice(); {
	case r.inFront:
		return resetPriority()
	case by == atRandom:
		return rule{
			&expr.Numgen{Register: reg(0), Modulus: slots, Type: unix.NFT_NG_RANDOM, Offset: from},
			setPriority(reg(0)),
		}
	default:
		key, registers := rule{r.saddr(0)}, r.addrRegs()
		if by == bySourcePort {
			key, registers = append(key, sport(registers)), registers+1
		}
		return append(key, &expr.Hash{
			SourceRegister: reg(0), DestRegister: reg(0), Length: uint32(4 * registers), Modulus: slots, Seed: jhash.Seed, Offset: from, Type: expr.HashTypeJenkins,
		}, setPriority(reg(0)))
	}
}

// affinity forwards a client with a record to the endpoint in the record, if that is
// still an endpoint of the scope. Otherwise it draws an endpoint, writes a record and
// reads it again, so that one chain alone sets the timeout of records. If the map of
// records is full, the client is forwarded to any endpoint without a record.
func (r *rules) affinity(scope desired.Scope) []rule {
	toRecord := append([]rule{jump(chainAffinityRecord)}, r.affinityTranslation(scope)...)
	draw := jump(chainAffinityDraw)
	return slices.Concat(toRecord, []rule{draw, r.affinityWrite()}, toRecord, []rule{draw}, r.affinityDNAT(),
		[]rule{resetPriority()}) // or the next dispatch takes what draw has left for a class
}

// affinityTranslation forwards to the endpoint in skb->priority, if the scope has it.
func (r *rules) affinityTranslation(scope desired.Scope) []rule {
	if scope == desired.ScopeCluster {
		return r.affinityDNAT()
	}
	local := rule{priority(0), or(0, affinityLocal), setPriority(reg(0))}
	return append([]rule{local}, r.affinityDNAT()...)
}

func (r *rules) affinityDNAT() []rule { return r.dnat(rule{priority(0)}, setAffinityEndpoints) }

// affinityRecord goes to the chain of the timeout, with affinity id and timeout in
// skb->priority. The chain returns with the endpoint there, if the client has a record.
func (r *rules) affinityRecord() []rule {
	return []rule{
		// For a packet to a node port the second rule finds nothing.
		carry(nodePort(), setNodePortAffinityKeys),
		carry(r.tuple(), setAffinityKeys),
		{priority(0), and(0, 0, affinitySlotMask), lookupVerdict(setAffinityTimeouts, reg(0))},
	}
}

// affinityTimeout puts the endpoint of the client's record into skb->priority and
// restarts the timeout of the record.
func (r *rules) affinityTimeout(timeout time.Duration) []rule {
	const isTimeout = firstTimeout // all of its bits are set in a timeout, and in no endpoint
	update := rule{priority(0), and(0, 0, isTimeout), &expr.Cmp{Op: expr.CmpOpNeq, Register: reg(0), Data: nativeUint32(isTimeout)}}
	return []rule{
		append(r.recordKey(), lookup(setAffinity, reg(0), reg(12)), setPriority(reg(12))),
		append(update, r.record(unix.NFT_DYNSET_OP_UPDATE, timeout)...),
	}
}

// affinityDraw puts a random endpoint of the service port and scope in skb->priority
// there. It looks up their class, since the classes of frontends with session affinity
// do not contain the number of endpoints.
func (r *rules) affinityDraw() []rule {
	const serviceAndScope = affinityIDMask | affinityLocal
	return []rule{
		{priority(0), and(0, 0, serviceAndScope), lookup(setAffinityCounts, reg(0), reg(12)), setPriority(reg(12))},
		dispatch(setAffinityDraws),
		carry(r.tupleAndIndex(), setAffinityPicks),
		carry(nodePortAndIndex(), setNodePortAffinityPicks),
	}
}

// provisionalTimeout is the timeout of a record until a later rule sets its own.
const provisionalTimeout = time.Second

// affinityWrite writes a record of the endpoint in skb->priority. "add" and "update" do
// not change the data of an existing record, so it is deleted first.
func (r *rules) affinityWrite() rule {
	return append(r.record(dynsetDelete, 0), r.record(unix.NFT_DYNSET_OP_ADD, provisionalTimeout)...)
}

// record changes the client's record, which maps affinity id and source to endpoint id.
// All frontends share it, so it is without the bit of the scope.
func (r *rules) record(op uint32, timeout time.Duration) rule {
	return append(append(rule{priority(12), and(12, 12, affinityMask)}, r.recordKey()...),
		&expr.Dynset{SrcRegKey: reg(0), SrcRegData: reg(12), SetName: setName(setAffinity), Operation: op, Timeout: timeout})
}

// recordKey loads the key of the client's record: affinity id and source.
func (r *rules) recordKey() rule { return rule{priority(0), and(0, 0, affinityIDMask), r.saddr(1)} }

func (r *rules) postrouting() []rule {
	masquerade := &expr.Masq{FullyRandom: true}
	marked := rule{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg(0)}, and(1, 0, r.mark), notZero(1),
		and(0, 0, ^r.mark), &expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: reg(0)},
		masquerade,
	}
	hairpin := rule{r.saddr(0), r.daddr(r.addrRegs()), lookupSet(setHairpin, reg(0)), masquerade}
	if r.inFront {
		// The engine behind translates without connection tracking, so there is no status.
		// It may put VIPs on the node, which are then the source of the node's connections.
		return []rule{marked, hairpin, {r.saddr(0), lookupSet(setClusterIPs, reg(0)), masquerade}}
	}
	translated := rule{&expr.Ct{Key: expr.CtKeySTATUS, Register: reg(0)}, and(0, 0, ctStatusDNAT), notZero(0)}
	return []rule{marked, append(translated, hairpin...)}
}
