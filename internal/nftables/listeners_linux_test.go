package nftables

import (
	"context"
	"math/rand/v2"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// watchUntilDamage starts a watch. It reports damage, or a possible one.
func watchUntilDamage(t *testing.T, e *Engine) (reported <-chan proxier.Damage) {
	t.Helper()
	damages := make(chan proxier.Damage, 100)
	poll.Background(t, func(ctx context.Context) error { return e.Watch(ctx, func(d proxier.Damage) { damages <- d }) })
	poll.Until(t, "the watch begins", e.listeners.listening)
	return damages
}

// TestAListenerThatJoinsLateChecks: a new process finds its table right, and writes
// nothing. Then another program changes it before the process listens.
func TestAListenerThatJoinsLateChecks(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		ns, m := netnstest.New(t), model{name(1): w.service(1)}
		mustApply(t, w.engine(t, ns), m.full(w))
		e := w.engine(t, ns)
		mustWriteNothing(t, e, m.full(w), "a restart")
		mustNFT(t, ns, "delete table "+ipKeyword(w.family)+" serviceplane")
		reported := watchUntilDamage(t, e)
		poll.Until(t, "a report", func() bool { return len(reported) > 0 })
	})
}

// TestALoadIsCheckedThoughTheOtherFamilyFails: while the listeners pause for both families,
// another program changes the table of one, and then the other one's update fails.
func TestALoadIsCheckedThoughTheOtherFamilyFails(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 0))
	ns, w4, w6 := netnstest.New(t), &world{random, v1.IPv4Protocol}, &world{random, v1.IPv6Protocol}
	e4, e6 := loading(t, w4, ns), loading(t, w6, ns)
	e6.listeners = e4.listeners
	m4, m6 := model{name(1): w4.service(1)}, model{name(1): w6.service(1)}
	mustApply(t, e4, m4.full(w4))
	mustApply(t, e6, m6.full(w6))
	reported := watchUntilDamage(t, e4)
	netnstest.Check(t, e6.beginLoad(t.Context()))
	m4[name(2)] = w4.service(2)
	mustApply(t, e4, m4.full(w4))
	mustNFT(t, ns, "delete table ip serviceplane")
	netnstest.Check(t, e6.endLoad(t.Context(), errInjected))
	poll.Until(t, "a report", func() bool { return len(reported) > 0 })
}

// loading returns an engine whose listeners pause during each write.
func loading(t *testing.T, w *world, ns *netns.NS) *Engine {
	t.Helper()
	e := w.engine(t, ns)
	e.loadWrites = 0
	return e
}
