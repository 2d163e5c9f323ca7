package proxier_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

var tableGone = proxier.Damage{Object: "all of table ip t", By: "nft (process 7)"}

func fullUpdates(e *fakeEngine) (n int) {
	for _, u := range e.updates() {
		if u.Full {
			n++
		}
	}
	return n
}

// TestDamageLeadsToAFullSyncOfItsFamily and not of the other one.
func TestDamageLeadsToAFullSyncOfItsFamily(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		f.synced()
		synctest.Wait()
		f.v4.damage(tableGone)
		time.Sleep(time.Second)
		if got, want := fullUpdates(f.v4), 2; got != want {
			t.Errorf("%d full syncs of IPv4, want %d", got, want)
		}
		if got, want := fullUpdates(f.v6), 1; got != want {
			t.Errorf("%d full syncs of IPv6, want %d", got, want)
		}
		status := f.Status()
		if s := status.Families[v1.IPv4Protocol]; s.Damaged != 1 || s.LastDamage != tableGone || s.LastDamageTime.IsZero() {
			t.Errorf("status %+v, want one damage", s)
		}
		f.v4.damage(proxier.Damage{})
		time.Sleep(time.Second)
		if got, want := fullUpdates(f.v4), 3; got != want {
			t.Errorf("%d full syncs of IPv4 after possible damage, want %d", got, want)
		}
		if s := f.Status().Families[v1.IPv4Protocol]; s.Damaged != 1 {
			t.Errorf("%d damages, want 1: possible damage does not count", s.Damaged)
		}
	})
}

// TestChangesGoOnWhileARepairWaits: changes are programmed while a repair is postponed. If
// the engine fails, they wait for the repair, and Sync returns ErrContested.
func TestChangesGoOnWhileARepairWaits(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		f.synced()
		synctest.Wait()
		for range 6 { // the 7th waits until 8s after the 6th
			f.v4.damage(tableGone)
			time.Sleep(5 * time.Second)
		}
		f.v4.damage(tableGone)
		time.Sleep(500 * time.Millisecond)
		repairs := fullUpdates(f.v4)

		f.OnServiceAdd(service("a", "10.96.0.1"))
		time.Sleep(500 * time.Millisecond)
		if last := f.v4.last(); last.Full || namesIn(last) != "a" {
			t.Errorf("last update %+v, want a partial one with the change", last)
		}
		missing := errors.New("no such table")
		f.v4.failWith(func(u desired.Update) error {
			if u.Full {
				return nil
			}
			return missing
		})
		f.OnServiceAdd(service("b", "10.96.0.2"))
		time.Sleep(500 * time.Millisecond)
		if err := f.Sync(t.Context()); !errors.Is(err, proxier.ErrContested) {
			t.Errorf("Sync = %v, want ErrContested", err)
		}
		if got := fullUpdates(f.v4); got != repairs {
			t.Errorf("%d full syncs, want none before the repair is due", got-repairs)
		}
		if s := f.Status(); len(s.Conditions) != 1 || s.Conditions[0].Type != proxier.ConditionContested {
			t.Errorf("conditions %+v, want contested", s.Conditions)
		}
		time.Sleep(10 * time.Second)
		if last := f.v4.last(); !last.Full || namesIn(last) != "a b" {
			t.Errorf("last update full=%v of %q, want a full one of both", last.Full, namesIn(last))
		}
		if s := f.Status(); s.Families[v1.IPv4Protocol].ServicePorts != 2 {
			t.Errorf("%d service ports, want 2", s.Families[v1.IPv4Protocol].ServicePorts)
		}
	})
}

// TestDamageDuringEachRepairIsRepairedInTheEnd without any other event.
func TestDamageDuringEachRepairIsRepairedInTheEnd(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		f.synced()
		synctest.Wait()
		var repairs atomic.Int64
		f.v4.failWith(func(u desired.Update) error {
			if u.Full && repairs.Add(1) < 6 {
				f.v4.damage(tableGone)
			}
			return nil
		})
		f.v4.damage(tableGone)
		time.Sleep(time.Minute)
		if n := repairs.Load(); n != 6 {
			t.Errorf("%d repairs in a minute, want one for each damage: 6", n)
		}
	})
}

// TestAWatchThatFailsIsStartedAgain with growing pauses, and Status reports it.
func TestAWatchThatFailsIsStartedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		e := &fakeEngine{watchErr: errors.New("no socket")}
		p := newProxier(t, proxier.Deps{}, e)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- p.Run(ctx) }()
		time.Sleep(time.Minute)
		e.mu.Lock()
		watches := e.watches
		e.watchErr = nil
		e.mu.Unlock()
		if watches < 5 || watches > 7 { // after 1s, 2s, 4s, 8s, 16s, 32s
			t.Errorf("%d attempts in a minute, want 5 to 7", watches)
		}
		c := p.Status().Conditions
		if len(c) != 1 || c[0].Type != proxier.ConditionUnwatched || c[0].Message != "no socket" || !c[0].Since.Equal(now) {
			t.Errorf("conditions %+v, want unwatched since the beginning, with the reason", c)
		}
		time.Sleep(2 * time.Minute)
		if c := p.Status().Conditions; len(c) != 0 {
			t.Errorf("conditions %+v after the watch works, want none", c)
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v", err)
		}
	})
}

// TestDamageOfOneServicePortIsItsOwn: after damage of one service port only that one is
// programmed again, also if the first attempt fails.
func TestDamageOfOneServicePortIsItsOwn(t *testing.T) {
	run(t, withoutRetries(), func(t *testing.T, f *fixture) {
		f.synced()
		for i, name := range []string{"a", "b", "c"} {
			f.OnServiceAdd(service(name, fmt.Sprintf("10.0.0.%d", i+1)))
		}
		pass(time.Second)
		b := f.v4.last().Now
		bad, _ := b.Owner(desired.Key{VIP: netip.MustParseAddr("10.0.0.2"), Protocol: desired.TCP, Port: 80})
		before := len(f.v4.updates())
		f.v4.become(func(u desired.Update) (result proxier.Result, err error) {
			if len(f.v4.updates()) == before+1 {
				result.Failed = []*proxier.ServiceError{{Name: bad, Err: errors.New("no room")}}
			}
			return result, nil
		})
		for range 2 { // both are repaired at once
			f.v4.damage(proxier.Damage{Object: "group 7", Service: bad})
		}
		time.Sleep(time.Second)
		_ = f.Sync(t.Context())
		updates := f.v4.updates()[before:]
		for i, u := range updates {
			if u.Full || i < 2 && (len(u.Changes) != 1 || u.Changes[0].Name != bad || u.Changes[0].After == nil || u.Changes[0].Source != nil) {
				t.Errorf("update %d: full %t, %+v, want %v alone, as it is", i, u.Full, u.Changes, bad)
			}
		}
		if status := f.Status().Families[v1.IPv4Protocol]; len(updates) < 2 || len(updates[len(updates)-1].Changes) > 1 || len(status.Failed) > 0 {
			t.Errorf("%d updates, %v failed in the end, want two and none", len(updates), status.Failed)
		}
	})
}
