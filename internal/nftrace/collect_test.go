package nftrace

import (
	"net/netip"
	"slices"
	"testing"
)

// at is an event of a base chain, with the destination of the packet.
func at(id uint32, table, chain string, handle uint64, to string) event {
	return event{
		id: id, MatchedRule: MatchedRule{Family: "ip", Table: table, Chain: chain, Handle: handle, Policy: handle == 0, Verdict: "accept"},
		source: netip.MustParseAddrPort(client), destination: netip.MustParseAddrPort(to),
	}
}

// looping is an event of a packet that leaves through lo.
func looping(e event) event {
	e.loopback = true
	return e
}

func dropping(e event) event {
	e.Verdict = verdictDrop
	return e
}

// Packets are collected from events, of which many are about packets of others.
func TestPacketsAreCollected(t *testing.T) {
	t.Parallel()
	const own = "own"
	for name, test := range map[string]struct {
		events []event
		hooks  []string // of the packets, with " lost" after those that did not end
		steps  int
		done   bool
	}{
		"forwarded": {
			[]event{
				at(1, own, "prerouting-begin", 1, vip), at(1, "nat", "pre", 5, vip), at(1, own, "prerouting-end", 0, pod),
				at(1, own, "postrouting-end", 0, pod),
			}, []string{"prerouting prerouting postrouting"}, 1, false,
		},
		"a packet that another program traces": {
			[]event{at(1, "other", "prerouting-begin", 1, vip), at(1, own, "prerouting-end", 0, vip)}, nil, 0, false,
		},
		"dropped": {
			[]event{at(1, own, "prerouting-begin", 1, vip), dropping(at(1, "fw", "strict", 2, vip))}, []string{"prerouting"}, 1, false,
		},
		"lost, and its ID comes again": {
			[]event{at(1, own, "prerouting-begin", 1, vip), at(1, own, "prerouting-begin", 1, vip)},
			[]string{"prerouting lost", "prerouting lost"},
			0, false,
		},
		"through lo with another ID": {
			[]event{
				at(1, own, "output-begin", 1, vip), looping(at(1, own, "postrouting-end", 0, pod)),
				at(2, own, "prerouting-begin", 0, pod), at(2, own, "input-end", 0, pod),
			}, []string{"output postrouting prerouting input"}, 0, false,
		},
		"beyond the limit": {
			[]event{
				at(1, own, "output-begin", 1, vip), dropping(at(1, "fw", "strict", 2, vip)),
				at(2, own, "output-begin", 1, vip), dropping(at(2, "fw", "strict", 2, vip)),
				at(3, own, "output-begin", 1, vip),
			}, []string{"output", "output"}, 1, true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCollector(own, 2)
			for _, e := range test.events {
				c.add(e)
			}
			var got []string
			for _, p := range c.result() {
				text := ""
				for _, h := range p.Hops {
					text += " " + h.Hook
				}
				if p.Lost {
					text += " lost"
				}
				got = append(got, text[1:])
				if len(p.Steps) != test.steps {
					t.Errorf("steps %+v, want %d", p.Steps, test.steps)
				}
			}
			if !slices.Equal(got, test.hooks) || c.done() != test.done {
				t.Errorf("packets %q, done %v, want %q, %v", got, c.done(), test.hooks, test.done)
			}
		})
	}
}
