package proxier_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// TestStaleSince: failures of whole syncs count, also of a repair; a service port that
// cannot be programmed does not.
func TestStaleSince(t *testing.T) {
	run(t, proxier.Config{Node: changetracker.Node{Name: "here"}}, func(t *testing.T, f *fixture) {
		stale := func() time.Time { return f.Status().Families[v1.IPv4Protocol].StaleSince }
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.synced()
		synctest.Wait()
		if got := stale(); !got.IsZero() {
			t.Errorf("stale since %v after a sync, want zero", got)
		}

		// A repair fails: nothing is pending.
		f.v4.failWith(func(desired.Update) error { return errors.New("no") })
		began := time.Now()
		f.v4.damage(proxier.Damage{Object: "chain"})
		pass(time.Minute)
		if got := stale(); got.Before(began) || got.After(began.Add(5*time.Second)) {
			t.Errorf("stale since %v, want it soon after %v, when the repair failed first", got, began)
		}
		if got := f.Status().Families[v1.IPv6Protocol].StaleSince; !got.IsZero() {
			t.Errorf("IPv6 is stale since %v, want zero", got)
		}
		f.v4.failWith(nil)
		pass(2 * time.Minute)
		if got := stale(); !got.IsZero() {
			t.Errorf("stale since %v after the repair, want zero", got)
		}

		// One service port fails repeatedly.
		f.v4.failWith(func(u desired.Update) error {
			for s := range u.Services() {
				if s.Name.Name == "b" {
					return someError{{Name: s.Name, Err: errors.New("no")}}
				}
			}
			return nil
		})
		f.OnServiceAdd(service("b", "10.0.0.2"))
		pass(time.Hour)
		s := f.Status().Families[v1.IPv4Protocol]
		if !s.StaleSince.IsZero() || !s.PendingSince.IsZero() || len(s.Failed) != 1 || s.Failed[0].Since.IsZero() {
			t.Errorf("stale since %v, pending since %v, failed %v, want zero, zero, and one", s.StaleSince, s.PendingSince, s.Failed)
		}

		// A sync hangs.
		f.v4.failWith(func(desired.Update) error { time.Sleep(time.Hour); return nil })
		began = time.Now()
		f.OnServiceAdd(service("c", "10.0.0.3"))
		pass(30 * time.Minute)
		if got := stale(); got.Before(began.Add(-time.Minute)) || got.After(began.Add(5*time.Minute)) {
			t.Errorf("stale since %v, want it about %v, when the sync began", got, began)
		}
		f.v4.failWith(nil)
		pass(2 * time.Hour)
		if got := stale(); !got.IsZero() {
			t.Errorf("stale since %v in the end, want zero", got)
		}
	})
}
