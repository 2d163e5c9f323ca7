package refusals

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/oracle"
	"github.com/serviceplane/serviceplane/internal/poll"
)

var rounds = flag.Int("refusals.rounds", 2, "how often TestEnginesAgree changes Services")

// TestEnginesAgree plays the same history against each engine. After each change, connections
// from every place to every address reach all endpoints that the oracle names and no others, and
// are masqueraded if it says so. So every engine does the same, but for its Traits.
func TestEnginesAgree(t *testing.T) {
	for _, e := range engines() {
		t.Run(e.name, func(t *testing.T) { agree(t, e) })
	}
}

func agree(t *testing.T, e engine) {
	t.Helper()
	b := newBench(t, e, settings()[0], specs())
	reached, refused := 0, 0
	for range *rounds + 1 {
		forwarded, others := b.connections()
		b.reach(forwarded)
		b.sendAll(others)
		b.judge(others)
		reached, refused = reached+len(forwarded), refused+len(others)
		b.shuffle()
	}
	t.Logf("%d ways to endpoints, %d refused or of no Service", reached, refused)
	if reached < 1000 || refused < 300 {
		t.Errorf("%d ways to endpoints and %d others, want 1000 and 300 or more", reached, refused)
	}
}

// connection is a way that leads to endpoints, and what was sent on it.
type connection struct {
	way

	want  []oracle.Outcome
	shots []*shot
}

// connections returns the ways of about so many new connections, and packets that lead nowhere.
func (b *bench) connections() (forwarded []*connection, others []*shot) {
	all, fates := seats(b.world), b.fates()
	for n := range specs() {
		for _, family := range families() {
			for _, d := range destinations(b.cluster, n+1, family) {
				for _, kind := range []packet{{protocol: desired.TCP, flags: syn}, {protocol: desired.UDP}} {
					for _, seat := range all {
						const share = 0.1
						if !seat.honest || b.dice.Float64() >= share && !*full {
							continue
						}
						w := way{seat: seat, destination: d, kind: kind, family: family, service: n + 1}
						s := b.shot(w, b.port(), fates)
						switch {
						case s.isNegative():
							others = append(others, s)
						case b.mustArrive(s):
							forwarded = append(forwarded, &connection{way: w, want: s.outcomes()})
						}
					}
				}
			}
		}
	}
	return forwarded, others
}

// reach opens connections until each endpoint has got one.
func (b *bench) reach(all []*connection) {
	b.t.Helper()
	fates := b.fates()
	missing := slices.Clone(all)
	poll.Nil(b.t, "connections reach every endpoint", func() error {
		var next []*shot
		// Where endpoints take turns, each connection would always get the same.
		rand.Shuffle(len(missing), func(i, j int) { missing[i], missing[j] = missing[j], missing[i] })
		for _, c := range missing {
			s := b.shot(c.way, b.port(), fates)
			c.shots, next = append(c.shots, s), append(next, s)
		}
		b.sendAll(next)
		b.judge(next)
		missing = slices.DeleteFunc(missing, b.isComplete)
		if len(missing) == 0 || b.t.Failed() {
			return nil
		}
		c := missing[0]
		return fmt.Errorf("%d of %d do not, such as %v: %d packets reached %v, want %v", len(missing), len(all), c.shots[0], len(c.shots), b.reached(c), c.want)
	})
}

// isComplete: every endpoint has got a packet. Of TCP through sockets, only the answer is seen.
func (b *bench) isComplete(c *connection) bool {
	got := b.reached(c)
	if b.engine.sockets && c.kind.protocol == desired.TCP {
		return len(got) > 0
	}
	return !slices.ContainsFunc(c.want, func(o oracle.Outcome) bool { return got[o.Endpoint] == 0 })
}

// reached returns how many packets each endpoint has got.
func (b *bench) reached(c *connection) map[netip.AddrPort]int {
	b.mu.Lock()
	defer b.mu.Unlock()
	got := map[netip.AddrPort]int{}
	for _, s := range c.shots {
		for _, r := range s.received() {
			got[r.to]++
		}
	}
	return got
}

// judge fails for packets that were not treated as the oracle says.
func (b *bench) judge(all []*shot) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	wrong := map[string]string{}
	for _, s := range all {
		fault := s.leak()
		for _, r := range s.received() {
			if fault == "" {
				fault = b.wrongSource(s, r)
			}
		}
		if fault != "" {
			wrong[s.name+", "+s.what] = fmt.Sprintf("%v: %s, want %v", s, fault, s.outcomes())
		}
	}
	for _, fault := range wrong {
		b.t.Error(fault)
	}
}

// wrongSource returns how the source of a packet differs from what it should be, or "". A packet
// of the node itself has an address of the node in any case, and so has one of a socket.
func (b *bench) wrongSource(s *shot, r receipt) string {
	i := slices.IndexFunc(s.outcomes(), func(o oracle.Outcome) bool { return o.Verdict == "forward" && o.Endpoint == r.to })
	if r.accepted || s.host == nodeName || b.engine.sockets || i < 0 {
		return ""
	}
	o := s.outcomes()[i]
	if kept := r.from.Addr() == s.packet.source.Addr(); kept == o.Masquerade {
		return fmt.Sprintf("%s got it from %v", r.host, r.from)
	}
	return ""
}

// shuffle deletes some Services, and makes others into something else.
func (b *bench) shuffle() {
	b.t.Helper()
	old, now, all := *b.cluster, *b.cluster, specs()
	now.Services, now.Slices = maps.Clone(old.Services), maps.Clone(old.Slices)
	for n := 1; n <= len(all); n++ {
		roll, other := b.dice.IntN(6), all[b.dice.IntN(len(all))]
		if roll > 2 {
			continue
		}
		delete(now.Services, name(n))
		for _, family := range families() {
			delete(now.Slices, sliceName(n, family))
		}
		if roll > 0 {
			add(&now, b.world, n, other)
		}
	}
	b.cluster = &now
	b.tell(&old, &now)
	b.sync()
}

func sliceName(n int, family v1.IPFamily) string { return name(n) + "-" + string(family) }
