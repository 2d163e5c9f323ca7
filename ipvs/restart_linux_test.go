package ipvs

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/desired"
)

// A restart writes nothing after any history, in any order of service ports, also if a VIP of one is a node port of
// another. The rules refuse the same frontends as before.
func TestARestartWritesNothing(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	dice := rand.New(rand.NewPCG(seed, 0))
	n := newFakeNode()
	e := n.engine(t)
	mustApply(t, e, full())
	now := map[string]*desired.Service{}
	for range 300 {
		name := string(rune('a' + dice.IntN(3)))
		if s := randomPort(dice, name); now[name] != nil && dice.IntN(3) == 0 {
			delete(now, name)
			mustApply(t, e, removal(name))
		} else if !contended(s, now) { // otherwise the Updater lets one of them have it
			now[name] = s
			mustApply(t, e, partial(s))
		}
		for key, v := range n.kernel.virtuals {
			for real := range v.reals {
				if dice.IntN(4) == 0 {
					n.kernel.connect(key, real)
				}
			}
		}
		if dice.IntN(5) == 0 {
			deleteDrainedAfter(e, time.Hour)
		}
		refused := maps.Clone(n.rules.behind.Refused)
		n.record()
		mustApply(t, n.engine(t), full(slices.Collect(maps.Values(now))...))
		n.mustSee(t, "rules")
		if !maps.Equal(n.rules.behind.Refused, refused) {
			t.Errorf("rules refuse %v after a restart, and %v before", n.rules.behind.Refused, refused)
		}
		if t.Failed() {
			return
		}
	}
}

// randomPort draws a service port, with some endpoints that terminate. It may have an address
// of the node with a port that is also its node port in another draw.
func randomPort(dice *rand.Rand, name string) *desired.Service {
	pods := []string{pod1, pod2, pod3}
	s := service(name, "198.51.100."+strconv.Itoa(int(name[0])), pods[:dice.IntN(len(pods)+1)]...)
	s.Serving = desired.Endpoints{}
	for _, p := range pods {
		if addr := netip.MustParseAddrPort(p); s.Cluster.Has(addr) || dice.IntN(2) == 0 {
			s.Serving = s.Serving.With(addr)
		}
	}
	switch dice.IntN(4) {
	case 0:
		return withFrontend(s, desired.NodePort, "", 30080)
	case 1:
		return withFrontend(s, desired.ExternalIP, nodeAddr, 30080)
	case 2:
		return withFrontend(s, desired.ExternalIP, dnsVIP, 80)
	default:
		return s
	}
}

// contended reports whether another service port has a frontend of s.
func contended(s *desired.Service, others map[string]*desired.Service) bool {
	keys := func(s *desired.Service) (all []desired.Key) {
		for i := range s.Frontends {
			all = append(all, s.Key(&s.Frontends[i]))
		}
		return all
	}
	for _, o := range others {
		if o.Name != s.Name && slices.ContainsFunc(keys(o), func(k desired.Key) bool { return slices.Contains(keys(s), k) }) {
			return true
		}
	}
	return false
}
