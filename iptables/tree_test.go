package iptables

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/chainname"
)

// chainsOf returns all chains of a tree.
func chainsOf(t *tree) ruleset {
	all := ruleset{}
	t.root.walk(func(n *node) { all[n.chain] = t.rules(n) })
	return all
}

// follow applies the changes of a tree to chains.
func follow(chains ruleset, t *tree) {
	for chain, n := range t.takeChanged() {
		if n == nil {
			delete(chains, chain)
		} else {
			chains[chain] = t.rules(n)
		}
	}
}

func destinationOf(key desired.Key, text string) destination {
	return destination{key: key, rules: []rule{rule(key.String() + " " + text)}}
}

// keyspace generates random keys.
type keyspace struct {
	bits int
	pick func(dice *rand.Rand) desired.Key
}

func keyspaces() map[string]keyspace {
	protocol := func(dice *rand.Rand) desired.Protocol {
		return []desired.Protocol{desired.TCP, desired.UDP, desired.SCTP}[dice.IntN(3)]
	}
	return map[string]keyspace{
		"IPv4 in a row": {v4Bits, func(dice *rand.Rand) desired.Key {
			return desired.Key{VIP: netip.AddrFrom4([4]byte{10, 96, byte(dice.IntN(2)), byte(dice.IntN(256))}), Protocol: desired.TCP, Port: 80}
		}},
		"IPv4 with the same end": {v4Bits, func(dice *rand.Rand) desired.Key {
			return desired.Key{VIP: netip.AddrFrom4([4]byte{byte(dice.IntN(16)), byte(dice.IntN(16)), 0, 1}), Protocol: protocol(dice), Port: 80}
		}},
		"IPv4 with many ports": {v4Bits, func(dice *rand.Rand) desired.Key {
			return desired.Key{VIP: netip.AddrFrom4([4]byte{10, 96, 0, byte(dice.IntN(2))}), Protocol: protocol(dice), Port: uint16(dice.IntN(1000))}
		}},
		"IPv6": {v6Bits, func(dice *rand.Rand) desired.Key {
			b := [16]byte{0xfd, 15: byte(dice.IntN(256)), 14: byte(dice.IntN(3)), 2: byte(dice.IntN(2))}
			return desired.Key{VIP: netip.AddrFrom16(b), Protocol: desired.TCP, Port: 80}
		}},
		"node ports": {0, func(dice *rand.Rand) desired.Key {
			return desired.Key{Protocol: protocol(dice), Port: uint16(30000 + dice.IntN(2768))}
		}},
	}
}

// TestTreeAfterAnyHistory: the changes of a tree lead to the same chains as a new tree with the
// same keys, and no chain is long.
func TestTreeAfterAnyHistory(t *testing.T) {
	for name, space := range keyspaces() {
		t.Run(name, func(t *testing.T) {
			dice := rand.New(rand.NewPCG(1, 2))
			grown, chains, model := newTree("ROOT", "T-", space.bits), ruleset{}, map[desired.Key]destination{}
			for round := range 60 {
				for range 20 {
					key := space.pick(dice)
					if dice.IntN(60) < round { // first more keys, then fewer
						for key = range model {
							break
						}
						delete(model, key)
						grown.put(destination{key: key})
						continue
					}
					model[key] = destinationOf(key, []string{"a", "b"}[dice.IntN(2)])
					grown.put(model[key])
				}
				follow(chains, grown)
				fresh := newTree("ROOT", "T-", space.bits)
				for _, l := range model {
					fresh.put(l)
				}
				if diff := cmp.Diff(chainsOf(fresh), chains); diff != "" {
					t.Fatalf("round %d, %d keys (-from scratch +grown):\n%s", round, len(model), diff)
				}
				if grown.root.count != len(model) {
					t.Fatalf("round %d: %d keys, want %d", round, grown.root.count, len(model))
				}
				for chain, rules := range chains {
					if len(rules) > leafSize || len(chain) > chainname.MaxName {
						t.Fatalf("chain %s has %d rules", chain, len(rules))
					}
				}
				for key := range model {
					if leaf, at, ok := grown.find(key); !ok || leaf.destinations[at].owner != model[key].owner {
						t.Fatalf("%v: found %v in %v, or with another owner", key, ok, leaf)
					}
				}
			}
		})
	}
}

// Packets find their leaf through few rules of the inner chains.
func TestPacketsFindTheirLeaf(t *testing.T) {
	next := 0
	spaces := keyspaces()
	spaces["10,000 Services"] = keyspace{v4Bits, func(dice *rand.Rand) desired.Key {
		next++
		return desired.Key{VIP: netip.AddrFrom4([4]byte{10, 96, byte(next >> 8), byte(next)}), Protocol: desired.TCP, Port: uint16(1 + dice.IntN(1000))}
	}}
	for name, space := range spaces {
		t.Run(name, func(t *testing.T) {
			dice := rand.New(rand.NewPCG(3, 4))
			tr := newTree("ROOT", "T-", space.bits)
			var keys []desired.Key
			for range 10000 {
				key := space.pick(dice)
				keys = append(keys, key)
				tr.put(destinationOf(key, "x"))
			}
			mustFindLeaves(t, tr, keys)
		})
	}
}

func mustFindLeaves(t *testing.T, tr *tree, keys []desired.Key) {
	t.Helper()
	most := 0
	for _, key := range keys {
		walked, n := 0, tr.root
		for n.depth >= 0 {
			var next *node
			for _, child := range n.children {
				if child == nil {
					continue
				}
				walked++
				if matches(string(tr.match(child.first().key, n.depth).jump("X")), key) {
					next = child
					break
				}
			}
			if next == nil {
				t.Fatalf("%v matches no rule of %s", key, n.chain)
			}
			n = next
		}
		if _, found := search(n.destinations, key); !found {
			t.Fatalf("%v is not in its leaf %s", key, n.chain)
		}
		most = max(most, walked+len(n.destinations))
	}
	if most > 100 {
		t.Errorf("a packet walks %d rules, want 100 at most", most)
	}
}

// matches matches the protocol and the destination of a rule as the kernel does.
func matches(text string, key desired.Key) bool {
	fields := strings.Fields(text)
	argument := func(option, otherwise string) string {
		if i := slices.Index(fields, option); i >= 0 {
			return fields[i+1]
		}
		return otherwise
	}
	low, high, isRange := strings.Cut(argument("--dport", "0:65535"), ":")
	if !isRange {
		high = low
	}
	first, _ := strconv.Atoi(low)
	last, _ := strconv.Atoi(high)
	if int(key.Port) < first || int(key.Port) > last || argument("-p", protocolText(key.Protocol)) != protocolText(key.Protocol) {
		return false
	}
	value, mask, _ := strings.Cut(argument("-d", ""), "/")
	v, err := netip.ParseAddr(value)
	if err != nil {
		return value == ""
	}
	m, err := netip.ParseAddr(mask)
	if err != nil {
		return v == key.VIP
	}
	a, b, c := v.AsSlice(), m.AsSlice(), key.VIP.AsSlice()
	for i := range a {
		if c[i]&b[i] != a[i] {
			return false
		}
	}
	return true
}

func TestNamesOfChainsEndLikeTheirAddresses(t *testing.T) {
	tr := newTree("ROOT", "KUBE-VIPS-", v4Bits)
	for i := range 300 {
		tr.put(destinationOf(desired.Key{VIP: netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), Protocol: desired.TCP, Port: 80}, "x"))
	}
	chains := slices.Sorted(maps.Keys(chainsOf(tr)))
	for _, want := range []string{"KUBE-VIPS-0", "KUBE-VIPS-A", "KUBE-VIPS-1A"} {
		if !slices.Contains(chains, want) {
			t.Errorf("chains %v, want %s among them", chains, want)
		}
	}
	if got := tr.rules(tr.root)[10]; got != `-d 0.0.0.10/0.0.0.15 -m comment --comment "addresses that end in A" -j KUBE-VIPS-A` {
		t.Errorf("rule %s", got)
	}
}
