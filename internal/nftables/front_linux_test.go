package nftables

import (
	"encoding/binary"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

func (w *world) front(t *testing.T, ns *netns.NS) *Front {
	t.Helper()
	f, err := NewFront(proxier.Config{NetNS: ns.Path()}, w.family, proxier.Deps{}, func(*desired.Service) desired.Traits { return desired.Traits{} })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netnstest.Check(t, f.Close()) })
	return f
}

func (f *Front) must(t *testing.T, u desired.Update, b Behind) proxier.ApplyReport {
	t.Helper()
	if _, err := f.Apply(t.Context(), u, b); err != nil {
		t.Fatalf("apply: %v", err)
	}
	return f.report
}

// TestAFrontHoldsWhatItIsTold runs random histories in which frontends are refused and
// accepted again: those without endpoints, those that Behind refuses, and VIPs that the
// engine behind holds.
func TestAFrontHoldsWhatItIsTold(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		const services = 20
		ns := netnstest.New(t)
		f, m := w.front(t, ns), model{}
		b := Behind{Holds: func(netip.Addr) bool { return false }}
		f.must(t, m.full(w), b)
		for round := range 30 {
			u := m.step(w, services, 1+w.rand.IntN(8))
			if round%5 == 4 { // what is held changes with a full one only
				odd := round%2 == 1
				b.Holds = func(vip netip.Addr) bool { return vip.As16()[15]%2 == 1 == odd }
				u = m.full(w)
			}
			b.Refused = map[desired.Key]bool{}
			for n := range services {
				if m[name(n)] == nil && w.rand.IntN(2) == 0 {
					b.Refused[w.service(n).Key(&desired.Frontend{VIP: w.addr(96, n), Port: 80})] = true
				}
			}
			f.must(t, u, b)
			f.mustHold(t, m, b)
			f.mustVerify(t, m.full(w), b)
			for what, f := range map[string]*Front{"full sync": f, "restart": w.front(t, ns)} {
				if r := f.must(t, m.full(w), b); r.Writes != 0 {
					t.Errorf("%s: %d writes, want none", what, r.Writes)
				}
			}
		}
	})
}

func (f *Front) mustVerify(t *testing.T, u desired.Update, b Behind) {
	t.Helper()
	report, err := f.Verify(t.Context(), u, b)
	if err != nil || report.Checked == 0 || len(report.Differences) > 0 {
		t.Errorf("Verify = %v, %d checked, %v", err, report.Checked, report.Differences)
	}
	b.Refused = maps.Clone(b.Refused)
	b.Refused[desired.Key{Protocol: desired.TCP, Port: 9}] = true
	if report, _ = f.Verify(t.Context(), u, b); !slices.Equal(found(&report), []string{"missing element tcp . 9 of map nodeports*", "missing element tcp . 9 of set nodeport-frontends*"}) {
		t.Errorf("Verify with another refused frontend = %v", report.Differences)
	}
}

func (f *Front) mustHold(t *testing.T, m model, b Behind) {
	t.Helper()
	o, err := f.observe(t.Context())
	if err == nil {
		err = f.observeElements(t.Context(), o)
	}
	if err != nil {
		t.Fatalf("observe: %v", err)
	}
	keys, open := slices.Collect(maps.Keys(b.Refused)), map[desired.Key]bool{}
	for key := range b.Refused {
		if class := o.element[setServices][keyString(frontendKey(key))]; len(class) != 4 || binary.NativeEndian.Uint32([]byte(class)) != classReject {
			t.Errorf("%v has class %x, want that of what is refused", key, class)
		}
	}
	for _, s := range m {
		for i := range s.Frontends {
			frontend := &s.Frontends[i]
			keys = append(keys, s.Key(frontend))
			open[s.Key(frontend)] = frontend.Action == desired.Forward && !frontend.Restricted && !frontend.ShortCircuit
		}
	}
	for key := range b.Refused {
		open[key] = false
	}
	if got, err := f.Frontends(t.Context()); err != nil || !maps.Equal(got, open) {
		t.Errorf("Frontends = %v, %v\nwant %v", got, err, open)
	}
	closed := map[string]string{}
	for _, key := range keys {
		if key.VIP.IsValid() && b.Holds(key.VIP) {
			closed[keyString(elementBytes{}.addr(key.VIP))] = ""
		}
	}
	if got := o.element[setClusterIPs]; !maps.Equal(got, closed) {
		t.Errorf("VIPs with other ports refused: %x, want %x", got, closed)
	}
	for _, id := range []setID{setEndpoints, setNodePortEndpoints, setAffinityKeys, setNodePortAffinityKeys, setAffinityEndpoints, setAffinityPicks} {
		if n := len(o.element[id]); n != 0 {
			t.Errorf("%s has %d elements, want none", setName(id), n)
		}
	}
}

// TestWhatAFrontLetsThrough uses a server on the node in place of the engine behind.
func TestWhatAFrontLetsThrough(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		node, client := netnstest.New(t), netnstest.New(t)
		at := func(n int) string { return netip.PrefixFrom(w.addr(5, n), w.addr(0, 0).BitLen()-8).String() }
		netnstest.Connect(t, node, []string{at(1), at(2), at(3), at(4)}, client, []string{at(100)})
		netnstest.Serve(t, node, "node", 80, 81)
		own, web, empty, drains := w.addr(5, 1), w.addr(5, 2), w.addr(5, 3), w.addr(5, 4)
		service := func(n int, vip netip.Addr, action desired.Action) *desired.Service {
			return &desired.Service{Name: name(n), Protocol: desired.UDP, Frontends: []desired.Frontend{{
				Kind: desired.ExternalIP, VIP: vip, Port: 80, Scope: desired.ScopeCluster, Action: action, Masquerade: desired.MasqueradeNone,
			}}}
		}
		f := w.front(t, node)
		u := desired.Update{Family: w.family, Full: true, Globals: w.globals(), Changes: desired.ChangesTo(
			service(1, own, desired.Forward), service(4, web, desired.Forward), service(7, empty, desired.Reject),
		)}
		b := Behind{
			Holds:   func(vip netip.Addr) bool { return vip != own },
			Refused: map[desired.Key]bool{{VIP: drains, Port: 80, Protocol: desired.UDP}: true},
		}
		answers := func(vip netip.Addr, port uint16, want error) {
			t.Helper()
			var err error
			poll.Soon(func() bool { // a datagram, and an ICMP error about one, may get lost
				_, err = netns.Ask(t.Context(), client, "udp", netip.AddrPortFrom(vip, port), netns.AskOptions{Timeout: time.Second})
				return !errors.Is(err, netns.ErrTimeout)
			})
			if !errors.Is(err, want) {
				t.Errorf("%v port %d: %v, want %v", vip, port, err, want)
			}
		}
		f.must(t, u, b)
		answers(own, 80, nil)
		answers(own, 81, nil) // the node's own
		answers(web, 80, nil)
		answers(web, 81, netns.ErrRefused)
		answers(empty, 80, netns.ErrRefused)
		answers(drains, 80, netns.ErrRefused)
		answers(drains, 81, netns.ErrRefused)
		b.Refused = nil
		f.must(t, desired.Update{Family: w.family, Globals: w.globals()}, b)
		answers(drains, 80, nil)
		answers(drains, 81, nil)
	})
}
