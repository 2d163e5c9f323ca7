package nftables

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// looked is a node, and a peer that its links lead to: clients and endpoints.
type looked struct {
	t          *testing.T
	w          *world
	node, peer *netns.NS
	update     desired.Update
	port       int
}

// newLooked has a frontend of each kind: with and without session affinity, source ranges and
// external policy Local, at a VIP and at a node port.
func newLooked(t *testing.T, w *world) *looked {
	t.Helper()
	l := &looked{t: t, w: w, node: netnstest.New(t), peer: netnstest.New(t), port: 10_000}
	bits := w.addr(0, 0).BitLen()
	at := func(n int) string { return netip.PrefixFrom(w.addr(5, n), bits-8).String() }
	netnstest.Connect(t, l.node, []string{at(1)}, l.peer, []string{at(2)})
	for _, n := range []byte{96, 244} {
		netnstest.Check(t, l.node.AddRoute(netip.PrefixFrom(w.addr(n, 0), bits-16).Masked(), w.addr(5, 2)))
	}
	netnstest.Check(t, l.peer.AddRoute(netip.PrefixFrom(w.addr(96, 0), bits-16).Masked(), w.addr(5, 1)))
	netnstest.Check(t, l.node.Forward())
	l.update = desired.Update{Family: w.family, Full: true, Globals: w.globals()}
	l.update.Globals.ServiceCIDRs = nil // these drop
	for n, affinity := range []time.Duration{0, time.Hour} {
		endpoints := desired.EndpointsOf(netip.AddrPortFrom(w.addr(244, 1), 8080), netip.AddrPortFrom(w.addr(244, 2), 8080))
		s := &desired.Service{Name: name(3*n + 1), Protocol: desired.UDP, Affinity: affinity, Cluster: endpoints, Local: endpoints}
		for i, f := range []desired.Frontend{
			{Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNonPod},
			{Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeAll, Restricted: true, SourceRanges: []netip.Prefix{netip.PrefixFrom(w.addr(5, 0), bits-8).Masked()}},
			{Scope: desired.ScopeLocal, Masquerade: desired.MasqueradeNone, ShortCircuit: true},
		} {
			f.Action, f.Kind, f.VIP, f.Port = desired.Forward, desired.ExternalIP, w.addr(96, 1+10*n+i), 80
			s.Frontends = append(s.Frontends, f)
			if f.Kind, f.VIP, f.Port = desired.NodePort, (netip.Addr{}), uint16(30_000+10*n+i); !f.Restricted {
				s.Frontends = append(s.Frontends, f)
			}
		}
		slices.SortFunc(s.Frontends, func(a, b desired.Frontend) int { return s.Key(&a).Compare(s.Key(&b)) })
		l.update.Changes = append(l.update.Changes, desired.ChangesTo(s)...)
	}
	return l
}

// look sends a datagram from the peer and from the node to each frontend. It returns how many were
// sent, and the flows that conntrack has of them: none of what was dropped.
func (l *looked) look() (sent int, flows []*netlink.ConntrackFlow) {
	l.t.Helper()
	family := netlink.InetFamily(unix.AF_INET)
	if l.w.family == v1.IPv6Protocol {
		family = unix.AF_INET6
	}
	for from, ns := range map[int]*netns.NS{1: l.node, 2: l.peer} {
		l.port++
		socket, err := ns.ListenPacket(l.t.Context(), "udp", netip.AddrPortFrom(l.w.addr(5, from), uint16(l.port)).String())
		netnstest.Check(l.t, err)
		for s := range l.update.Services() {
			for _, f := range s.Frontends {
				to := netip.AddrPortFrom(f.VIP, f.Port)
				if !f.VIP.IsValid() {
					to = netip.AddrPortFrom(l.w.addr(5, 1), f.Port)
				}
				// The node itself may not send what is dropped.
				if _, err := socket.WriteTo([]byte("x"), net.UDPAddrFromAddrPort(to)); err != nil && !errors.Is(err, unix.EPERM) {
					l.t.Errorf("send to %v: %v", to, err)
				}
				sent++
			}
		}
		// The last datagram is for no frontend: when it has come, all have.
		last := netip.AddrPortFrom(l.w.addr(5, 3-from), 9)
		poll.Nil(l.t, "the last datagram arrives", func() error {
			_, err := socket.WriteTo([]byte("x"), net.UDPAddrFromAddrPort(last))
			if err == nil || errors.Is(err, unix.ECONNREFUSED) {
				err = l.node.Do(func() error {
					all, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
					if err == nil && !slices.ContainsFunc(all, func(f *netlink.ConntrackFlow) bool {
						return f.Forward.DstPort == last.Port() && int(f.Forward.SrcPort) == l.port
					}) {
						err = fmt.Errorf("no flow to %v", last)
					}
					return err
				})
			}
			return err
		})
		netnstest.Check(l.t, socket.Close())
	}
	netnstest.Check(l.t, l.node.Do(func() error {
		all, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
		for _, f := range all {
			if f.Forward.Protocol == unix.IPPROTO_UDP && f.Forward.DstPort != 9 {
				flows = append(flows, f)
			}
		}
		return errors.Join(err, netlink.ConntrackTableFlush(netlink.ConntrackTable))
	}))
	return sent, flows
}

// untranslated are the flows that lead to no endpoint.
func (l *looked) untranslated(flows []*netlink.ConntrackFlow) (list []*netlink.ConntrackFlow) {
	for _, f := range flows {
		if to, _ := netip.AddrFromSlice(f.Reverse.SrcIP); !slices.Contains([]netip.Addr{l.w.addr(244, 1), l.w.addr(244, 2)}, to.Unmap()) {
			list = append(list, f)
		}
	}
	return list
}

// without empties maps, as packets of new clients see them that miss their elements at each look.
func (l *looked) without(ids ...setID) {
	l.t.Helper()
	for _, id := range append(ids, setAffinity) {
		mustNFT(l.t, l.node, fmt.Sprintf("flush map %s serviceplane %s", ipKeyword(l.w.family), setName(id)))
	}
}

// TestAPacketThatMissesAtEachLookIsDropped: whatever a packet for a frontend misses, and however often, it
// never leaves without translation, from the node or through it (PKT-88).
func TestAPacketThatMissesAtEachLookIsDropped(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		l := newLooked(t, w)
		e := w.engine(t, l.node)
		mustApply(t, e, l.update)
		for id := range numSets {
			in := &setSpecs[id]
			if in.data == nil || id == setAffinity || !e.state.layout.rules.has(in) {
				continue
			}
			if sent, flows := l.look(); len(flows) != sent || len(l.untranslated(flows)) > 0 {
				t.Fatalf("%d of %d packets have a flow, and without translation %v", len(flows), sent, l.untranslated(flows))
			}
			l.without(id)
			if id == setAffinityPicks { // a client of the node port would get a record, which serves the VIP too
				l.without(setNodePortAffinityPicks)
			}
			sent, flows := l.look()
			for _, f := range l.untranslated(flows) {
				t.Errorf("without %s: no endpoint for %v", in.name, f)
			}
			// A client whose record has no timeout gets an endpoint all the same.
			if dropped := sent - len(flows); dropped == 0 != (id == setAffinityTimeouts) {
				t.Errorf("without %s: %d of %d packets were dropped", in.name, dropped, sent)
			}
			mustApply(t, e, l.update)
		}
	})
}

// TestAFrontDropsWhatMissesAtEachLook: the engine behind would forward it, unmarked and unfiltered.
func TestAFrontDropsWhatMissesAtEachLook(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		l := newLooked(t, w)
		f := w.front(t, l.node)
		b := Behind{Holds: func(netip.Addr) bool { return false }}
		for _, maps := range [][]setID{{setServices, setNodePorts}, {setClasses}} {
			f.must(t, l.update, b)
			if sent, flows := l.look(); len(flows) != sent {
				t.Fatalf("%d of %d packets have a flow", len(flows), sent)
			}
			l.without(maps...)
			if sent, flows := l.look(); len(flows) > 0 {
				t.Errorf("without %s: %d of %d packets got through, such as %v", setName(maps[0]), len(flows), sent, flows[0])
			}
		}
	})
}

// TestASecondLookIsEnough: what the first look has missed reaches an endpoint.
func TestASecondLookIsEnough(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		l := newLooked(t, w)
		e := w.engine(t, l.node)
		mustApply(t, e, l.update)
		b := e.newBatch()
		for _, c := range e.state.layout.chains() {
			if c.hook == nil || c.name == "postrouting" {
				continue
			}
			before := len(c.rules)
			c.rules = slices.DeleteFunc(c.rules, func(r rule) bool {
				v, is := r[0].(*expr.Verdict)
				return is && (v.Chain == chainServices || v.Chain == chainNodePorts)
			})
			if before-len(c.rules) != 2 {
				t.Fatalf("%s has %d first looks, want 2", c.name, before-len(c.rules))
			}
			b.FlushChain(c.name)
			netnstest.Check(t, b.chains([]chainSpec{c}))
		}
		netnstest.Check(t, e.send(t.Context(), b))
		if sent, flows := l.look(); len(flows) != sent || len(l.untranslated(flows)) > 0 {
			t.Errorf("%d of %d packets have a flow, and without translation %v", len(flows), sent, l.untranslated(flows))
		}
	})
}

// TestAFrontendThatMovesStaysInItsSet: packets may miss an element that is written again.
func TestAFrontendThatMovesStaysInItsSet(t *testing.T) {
	moving := desired.Key{VIP: netip.MustParseAddr("10.96.0.1"), Protocol: desired.TCP, Port: 80}
	going, coming := desired.Key{Protocol: desired.TCP, Port: 30_001}, desired.Key{Protocol: desired.TCP, Port: 30_002}
	f, step := frontendSets{}, transaction{}
	f.add(moving, -1)
	f.add(going, -1)
	f.add(moving, 1)
	f.add(coming, 1)
	f.flush(&step)
	var want transaction
	want.remove(setNodePortFrontends, frontendKey(going), elementBytes{})
	want.put(setNodePortFrontends, frontendKey(coming), elementBytes{}, elementBytes{})
	if step.elements != 2 || !bytes.Equal(step.adds[setNodePortFrontends].buf, want.adds[setNodePortFrontends].buf) ||
		!bytes.Equal(step.deletes[setNodePortFrontends].buf, want.deletes[setNodePortFrontends].buf) || len(f) > 0 {
		t.Errorf("%d writes, want those of %v and %v; left %v", step.elements, going, coming, f)
	}
}

// TestOnlyRangesThatDifferAreWritten: packets may miss an element that is written again.
func TestOnlyRangesThatDifferAreWritten(t *testing.T) {
	parse := func(texts ...string) (list []netip.Prefix) {
		for _, text := range texts {
			list = append(list, netip.MustParsePrefix(text))
		}
		return list
	}
	spec := &setSpecs[setNodePortAddresses]
	for title, c := range map[string]struct {
		was, is      []netip.Prefix
		flush        bool
		gone, coming []netip.Prefix
	}{
		"one more":   {was: parse("10.0.0.0/8"), is: parse("10.0.0.0/8", "192.0.2.0/24"), coming: parse("192.0.2.0/24")},
		"one less":   {was: parse("10.0.0.0/8", "192.0.2.0/24"), is: parse("192.0.2.0/24"), gone: parse("10.0.0.0/8")},
		"wider":      {was: parse("10.0.0.0/24", "192.0.2.0/24"), is: parse("10.0.0.0/16", "192.0.2.0/24"), gone: parse("10.0.0.0/24"), coming: parse("10.0.0.0/16")},
		"all":        {was: parse("10.0.0.0/24"), is: parse("0.0.0.0/0"), gone: parse("10.0.0.0/24"), coming: parse("0.0.0.0/0")},
		"first ones": {is: parse("10.0.0.0/24"), coming: parse("10.0.0.0/24")},
		"none left":  {was: parse("10.0.0.0/24"), gone: parse("10.0.0.0/24")},
		"unknown":    {was: unknownPrefixes, is: parse("10.0.0.0/24"), flush: true, coming: parse("10.0.0.0/24")},
	} {
		t.Run(title, func(t *testing.T) {
			got, want := *newWire(unix.NFPROTO_IPV4, "t"), *newWire(unix.NFPROTO_IPV4, "t")
			got.changeIntervals(spec, c.was, c.is)
			if c.flush {
				want.Flush(spec.name)
			}
			want.intervals(nft.DeleteElements(), spec, ranges(c.gone))
			want.intervals(nft.AddElements(), spec, ranges(c.coming))
			if !bytes.Equal(got.Buf, want.Buf) {
				t.Errorf("writes %x, want %x", got.Buf, want.Buf)
			}
		})
	}
}
