package ipvs

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/serviceplane/serviceplane/desired"
)

// TestEachMomentIsBeforeOrAfter: rules, addresses and virtual servers change one after the
// other. At each moment a packet reaches an endpoint only if it may before the change or after
// it, and never a program of the node at a VIP. Each change is one of a random sequence: of
// frontends, policies, source ranges and endpoints; some with a full sync or a new process.
func TestEachMomentIsBeforeOrAfter(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	m := &moments{T: t, Rand: rand.New(rand.NewPCG(seed, 0)), node: newFakeNode()}
	e := m.engine(t)
	mustApply(t, e, full())
	names, now := []string{"a", "b", "c"}, map[string]*desired.Service{}
	for round := range 400 {
		m.before, m.during = m.outcomes(), nil
		owner := names[m.IntN(len(names))] // of the VIP that moves
		u := partial()
		for i, name := range names {
			was, is := now[name], m.service(i, name, name == owner)
			now[name] = is
			switch {
			case is != nil:
				u.Changes = append(u.Changes, desired.ChangesTo(is)...)
			case was != nil:
				u.Changes = append(u.Changes, desired.Change{Name: was.Name})
			}
		}
		if m.IntN(4) == 0 {
			u.Full = true
			u.Changes = slices.DeleteFunc(u.Changes, func(c desired.Change) bool { return c.After == nil })
			if m.IntN(2) == 0 {
				e = m.engine(t)
			}
		}
		m.watch()
		mustApply(t, e, u)
		m.judge(fmt.Sprintf("round %d", round))
		if m.Failed() {
			return
		}
		if m.IntN(3) == 0 {
			deleteDrainedAfter(e, 0)
		}
	}
}

// moments are the outcomes of packets on a node in memory.
type moments struct {
	*testing.T
	*rand.Rand
	*node

	before outcomes
	during []outcomes
}

// outcomes are the results of packets, each an endpoint of these or "program", "pass" or "refused".
type outcomes map[momentPacket][]string

type momentPacket struct {
	key    serverKey
	source netip.Addr
}

func momentSources() []netip.Addr {
	return []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.200"), netip.MustParseAddr("10.0.0.1")}
}

// isInside: the source is a pod.
func isInside(source netip.Addr) bool { return source == momentSources()[2] }

const floating = "198.51.100.9"

func momentVIP(n int) string { return fmt.Sprintf("198.51.100.%d", n+1) }

// service is a random service port, or nil.
func (m *moments) service(n int, name string, owns bool) *desired.Service {
	if m.IntN(4) == 0 {
		return nil
	}
	var endpoints []string
	for i := range 3 {
		if m.IntN(2) == 0 {
			endpoints = append(endpoints, fmt.Sprintf("10.%d.0.%d:8080", n+1, i+1))
		}
	}
	s := &desired.Service{Name: portName(name), Protocol: []desired.Protocol{desired.TCP, desired.UDP}[n%2]}
	for i, text := range endpoints {
		s.Cluster = s.Cluster.With(netip.MustParseAddrPort(text))
		if i == 0 && m.IntN(2) == 0 {
			s.Local = s.Cluster
		}
	}
	s.Serving = s.Cluster
	add := func(kind desired.Kind, vip string, port uint16) {
		s = withFrontend(s, kind, vip, port)
		f := &s.Frontends[len(s.Frontends)-1]
		if m.IntN(2) == 0 {
			f.Scope, f.Action = desired.ScopeLocal, desired.Forward
			if s.Local.Len() == 0 {
				f.Action, f.ShortCircuit = desired.Drop, s.Cluster.Len() > 0
			}
		}
		if m.IntN(2) == 0 {
			f.Restricted = true
			f.SourceRanges = []netip.Prefix{netip.PrefixFrom(momentSources()[m.IntN(2)], 32)}
		}
	}
	if m.IntN(3) > 0 {
		add(desired.NodePort, "", uint16(30000+n))
	}
	add(desired.ClusterIP, momentVIP(n), 80)
	if owns {
		add(desired.LoadBalancer, floating, 80)
	}
	return s
}

// watch records the outcomes before each write from now on.
func (m *moments) watch() {
	m.record()
	look := func() { m.during = append(m.during, m.outcomes()) }
	rules, device, kernel := m.rules.onWrite, m.device.onWrite, m.kernel.onWrite
	m.rules.onWrite = func(event string) { look(); rules(event) }
	m.device.onWrite = func(event string) { look(); device(event) }
	m.kernel.onWrite = func(verb string, key serverKey, real netip.AddrPort, weight int) {
		look()
		kernel(verb, key, real, weight)
	}
}

func (m *moments) outcomes() outcomes {
	all := outcomes{}
	for _, protocol := range []desired.Protocol{desired.TCP, desired.UDP} {
		var keys []serverKey
		for n := range 3 {
			keys = append(keys,
				keyOf(protocol, netip.AddrPortFrom(netip.MustParseAddr(nodeAddr), uint16(30000+n))),
				keyOf(protocol, netip.AddrPortFrom(netip.MustParseAddr(momentVIP(n)), 80)),
				keyOf(protocol, netip.AddrPortFrom(netip.MustParseAddr(momentVIP(n)), 22)))
		}
		keys = append(keys, keyOf(protocol, netip.MustParseAddrPort(floating+":80")))
		for _, key := range keys {
			for _, source := range momentSources() {
				all[momentPacket{key, source}] = m.outcome(key, source)
			}
		}
	}
	return all
}

func (m *moments) outcome(key serverKey, source netip.Addr) []string {
	addr := key.VIP
	if !m.accepts(key, source) {
		return []string{"refused"}
	}
	v := m.kernel.virtuals[key]
	switch onNode := slices.Contains(m.device.elsewhere, addr); {
	case v == nil && (m.device.here[addr] || onNode):
		return []string{"program"}
	case v == nil:
		return []string{"pass"}
	}
	var endpoints []string
	for real, weight := range v.reals {
		if weight > 0 {
			endpoints = append(endpoints, real.String())
		}
	}
	return endpoints
}

// accepts reports what the rules say to a packet: nothing else than their frontends, and that
// other ports of a VIP are refused.
func (m *moments) accepts(key serverKey, source netip.Addr) bool {
	if m.rules.behind.Refused[key] {
		return false
	}
	for _, s := range m.rules.services {
		for i := range s.Frontends {
			f := &s.Frontends[i]
			isNodePort := f.Kind == desired.NodePort && key.VIP.String() == nodeAddr
			if s.Protocol != key.Protocol || f.Port != key.Port || f.VIP != key.VIP && !isNodePort {
				continue
			}
			inRanges := slices.ContainsFunc(f.SourceRanges, func(p netip.Prefix) bool { return p.Contains(source) })
			return (!f.Restricted || inRanges) && (f.Action == desired.Forward || f.ShortCircuit && isInside(source))
		}
	}
	return !m.rules.closes(key.VIP.String())
}

// judge compares each moment with the ones before and after the change.
func (m *moments) judge(what string) {
	m.Helper()
	after := m.outcomes()
	for n, moment := range m.during {
		for packet, got := range moment {
			allowed := slices.Concat(m.before[packet], after[packet], []string{"refused"})
			for _, outcome := range got {
				if !slices.Contains(allowed, outcome) || outcome == "program" && m.device.here[packet.key.VIP] {
					m.Errorf("%s: before write %d, %v from %v: %s, want one of %v. The writes: %q", what, n, packet.key, packet.source, outcome, allowed, m.events)
				}
			}
		}
	}
}
