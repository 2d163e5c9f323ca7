package endpointhealth_test

import (
	"errors"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/node/endpointhealth"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// both observes syncs and connections.
type both struct{ syncs, connections int }

func (b *both) ObserveSync(proxier.SyncReport)        { b.syncs++ }
func (b *both) ObserveConnection(r connection.Report) { b.connections++ }

// connect reports a connection that tried these endpoints, of which the last answered, unless
// it failed too.
func (k *kit) connect(observer proxier.Observer, err error, endpoints ...int) {
	r := connection.Report{Name: webName(), Family: v1.IPv4Protocol, Protocol: desired.TCP}
	for _, i := range endpoints {
		r.Attempts = append(r.Attempts, connection.Attempt{Endpoint: endpoint(i), Err: err})
	}
	observer.(connection.Observer).ObserveConnection(r)
}

// onlyReports removes the Probe of inBubble.
func (k *kit) onlyReports(policy endpointhealth.CheckPolicy) {
	k.options.Choose = always(policy)
	k.run()
}

// Failed connections in a row eject an endpoint, without any Probe, and it returns when its time is over (EHC-20).
// A success in between, a fault of the node, and failures long after each other do not count.
func TestReports(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{}, 3, func(k *kit) {
		k.onlyReports(endpointhealth.CheckPolicy{})
		next := &both{}
		observer := k.checker.Observer(next)
		observer.ObserveSync(proxier.SyncReport{})
		k.after(time.Minute)
		report := func(n int, err error, pause time.Duration) {
			for range n {
				k.connect(observer, err, 1)
				time.Sleep(pause)
			}
		}
		report(4, syscall.ECONNREFUSED, time.Second)
		report(1, nil, 0)
		report(4, syscall.ECONNREFUSED, time.Second)
		k.after(time.Second)
		report(100, syscall.EMFILE, time.Second)
		time.Sleep(time.Minute)
		report(20, syscall.ECONNREFUSED, 31*time.Second)
		time.Sleep(time.Minute)
		k.after(0)
		report(5, syscall.ECONNREFUSED, time.Second)
		k.after(time.Second, at(1)+" ejected")
		if s := k.checker.Status(); s.Checks != 0 || len(s.Unusual) != 1 || s.Unusual[0].Reason != "connections: connection refused" || s.Unusual[0].Until.Sub(s.Unusual[0].Since) != 30*time.Second {
			t.Errorf("status %+v", s)
		}
		k.after(20*time.Second, at(1)+" ejected")
		k.after(10 * time.Second)
		if next.syncs != 1 || next.connections != 134 {
			t.Errorf("the next observer got %+v", next)
		}
		k.checker.Report(netip.MustParseAddrPort("192.0.2.1:1"), v1.ProtocolTCP, syscall.ECONNREFUSED) // nobody's
		k.after(time.Minute)
	})
}

// TestReportsAndChecks: reports eject an endpoint whose checks succeed, and its checks bring it
// back; a report during the ejection changes nothing.
func TestReportsAndChecks(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{PassiveFailures: 3}, 3, func(k *kit) {
		k.run()
		k.after(time.Minute)
		for range 3 {
			k.connect(k.checker.Observer(nil), errTest, 2, 3)
		}
		k.after(time.Second, at(2)+" ejected") // a half of three, and ties in order of address
	})
}

// Connections of others eject an endpoint only if a check fails then, which comes at once and not with the next
// interval (EHC-21). Without a Probe, one over UDP stays.
func TestDoubtsAreChecked(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{Interval: time.Hour, PassiveFailures: 3}, 3, func(k *kit) {
		k.run()
		k.after(2 * time.Hour)
		k.checks()
		doubt := func(n int) {
			for range n {
				k.checker.Suspect(endpoint(2), v1.ProtocolTCP, errTest)
			}
			time.Sleep(time.Second)
			synctest.Wait()
		}
		for range 5 {
			doubt(2)
			k.checker.Suspect(endpoint(2), v1.ProtocolTCP, nil)
		}
		if n := len(k.checks()[at(2)]); n != 0 {
			t.Errorf("%d checks after successes, want none", n)
		}
		for range 5 {
			doubt(3)
		}
		if n := len(k.checks()[at(2)]); n != 5 {
			t.Errorf("%d checks, want one for each three failures", n)
		}
		k.after(0)
		k.breaks(at(2), errSick)
		doubt(3)
		k.after(0, at(2)+" ejected")
		if s := k.checker.Status(); s.Unusual[0].Reason != "connections: reset; a check: sick" {
			t.Errorf("status %+v", s)
		}
	})
	inBubble(t, endpointhealth.CheckPolicy{}, 3, func(k *kit) {
		k.onlyReports(endpointhealth.CheckPolicy{})
		k.checker.Suspect(endpoint(2), v1.ProtocolUDP, errTest)
		for range 100 {
			k.checker.Suspect(endpoint(2), v1.ProtocolUDP, errTest)
		}
		k.after(time.Minute)
	})
}

// TestReportsDoNotCount: with a negative PassiveFailures, only checks eject.
func TestReportsDoNotCount(t *testing.T) {
	inBubble(t, endpointhealth.CheckPolicy{PassiveFailures: -1}, 3, func(k *kit) {
		k.run()
		k.after(time.Minute)
		for range 100 {
			k.connect(k.checker.Observer(nil), errTest, 2)
		}
		k.after(time.Second)
		k.breaks(at(2), errSick)
		k.after(30*time.Second, at(2)+" ejected")
	})
}

var errTest = errors.New("reset")

// A returning endpoint gets its share in the given number of steps, by multiples of the weights of all others, and
// then all weights are as before (EHC-09).
func TestSlowStart(t *testing.T) {
	policy := endpointhealth.CheckPolicy{SlowStart: 30 * time.Second, EjectFor: time.Second, MaxEjectFor: time.Second}
	inBubble(t, policy, 3, func(k *kit) {
		k.run()
		k.after(time.Minute)
		k.breaks(at(2), errSick)
		k.until(time.Minute, at(2)+" ejected")
		k.breaks(at(2), nil)
		before := k.syncs()
		k.until(time.Minute, at(1)+" weight=4")
		for step, want := range [][]string{
			{at(1) + " weight=4", at(3) + " weight=4"},
			{at(1) + " weight=4", at(2) + " weight=2", at(3) + " weight=4"},
			{at(1) + " weight=4", at(2) + " weight=3", at(3) + " weight=4"},
			nil,
		} {
			if step == 0 {
				k.after(5*time.Second, want...)
				if s := k.checker.Status(); s.Starting != 1 || s.Unusual[0].State != endpointhealth.StateStarting {
					t.Errorf("status %+v", s)
				}
				continue
			}
			k.after(10*time.Second, want...)
		}
		if n := k.syncs() - before; n != 4 {
			t.Errorf("%d syncs, want 4", n)
		}
		k.after(time.Hour)
	})
}

// TestSlowStartOfALateState: a State that is read after the end of a slow start may be older. Its
// weights are not taken for those of slices.
func TestSlowStartOfALateState(t *testing.T) {
	policy := endpointhealth.CheckPolicy{SlowStart: 10 * time.Second, EjectFor: time.Second, MaxEjectFor: time.Second, MaxEjected: 1}
	inBubble(t, policy, 0, func(k *kit) {
		k.weighted(2, 3, 5)
		k.run()
		k.after(time.Minute, k.unusual()...)
		k.breaks(at(1), errSick)
		k.breaks(at(2), errSick)
		k.after(time.Minute, at(1)+" ejected weight=2", at(2)+" ejected weight=3", at(3)+" weight=5")
		k.late = true
		k.breaks(at(1), nil)
		time.Sleep(5 * time.Minute) // its slow start is over, and the State still has the last step's weights
		k.breaks(at(2), nil)
		for k.checker.Status().Starting == 0 {
			time.Sleep(time.Second / 10)
		}
		k.late = false
		k.sync()
		if got := k.unusual(); !slices.Equal(got, []string{at(1) + " weight=8", at(2) + " weight=3", at(3) + " weight=20"}) {
			t.Errorf("%q at the beginning of a slow start", got)
		}
	})
}

// TestSlowStartKeepsWeights: the weights of slices count, before, during and after.
func TestSlowStartKeepsWeights(t *testing.T) {
	policy := endpointhealth.CheckPolicy{SlowStart: 30 * time.Second, SlowStartSteps: 10}
	inBubble(t, policy, 0, func(k *kit) {
		k.weighted(5, 1, 60000)
		k.run()
		plain := []string{at(1) + " weight=5", at(3) + " weight=60000"}
		k.after(time.Minute, plain...)
		k.breaks(at(2), errSick)
		k.after(time.Minute, at(1)+" weight=5", at(2)+" ejected", at(3)+" weight=60000")
		k.breaks(at(2), nil)
		k.after(10*time.Minute, plain...) // 60000 cannot be multiplied
		k.weighted(5, 1, 6000)
		k.breaks(at(1), errSick)
		k.after(time.Minute, at(1)+" ejected weight=5", at(3)+" weight=6000")
		k.breaks(at(1), nil)
		k.until(10*time.Minute, at(3)+" weight=60000")
		if got := k.unusual(); !slices.Equal(got, []string{at(1) + " weight=5", at(2) + " weight=10", at(3) + " weight=60000"}) {
			t.Errorf("%q at the beginning of a slow start", got)
		}
		k.after(time.Hour, at(1)+" weight=5", at(3)+" weight=6000")
	})
}
