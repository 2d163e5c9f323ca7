package proxier_test

import (
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

// Damage leads to a full sync of its family and not of the other one.
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
		f.v4.failWith(func(u desired.Update) error {
			if u.Full {
				time.Sleep(2 * time.Second)
			}
			return nil
		})
		for range 3 { // the 4th waits until 18s after the end of the 3rd
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
		time.Sleep(20 * time.Second)
		if last := f.v4.last(); !last.Full || namesIn(last) != "a b" {
			t.Errorf("last update full=%v of %q, want a full one of both", last.Full, namesIn(last))
		}
		if s := f.Status(); s.Families[v1.IPv4Protocol].ServicePorts != 2 {
			t.Errorf("%d service ports, want 2", s.Families[v1.IPv4Protocol].ServicePorts)
		}
	})
}

// Damage during each repair is repaired in the end, without any other event.
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

// A watch that fails is started again with growing pauses, unless the engine cannot watch. Status reports it as
// long as it does not work.
func TestAWatchThatFails(t *testing.T) {
	for name, c := range map[string]struct {
		err   error
		calls int // within a minute
		works bool
	}{
		"works later":  {errors.New("no socket"), 6, true}, // after 0, 1, 3, 7, 15 and 31 seconds
		"not possible": {fmt.Errorf("watch: %w", errors.ErrUnsupported), 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, began := newFixture(t, proxier.Config{}, proxier.Deps{}), time.Now()
				f.v4.watchErr = c.err
				f.run(t, func(t *testing.T, f *fixture) {
					pass(time.Minute)
					got := f.Status().Conditions
					if len(got) != 1 || got[0].Type != proxier.ConditionUnwatched || got[0].Message != c.err.Error() || !got[0].Since.Equal(began) {
						t.Errorf("conditions %+v, want unwatched since the start, with the reason", got)
					}
					f.v4.mu.Lock()
					calls := f.v4.watches
					f.v4.watchErr = nil
					f.v4.mu.Unlock()
					if calls != c.calls {
						t.Errorf("Watch was called %d times in a minute, want %d", calls, c.calls)
					}
					pass(2 * time.Minute)
					if got := f.Status().Conditions; (len(got) == 0) != c.works {
						t.Errorf("conditions %+v two minutes later, want none: %t", got, c.works)
					}
				})
			})
		})
	}
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
			if u.Full || i < 2 && (len(u.Changes) != 1 || u.Changes[0].Name != bad || u.Changes[0].After == nil || i == 0 && u.Changes[0].Source != nil) {
				t.Errorf("update %d: full %t, %+v, want %v alone, as it is", i, u.Full, u.Changes, bad)
			}
		}
		if status := f.Status().Families[v1.IPv4Protocol]; len(updates) < 2 || len(updates[len(updates)-1].Changes) > 1 || len(status.Failed) > 0 {
			t.Errorf("%d updates, %v failed in the end, want two and none", len(updates), status.Failed)
		}
	})
}

// Damage during a repair is repaired without another event, whether the engine knows what was changed or not.
func TestDamageDuringARepairIsRepaired(t *testing.T) {
	for _, d := range []proxier.Damage{{}, {Object: "chain"}} {
		run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
			f.OnServiceAdd(service("a", "10.0.0.1"))
			f.synced()
			pass(time.Second)
			before := len(f.v4.updates())
			f.v4.become(func(desired.Update) (proxier.Result, error) {
				f.v4.become(nil)
				f.v4.damage(d)
				return proxier.Result{}, nil
			})
			f.v4.damage(d)
			pass(time.Second)
			updates, s := f.v4.updates()[before:], f.Status().Families[v1.IPv4Protocol]
			if len(updates) < 2 || !updates[1].Full || s.Repairing {
				t.Errorf("damage %v: %d Updates, repairing %t; want a second full one after the damage", d, len(updates), s.Repairing)
			}
		})
	}
}
