package nftables

import (
	"fmt"
	"iter"
	"strconv"
	"strings"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/enum"
)

// Rules pass a number on in skb->priority. Bit 31 marks a class, or an index for an
// affinity pick. The rest of the range is for session affinity: bit 30 is the scope, then
// 17 bits number the service port and 13 bits the endpoint. The last endpoint numbers stand
// for timeouts of records.
const (
	ownBit           = 1 << 31
	affinityLocal    = 1 << 30
	affinitySlotLen  = 13
	affinityIDLen    = 17
	affinitySlotMask = 1<<affinitySlotLen - 1
	firstTimeout     = 1<<affinitySlotLen - 1<<8
	maxAffinitySlot  = firstTimeout - 1
	maxAffinityID    = 1<<affinityIDLen - 1
	affinityIDMask   = maxAffinityID << affinitySlotLen
	affinityMask     = affinityIDMask | affinitySlotMask

	// localOffset is the first index of the Local scope, in the same maps as the Cluster
	// scope. It also limits the endpoints of a service port.
	localOffset  = 1 << 16
	maxEndpoints = localOffset
)

// Classes that always exist.
const (
	classReject uint32 = ownBit + 1 + iota
	classDrop
	classFirewall
	classLocal
	classAffinity uint32 = ownBit + 0x10 // the first of six, see affinityClass
)

const (
	chainReject         = "rejected" // not reject and drop: nft could not parse commands with these
	chainDrop           = "dropped"
	chainInvalid        = "invalid"
	chainFirewall       = "firewall"
	chainLocal          = "local"
	chainShortCircuit   = "short-circuit"
	chainPick           = "pick"
	chainServices       = "services"
	chainServicesAgain  = "services-again"
	chainNodePorts      = "node-ports"
	chainNodePortsAgain = "node-ports-again"
	chainNoService      = "no-service"
	chainAffinityRecord = "affinity-record"
	chainAffinityDraw   = "affinity-draw"
)

// affinityChain is the chain of all frontends with session affinity and this scope.
func affinityChain(s desired.Scope) string { return "affinity-" + strings.ToLower(s.String()) }

// treatment is how packets of a frontend are handled, beside its endpoints.
type treatment struct {
	masquerade desired.Masquerading
	scope      desired.Scope
}

// treatments yields all of them.
func treatments() iter.Seq[treatment] {
	return func(yield func(treatment) bool) {
		for m := desired.MasqueradeNone; m <= desired.MasqueradeAll; m++ {
			for s := desired.ScopeCluster; s <= desired.ScopeLocal; s++ {
				if !yield(treatment{m, s}) {
					return
				}
			}
		}
	}
}

// String begins the names of chains: "all-cluster".
func (t treatment) String() string {
	return t.masquerade.String() + "-" + strings.ToLower(t.scope.String())
}

func (t treatment) number() uint32 {
	return uint32(t.masquerade)<<1 | uint32(t.scope-desired.ScopeCluster)
}

// reachedFrom lists the verdict maps that may lead to a chain with the treatment. No map
// leads back to a chain that leads to it, because the kernel rejects loops.
func (t treatment) reachedFrom() []setID {
	from := []setID{setClasses}
	switch {
	case t.masquerade == desired.MasqueradeNone && t.scope == desired.ScopeCluster:
		from = append(from, setShortCircuitClasses, setFirewalledClasses)
	case t.masquerade == desired.MasqueradeNone:
		from = append(from, setLocalClasses, setFirewalledClasses) // the latter without endpoints elsewhere
	case t.masquerade == desired.MasqueradeAll && t.scope == desired.ScopeCluster:
		from = append(from, setFirewalledClasses)
	}
	return from
}

// affinityClass is the class of frontends with session affinity. It always exists: the
// number of endpoints and the timeout are in other maps.
func affinityClass(t treatment) uint32 { return classAffinity + t.number() }

func affinityClassChain(t treatment) string { return t.String() + "-affinity" }

// choice is how rules choose a slot, of which each holds an endpoint.
type choice uint8

const (
	atRandom choice = iota
	bySource
	bySourcePort
	numChoices
)

// String is a part of the names of chains.
func (c choice) String() string { return enum.Name(c, "", "source-", "source-port-") }

// choiceOf returns the choice for a service port of an engine with these traits.
func choiceOf(s *desired.Service, of desired.Traits) choice {
	switch of.Balancing(s) {
	case changetracker.SourceHash:
		return bySource
	case changetracker.SourcePortHash:
		return bySourcePort
	case changetracker.Random, changetracker.LeastConnections:
	}
	return atRandom
}

// class is the number of a chain that exists while it has users; a verdict map leads from
// the number to the chain. There are these kinds, and those of client limits (classOfLimit), so that the numbers of chains add
// up and do not multiply:
//
// - frontends without session affinity: treatment, choice and number of slots,
// "all-cluster-3", "all-cluster-source-4093";
// - service ports with session affinity: choice and number of slots of a scope,
// "affinity-draw-cluster-3";
// - service ports with session affinity: timeout of records, "affinity-timeout-10800s".
type class uint32

const (
	classOfCount      class = ownBit | 1<<30
	classIsDraw       class = 1 << 29
	classChoiceBit          = 27
	classTreatmentBit       = 24
	classCountMask    class = 1<<classTreatmentBit - 1
)

func forwardingClass(t treatment, c choice, slots int) class {
	return classOfCount | class(c)<<classChoiceBit | class(t.number())<<classTreatmentBit | class(slots)
}

func drawClass(s desired.Scope, c choice, slots int) class {
	return forwardingClass(treatment{scope: s}, c, slots) | classIsDraw
}

func (c class) isTimeout() bool { return c >= firstTimeout && c <= affinitySlotMask }

func (c class) isDraw() bool { return c&(classOfCount|classIsDraw) == classOfCount|classIsDraw }

// isCounted reports whether c is a class that exists only while it has users.
func (c class) isCounted() bool {
	return c&classOfCount == classOfCount || c.isTimeout() || c.isLimit() || c.isGate()
}

func (c class) slots() int { return int(c & classCountMask) }

func (c class) choice() choice { return choice(c >> classChoiceBit & 3) }

func (c class) treatment() treatment {
	n := c >> classTreatmentBit & 7
	return treatment{masquerade: desired.Masquerading(n >> 1), scope: desired.ScopeCluster + desired.Scope(n&1)}
}

// chain is the name of the chain of the class.
func (c class) chain() string {
	switch {
	case c.isLimit():
		return c.limitChain()
	case c.isGate():
		return c.gateChain()
	case c.isTimeout():
		return "affinity-timeout-" + seconds(c.timeout())
	case c.isDraw():
		return chainAffinityDraw + "-" + strings.ToLower(c.treatment().scope.String()) + "-" + c.choice().String() + strconv.Itoa(c.slots())
	default:
		return c.treatment().String() + "-" + c.choice().String() + strconv.Itoa(c.slots())
	}
}

// reachedFrom lists the verdict maps that lead to the chain of the class.
func (c class) reachedFrom() []setID {
	switch {
	case c.isLimit():
		return []setID{setLimitClasses}
	case c.isGate():
		return []setID{setClasses}
	case c.isTimeout():
		return []setID{setAffinityTimeouts}
	case c.isDraw():
		return []setID{setAffinityDraws}
	default:
		return c.treatment().reachedFrom()
	}
}

// parseClass is the inverse of chain; ok is false for any other name.
func parseClass(chain string) (c class, ok bool) {
	if c, ok := parseLimit(chain); ok {
		return c, true
	}
	kind := strings.TrimRight(chain, "s0123456789")
	n, err := strconv.Atoi(strings.TrimSuffix(chain[len(kind):], "s"))
	if err != nil || n <= 0 || n > longestTimeout || n > maxEndpoints && kind != "affinity-timeout-" {
		return 0, false
	}
	c = timeoutClass(time.Duration(n) * time.Second)
	for t := range treatments() {
		for by := range numChoices {
			for _, other := range []class{forwardingClass(t, by, n), drawClass(t.scope, by, n)} {
				if other.chain() == chain {
					c = other
				}
			}
		}
	}
	return c, c.chain() == chain
}

// seconds prints a timeout.
func seconds(d time.Duration) string { return fmt.Sprintf("%ds", int(d/time.Second)) }

// longestTimeout is the API's limit, a day in seconds.
const longestTimeout = 24 * 60 * 60

// timeoutStep is the unit of timeouts up to some length.
type timeoutStep struct{ upTo, unit time.Duration }

// timeoutSteps make 254 timeouts at most: a timeout is part of a rule, so each one has a
// chain.
func timeoutSteps() [5]timeoutStep {
	return [...]timeoutStep{
		{time.Minute, time.Second},
		{10 * time.Minute, 10 * time.Second},
		{time.Hour, time.Minute},
		{12 * time.Hour, 10 * time.Minute},
		{longestTimeout * time.Second, 30 * time.Minute},
	}
}

// timeoutClass rounds up to the next of these timeouts.
func timeoutClass(d time.Duration) class {
	n, from := class(firstTimeout-1), time.Duration(0)
	for _, s := range timeoutSteps() {
		if d <= s.upTo {
			return n + class((max(d, 1)-from+s.unit-1)/s.unit)
		}
		n += class((s.upTo - from) / s.unit)
		from = s.upTo
	}
	return n
}

// timeout is the inverse of timeoutClass.
func (c class) timeout() time.Duration {
	n, from := time.Duration(c-firstTimeout+1), time.Duration(0)
	for _, s := range timeoutSteps() {
		steps := (s.upTo - from) / s.unit
		if n <= steps {
			return from + n*s.unit
		}
		n -= steps
		from = s.upTo
	}
	return from
}

// offset is the first index of the scope.
func offset(scope desired.Scope) uint32 {
	if scope == desired.ScopeLocal {
		return localOffset
	}
	return 0
}

// staticClass is the chain of a class that always exists, and the verdict maps that lead
// there.
type staticClass struct {
	chain string
	from  []setID
}

func staticClasses() map[uint32]staticClass {
	classes := map[uint32]staticClass{
		classReject:   {chainReject, []setID{setClasses, setFirewalledClasses}},
		classDrop:     {chainDrop, []setID{setClasses, setFirewalledClasses, setLocalClasses}},
		classFirewall: {chainFirewall, []setID{setClasses}},
		classLocal:    {chainLocal, []setID{setClasses, setFirewalledClasses}},
	}
	for t := range treatments() {
		classes[affinityClass(t)] = staticClass{affinityClassChain(t), t.reachedFrom()}
	}
	return classes
}
