package nftables

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/serviceplane/serviceplane/desired"
)

// The number that a packet carries in skb->priority from one rule to the next.
// Bit 31 marks our own: a class, or an index for an affinity pick. The rest of
// the range belongs to affinity: bit 30 is the scope, then 17 bits of service
// port and 13 bits of endpoint.
const (
	ownBit          = 1 << 31
	affinityLocal   = 1 << 30
	affinitySlotLen = 13
	affinityIDLen   = 17
	maxAffinitySlot = 1<<affinitySlotLen - 1
	maxAffinityID   = 1<<affinityIDLen - 1
	affinityIDMask  = maxAffinityID << affinitySlotLen
	affinityMask    = affinityIDMask | maxAffinitySlot

	// localOffset is where the indexes of the Local scope begin, in the same maps as
	// those of the Cluster scope. It bounds the endpoints of a service port too.
	localOffset  = 1 << 16
	maxEndpoints = localOffset
)

// Classes that exist always.
const (
	classReject uint32 = ownBit + 1 + iota
	classDrop
	classFirewall
	classLocal
	firstForwarding uint32 = ownBit + 0x100
)

const (
	chainReject       = "reject"
	chainDrop         = "drop"
	chainFirewall     = "firewall"
	chainLocal        = "local"
	chainShortCircuit = "short-circuit"
	chainPick         = "pick"
	chainServices     = "services"
)

// forwarding is a class of frontends that share one chain: same number of
// endpoints, same treatment of the source, same affinity timeout.
type forwarding struct {
	masquerade desired.Masquerade
	scope      desired.Scope
	endpoints  int
	affinity   time.Duration
}

// chain is the name of the chain of the class: "all-cluster-3", or
// "keep-local-3-affinity-10800s".
func (f forwarding) chain() string {
	s := f.masquerade.String() + "-" + strings.ToLower(f.scope.String()) + "-" + strconv.Itoa(f.endpoints)
	if f.affinity > 0 {
		s += "-affinity-" + seconds(f.affinity)
	}
	return s
}

// parseForwarding is the inverse of chain; ok is false for any other name.
func parseForwarding(name string) (f forwarding, ok bool) {
	for _, m := range []desired.Masquerade{desired.MasqueradeNone, desired.MasqueradeNonPod, desired.MasqueradeAll} {
		for _, s := range []desired.Scope{desired.ScopeCluster, desired.ScopeLocal} {
			f = forwarding{masquerade: m, scope: s}
			rest, found := strings.CutPrefix(name, strings.TrimSuffix(f.chain(), "0"))
			if !found {
				continue
			}
			count, timeout, _ := strings.Cut(rest, "-affinity-")
			f.endpoints, _ = strconv.Atoi(count)
			f.affinity, _ = time.ParseDuration(timeout)
			return f, f.endpoints > 0 && f.chain() == name
		}
	}
	return forwarding{}, false
}

// seconds is how affinity timeouts are spelled in chain names.
func seconds(d time.Duration) string { return fmt.Sprintf("%ds", int(d/time.Second)) }

// reachedFrom lists the verdict maps that may lead to the chain of the class.
// No map leads back to a chain that leads to it, or the kernel would see a loop.
func (f forwarding) reachedFrom() []setID {
	from := []setID{setClasses}
	switch {
	case f.masquerade == desired.MasqueradeNone && f.scope == desired.ScopeCluster:
		from = append(from, setShortCircuitClasses, setFirewalledClasses)
	case f.masquerade == desired.MasqueradeNone:
		from = append(from, setLocalClasses)
	case f.masquerade == desired.MasqueradeAll && f.scope == desired.ScopeCluster:
		from = append(from, setFirewalledClasses)
	}
	return from
}

// offset is where the indexes of the scope begin.
func offset(scope desired.Scope) uint32 {
	if scope == desired.ScopeLocal {
		return localOffset
	}
	return 0
}

// staticClass is where a class that exists always leads to, and from which
// verdict maps.
type staticClass struct {
	chain string
	from  []setID
}

func staticClasses() map[uint32]staticClass {
	return map[uint32]staticClass{
		classReject:   {chainReject, []setID{setClasses, setFirewalledClasses}},
		classDrop:     {chainDrop, []setID{setClasses, setFirewalledClasses, setLocalClasses}},
		classFirewall: {chainFirewall, []setID{setClasses}},
		classLocal:    {chainLocal, []setID{setClasses, setFirewalledClasses}},
	}
}
