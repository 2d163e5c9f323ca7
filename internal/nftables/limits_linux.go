package nftables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nft"
)

// A frontend with a client limit has the class of a gate. The gate's chain drops sources outside the source ranges, if the
// frontend has some, jumps to the chain of the limit, which refuses or comes back, and goes on as the chain firewall does. The
// map of limits leads from the frontend to its limit: another class, with the numbers in its rules and the clients in sets of
// its own. Frontends of a namespace with the same limit share it. The sets are bounded, and so is the number of classes, of a
// namespace and of all.
//
// The number of a limit is the limit itself, rounded up to a few steps, and a hash of the namespace: another process finds
// the same class. Two namespaces may have the same hash; they share what a namespace has.
const (
	classOfLimit   class = ownBit | 1<<29
	limitGate      class = 1 << 28 // and not a limit
	gateRanges     class = 1 << 0  // with source ranges
	limitTenantBit       = 17
	limitRateBit         = 12
	limitBurstBit        = 9
	limitOpenBit         = 4
	limitPrefixBit       = 1
	limitDrops     class = 1 << 0

	limitTenants = 1 << 11
)

const (
	// mostLimits is how many limits may have users, mostLimitsOfTenant those of a namespace. A commit walks all chains.
	mostLimits, mostLimitsOfTenant = 256, 16
	// spareLimits is the number of unused ones that may stay: their sets take memory.
	spareLimits = 16
	// limitClients is the size of each set.
	limitClients = 2048
	// mostWithOpen is how many connections a client may open in a second if those that are open count: the kernel notes each
	// that it counts, also one above the limit (nf_conncount_add), and before 6.18 forgets at most nine of a client in a tick.
	mostWithOpen = 500
	// refusedVIPs is the size of the set that counts what is refused.
	refusedVIPs = 1 << 14
	// limitMemory is how long a client that opens nothing is remembered, at least.
	limitMemory = 10 * time.Second
)

// limitSteps are the numbers of connections that a limit may have.
func limitSteps() [32]uint32 {
	return [...]uint32{
		0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100, 120, 150, 200, 250, 300, 400, 500, 600, 800, 1000, 2000, 5000, 10_000,
	}
}

// burstSteps are how many times the connections of a second may come at once.
func burstSteps() [8]uint32 { return [...]uint32{1, 2, 3, 5, 10, 20, 50, 100} }

// prefixSteps are how many bits of an address may make a client.
func prefixSteps(v6 bool) [8]int {
	if v6 {
		return [...]int{32, 40, 44, 48, 52, 56, 64, 128}
	}
	return [...]int{8, 12, 16, 20, 22, 24, 28, 32}
}

// limitClass returns the class of a limit in a namespace.
func limitClass(namespace string, l changetracker.ClientLimit, v6 bool) class {
	steps, bursts, prefixes := limitSteps(), burstSteps(), prefixSteps(v6)
	if l.Open > 0 {
		l.PerSecond, l.Burst = min(cmp.Or(l.PerSecond, mostWithOpen), mostWithOpen), min(l.Burst, 2*mostWithOpen)
	}
	rate := stepOf(steps[:], l.PerSecond)
	c := classOfLimit | tenantOf(namespace)<<limitTenantBit | rate<<limitRateBit |
		stepOf(steps[:], l.Open)<<limitOpenBit | stepOf(prefixes[:], l.Bits(v6))<<limitPrefixBit
	if rate > 0 {
		c |= stepOf(bursts[:], (l.Burst+steps[rate]-1)/steps[rate]) << limitBurstBit
	}
	return c | either(l.Drop, limitDrops, 0)
}

// gateClass returns the class of the gate before the limit.
func gateClass(restricted bool) class {
	return classOfLimit | limitGate | either(restricted, gateRanges, 0)
}

// stepOf returns the index of the first step that is not smaller, or of the last one.
func stepOf[T uint32 | int](steps []T, n T) class {
	i, _ := slices.BinarySearch(steps, n)
	return class(min(i, len(steps)-1))
}

func tenantOf(namespace string) class {
	h := fnv.New32a()
	_, _ = h.Write([]byte(namespace))
	return class(h.Sum32() % limitTenants)
}

func (c class) isGate() bool {
	return c == gateClass(false) || c == gateClass(true)
}

func (c class) isLimit() bool { return c&(classOfLimit|1<<30|limitGate) == classOfLimit }

func (c class) tenant() class { return c >> limitTenantBit & (limitTenants - 1) }

// limit is what the rules of a class have.
type limit struct {
	perSecond, burst, open uint32
	bits                   int
	drops                  bool
}

func (c class) limit(v6 bool) limit {
	steps, bursts, prefixes := limitSteps(), burstSteps(), prefixSteps(v6)
	l := limit{
		perSecond: steps[c>>limitRateBit&31], open: steps[c>>limitOpenBit&31], bits: prefixes[c>>limitPrefixBit&7], drops: c&limitDrops != 0,
	}
	l.burst = l.perSecond * bursts[c>>limitBurstBit&7]
	return l
}

const limitChains, gateChain = "limit-", "limited"

// limitChain is the name of the chain: the numbers, and the class.
func (c class) limitChain() string {
	l := c.limit(false)
	return fmt.Sprintf("%s%d-%d-%d-%08x", limitChains, l.perSecond, l.burst, l.open, uint32(c))
}

func (c class) gateChain() string { return gateChain + either(c&gateRanges != 0, "-ranges", "") }

// parseLimit is the inverse of chain for gates and limits; for any other name it returns 0 and false.
func parseLimit(chain string) (c class, ok bool) {
	for _, gate := range []class{gateClass(false), gateClass(true)} {
		if gate.gateChain() == chain {
			return gate, true
		}
	}
	at := strings.LastIndexByte(chain, '-')
	if !strings.HasPrefix(chain, limitChains) {
		return 0, false
	}
	n, err := strconv.ParseUint(chain[at+1:], 16, 32)
	if c = class(n); err != nil || !c.isLimit() || c.limitChain() != chain {
		return 0, false
	}
	return c, true
}

// The sets of a limit, which packets write: clients by their new connections, and clients by those that are open.
const newConnections, openConnections = "-new", "-open"

// limitSets are the sets of a class: none unless it is a limit.
func (c class) limitSets() (sets []nft.Set) {
	if !c.isLimit() {
		return nil
	}
	l := c.limit(false)
	if l.perSecond > 0 {
		sets = append(sets, nft.Set{Name: c.limitChain() + newConnections, Flags: unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT})
	}
	if l.open > 0 { // without timeout: the kernel removes a client without connections
		sets = append(sets, nft.Set{Name: c.limitChain() + openConnections, Flags: unix.NFT_SET_EVAL})
	}
	for i := range sets {
		s := &sets[i]
		s.Key, s.Size = vipAndSourceFields, limitClients
		s.Flags = nft.SetFlags(s.Key, nil, s.Flags)
		s.ID = uint32(c)&^ownBit + uint32(i)<<30 // of no set of the layout, and of no other class
	}
	return sets
}

// limitShapes are the names and shapes of the sets of the class that has a chain; none if it is not one of a limit.
func limitShapes(chain string, addrLen int) map[string]string {
	c, _ := parseLimit(chain)
	shapes := map[string]string{}
	for _, s := range c.limitSets() {
		spec := setSpec{key: s.Key, extra: s.Flags}
		shapes[s.Name] = spec.shape(addrLen)
	}
	return shapes
}

// isLimitSet reports whether a set is of a limit.
func isLimitSet(name string) bool {
	for _, suffix := range []string{newConnections, openConnections} {
		if chain, is := strings.CutSuffix(name, suffix); is {
			c, ok := parseLimit(chain)
			return ok && c.isLimit()
		}
	}
	return false
}

// gate is the chain of a gate. Sources outside the source ranges come first, so that they take no room.
func (r *rules) gate(c class) (list []rule) {
	if c&gateRanges != 0 {
		list = append(list, r.outsideRanges())
	}
	return append(list,
		carry(r.tuple(), setLimits), dispatch(setLimitClasses),
		carry(r.tuple(), setFirewalled), dispatch(setFirewalledClasses),
	)
}

// exceeds is what skb->priority says of a packet above the limit, until it is refused: no class.
const exceeds = ownBit + 0xff

// clientLimit is the chain of a limit. A rule that cannot count ends without a verdict, so another one refuses.
func (r *rules) clientLimit(c class) (list []rule) {
	l := c.limit(r.v6)
	if l.perSecond > 0 {
		rate := &expr.Limit{Type: expr.LimitTypePkts, Rate: uint64(l.perSecond), Unit: expr.LimitTimeSecond, Burst: l.burst, Over: true}
		fills := time.Duration(l.burst/l.perSecond+1) * time.Second
		list = append(list, r.note(l.bits, &expr.Dynset{
			SetName: c.limitChain() + newConnections, Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: max(fills, limitMemory), Exprs: []expr.Any{rate},
		}))
	}
	if l.open > 0 {
		list = append(list, r.note(l.bits, &expr.Dynset{
			SetName: c.limitChain() + openConnections, Operation: unix.NFT_DYNSET_OP_ADD, Exprs: []expr.Any{&expr.Connlimit{Count: l.open, Flags: expr.NFT_CONNLIMIT_F_INV}},
		}))
	}
	if r.has(&setSpecs[setRefused]) {
		list = append(list, slices.Concat(ifExceeds(expr.CmpOpEq), r.tuple(), rule{count(setRefused)}))
	}
	return append(list, append(ifExceeds(expr.CmpOpEq), gotoChain(either(l.drops, chainDrop, chainReject))))
}

// ifExceeds matches packets that are above the limit, or those that are not.
func ifExceeds(op expr.CmpOp) rule {
	return rule{priority(0), &expr.Cmp{Op: op, Register: reg(0), Data: nativeUint32(exceeds)}}
}

// note notes that a packet is above the limit, unless that is known: the element of its client in a set matches it.
func (r *rules) note(bits int, update *expr.Dynset) rule {
	update.SrcRegKey = reg(0)
	return slices.Concat(ifExceeds(expr.CmpOpNeq), r.tuple(), r.client(bits), rule{update, &expr.Immediate{Register: reg(0), Data: nativeUint32(exceeds)}, setPriority(reg(0))})
}

// client loads the first bits of the source address behind the tuple.
func (r *rules) client(bits int) rule {
	n, size := r.tupleLen(), 4*r.addrRegs()
	load := rule{r.saddr(n)}
	if bits == 8*size {
		return load
	}
	return append(load, &expr.Bitwise{
		SourceRegister: reg(n), DestRegister: reg(n), Len: uint32(size), Mask: net.CIDRMask(bits, 8*size), Xor: make([]byte, size),
	})
}

// findLimits decides whether the table limits clients: from the first service port on that asks for it, until a full update
// without any. It finds out whether the kernel can: see findHash.
func (e *Engine) findLimits(ctx context.Context, update *desired.Update) error {
	asks := anyService(update, asksForLimit)
	if known := e.limits.Load(); asks && e.holds == nil && known != hashThere && (known == hashUnknown || update.Full) {
		f := feature{
			name: "limits of clients", option: "CONFIG_NFT_LIMIT and CONFIG_NFT_CONNLIMIT",
			exprs: rule{&expr.Limit{Type: expr.LimitTypePkts, Rate: 1, Unit: expr.LimitTimeSecond, Burst: 1, Over: true}, &expr.Connlimit{Count: 1, Flags: expr.NFT_CONNLIMIT_F_INV}},
		}
		if err := e.findFeature(ctx, &e.limits, f, "kernel cannot limit clients: client limits have no effect"); err != nil {
			return err
		}
	}
	e.asksForLimits = asks && e.limitsClients() || !update.Full && e.asksForLimits
	return nil
}

// beginLimits creates the sets that only a table with limits has, if this one has none yet.
func (e *Engine) beginLimits(ctx context.Context) error {
	if !e.asksForLimits || e.state.layout.rules.limits {
		return nil
	}
	e.disturbCheck()
	before := e.state.layout.rules
	e.state.layout.rules.limits = true
	w := e.newBatch()
	for i := range setSpecs {
		if s := &setSpecs[i]; !before.has(s) && e.state.layout.rules.has(s) {
			w.newSet(s, e.setSize(s))
			e.report.Writes++
		}
	}
	return e.send(ctx, w)
}

// hasLimits reports whether the table limits clients.
func (o *observation) hasLimits() bool {
	for name := range o.chains {
		if _, ok := parseLimit(name); ok {
			return true
		}
	}
	return false
}

// endLimits removes the classes of limits, which nobody uses any more: their chains and sets are extra then.
func (r *repair) endLimits(ctx context.Context, before *owners) error {
	if r.asksForLimits || !r.state.layout.rules.limits {
		return nil
	}
	w := r.newBatch()
	empty := len(w.Messages)
	gone := r.state.classes.takeLimits()
	for _, c := range gone {
		if from := c.reachedFrom()[0]; r.observed.verdict[from][uint32(c)].chain != "" {
			w.deleteMark(&setSpecs[from], uint32(c))
			delete(r.observed.verdict[from], uint32(c))
		}
	}
	if err := r.sendUnless(ctx, w, empty); err != nil {
		return err
	}
	w = r.newBatch()
	for _, c := range gone {
		w.FlushChain(c.chain())
	}
	r.state.layout.rules.limits = false
	if r.counting() {
		if _, err := r.addCounters(ctx, []setID{setRefused}, before.of); err != nil {
			return err
		}
		r.counts.ledger.ForgetIf(func(k counterKey) bool { return k.in == setRefused })
	}
	return r.sendUnless(ctx, w, empty)
}

// takeLimits removes the classes of limits, and returns them.
func (t *classTable) takeLimits() (gone []class) {
	for c := range t.users {
		if c.isLimit() || c.isGate() {
			t.change(c, -1)
			delete(t.users, c)
			gone = append(gone, c)
		}
	}
	return gone
}

func asksForLimit(s *desired.Service) bool { return s.Port != nil && !s.Port.ClientLimit.IsZero() }

func anyService(update *desired.Update, is func(*desired.Service) bool) bool {
	for s := range update.Services() {
		if is(s) {
			return true
		}
	}
	return false
}

// limitsClients reports whether client limits have an effect.
func (e *Engine) limitsClients() bool { return e.holds == nil && e.limits.Load() != hashMissing }

var errNoRoomForLimit = errors.New("no room for its client limit, which has no effect")

// clientLimits returns what gives a frontend of a service port the class of its limit, 0 for none; nil if it has none.
func (e *Engine) clientLimits(s *desired.Service, t *transaction) func(f *desired.Frontend) uint32 {
	if s.Port == nil || s.Port.ClientLimit.IsZero() || !e.asksForLimits {
		return nil
	}
	said := false
	return func(f *desired.Frontend) uint32 {
		l := s.ClientLimit(f)
		if l.IsZero() {
			return 0
		}
		c := limitClass(s.Name.Namespace, l, e.state.layout.rules.v6)
		if !e.state.classes.hasRoomFor(c) {
			if !said {
				e.limit(s, errNoRoomForLimit)
			}
			said = true
			return 0
		}
		return e.state.classes.exist(c, t)
	}
}

// limitCounts are the numbers of limits with users.
type limitCounts struct {
	all, unused int
	of          map[class]int // by tenant
	// kept are those that a full update finds: they have room before others.
	kept map[class]bool
}

// count follows the number of users of a class.
func (l *limitCounts) count(c class, before, after int) {
	if !c.isLimit() || (before > 0) == (after > 0) {
		return
	}
	n := either(after > 0, 1, -1)
	if l.of == nil {
		l.of = map[class]int{}
	}
	l.all += n
	l.of[c.tenant()] += n
}

// hasRoomFor reports whether the class of a limit may get a user.
func (t *classTable) hasRoomFor(c class) bool {
	if t.users[c] > 0 || t.limits.kept[c] {
		return true
	}
	all, own := t.limits.all, t.limits.of[c.tenant()]
	for k := range t.limits.kept {
		if t.users[k] > 0 {
			continue // it counts already
		}
		if all++; k.tenant() == c.tenant() {
			own++
		}
	}
	return all < mostLimits && own < mostLimitsOfTenant
}

func (t *classTable) forgetLimits() { t.limits.kept = nil }

// keepLimits lets limits have room first that frontends of an observed table have, of those that an update asks for.
func (t *classTable) keepLimits(o *observation, update *desired.Update, v6 bool) {
	there := map[class]bool{}
	for _, data := range o.element[setLimits] {
		there[class(numberIn(data))] = true
	}
	t.limits.kept = map[class]bool{}
	for s := range update.Services() {
		if asksForLimit(s) {
			if c := limitClass(s.Name.Namespace, s.Port.ClientLimit, v6); there[c] {
				t.limits.kept[c] = true
			}
		}
	}
}
