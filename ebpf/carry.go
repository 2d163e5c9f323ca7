package ebpf

import (
	"fmt"
	"slices"
	"strings"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/enum"
)

// reason is why the rules translate connections to a frontend.
type reason uint8

// The reasons. bySockets means that sockets are translated; those of hosts outside and of skipped
// network namespaces still need the rules.
const (
	bySockets reason = iota
	// byProtocol: sockets of the protocol are not translated, see Sockets.UDP.
	byProtocol
	// skipped is what Sockets.Choose has not chosen.
	skipped
	// needsAffinity: a socket does not know the address of its client, which session affinity
	// is about, and rules keep the record.
	needsAffinity
	// needsHash: so does a consistent hash.
	needsHash
	// needsWeights: the endpoints have different weights, or may get them by Config.LeastConnections.
	needsWeights
	// needsEnding: connections to endpoints that are gone are found by connection tracking, under
	// the VIP.
	needsEnding
	// podsUnknown: without PodCIDRs, or by the name of an interface, a socket cannot tell whether
	// its source is to be masqueraded.
	podsUnknown
	// masqueraded: the rules replace every source. PodsKeepSource does not apply it to external addresses.
	masqueraded
	// atNodePorts: sockets of the node's own addresses are not translated.
	atNodePorts
	// refused: the frontend rejects or drops connections.
	refused
	// bySource: source ranges restrict it.
	bySource
	// byClient: its clients are limited.
	byClient
	// tooManyEndpoints do not fit a range.
	tooManyEndpoints
)

// String is the reason in words, which follow "because".
func (r reason) String() string {
	return enum.Name(r, "", "sockets of its protocol are not translated", "it is skipped", "it has session affinity", "it has a consistent hash", "its endpoints have weights, or may get them",
		"its connections end with their endpoint", "a socket cannot tell a pod by its interface, or pods are not known", "every source is masqueraded",
		"it is a node port", "it has no endpoints", "it has source ranges", "its clients are limited", "it has more than 65535 endpoints")
}

// maxEndpoints is the largest number in a range.
const maxEndpoints = 1<<16 - 1

// carries is for desired.Traits.
func (c *Sockets) carries(s *desired.Service, f *desired.Frontend, g *desired.Globals) (carried bool, why string) {
	_, r := c.judge(s, f, g)
	return r == bySockets, r.String()
}

// judge decides whether sockets are translated that connect to a frontend, and in which scope.
func (c *Sockets) judge(s *desired.Service, f *desired.Frontend, g *desired.Globals) (desired.Scope, reason) {
	scope, why := f.Scope, c.judgeService(s, g)
	external := f.Kind == desired.LoadBalancer || f.Kind == desired.ExternalIP
	switch {
	case why != bySockets:
		return scope, why
	case f.Kind == desired.NodePort:
		return scope, atNodePorts
	case f.Restricted:
		return scope, bySource
	case !s.ClientLimit(f).IsZero():
		return scope, byClient
	case f.ShortCircuit:
		scope = desired.ScopeCluster
	case f.Action != desired.Forward:
		return scope, refused
	case f.Masquerade == desired.MasqueradeNone, f.Masquerade == desired.MasqueradeAll && (!external || !c.PodsKeepSource):
		return scope, masqueraded
	}
	switch n := s.Endpoints(scope).Len(); {
	case n == 0:
		return scope, refused
	case n > maxEndpoints:
		return scope, tooManyEndpoints
	case s.Weights(scope) != nil, c.mayWeigh(s):
		return scope, needsWeights
	}
	return scope, bySockets
}

// mayWeigh reports whether the endpoints of a service port may get weights at any time.
func (c *Sockets) mayWeigh(s *desired.Service) bool {
	return c.leastByWeights && s.Port != nil && s.Port.Balancing == changetracker.LeastConnections
}

// judgeService decides what is the same for all frontends.
func (c *Sockets) judgeService(s *desired.Service, g *desired.Globals) reason {
	switch {
	case s.Protocol != desired.TCP && (s.Protocol != desired.UDP || !c.UDP):
		return byProtocol
	case c.Choose != nil && !c.Choose(s):
		return skipped
	case s.Affinity > 0:
		return needsAffinity
	case s.Port != nil && s.Port.Balancing.Hashes():
		return needsHash
	case s.EndsConnections():
		return needsEnding
	case len(g.PodCIDRs) == 0 || g.PodInterface != "":
		return podsUnknown
	default:
		return bySockets
	}
}

// carried is what sockets do for one service port. It does not change.
type carried struct {
	frontends map[desired.Key]int       // index of the scope in endpoints
	endpoints [scopes]desired.Endpoints // empty if no frontend needs them
}

// has reports whether a frontend is carried; a nil carried has none.
func (c *carried) has(key desired.Key) bool {
	if c == nil {
		return false
	}
	_, has := c.frontends[key]
	return has
}

const scopes = 2

// carry returns nil if the rules do everything for a service port.
func (c *Sockets) carry(s *desired.Service, g *desired.Globals) *carried {
	var all *carried
	for i := range s.Frontends {
		f := &s.Frontends[i]
		scope, why := c.judge(s, f, g)
		if why != bySockets {
			continue
		}
		if all == nil {
			all = &carried{frontends: make(map[desired.Key]int, len(s.Frontends))}
		}
		index := int(scope - desired.ScopeCluster)
		all.frontends[s.Key(f)] = index
		all.endpoints[index] = s.Endpoints(scope)
	}
	return all
}

// text lists each frontend of an Update: by sockets, or by rules and why.
func (c *Sockets) text(update *desired.Update) string {
	var lines []string
	for s := range update.Services() {
		for i := range s.Frontends {
			f := &s.Frontends[i]
			scope, why := c.judge(s, f, &update.Globals)
			line := fmt.Sprintf("%v %v: by sockets, %d endpoints", s.Name, s.Key(f), s.Endpoints(scope).Len())
			if why != bySockets {
				line = fmt.Sprintf("%v %v: by rules, because %v", s.Name, s.Key(f), why)
			}
			lines = append(lines, line+"\n")
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}
