package proxier_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

// verifying is an engine that reports what verify returns.
type verifying struct {
	*fakeEngine

	busy   chan struct{} // if not nil, Verify waits for it
	verify func(desired.Update) (proxier.Verification, error)
}

func (e *verifying) Abilities() proxier.Abilities {
	can := e.fakeEngine.Abilities()
	can.Verify = e.Verify
	return can
}

func (e *verifying) Verify(ctx context.Context, u desired.Update) (proxier.Verification, error) {
	if e.busy != nil {
		select {
		case <-e.busy:
		case <-ctx.Done():
			return proxier.Verification{}, ctx.Err()
		}
	}
	return e.verify(u)
}

// verifyIn runs a Proxier whose IPv4 engine verifies.
func verifyIn(t *testing.T, test func(t *testing.T, f *fixture, e *verifying)) {
	t.Helper()
	e := &verifying{verify: func(desired.Update) (proxier.Verification, error) { return proxier.Verification{}, nil }}
	deps := proxier.Deps{Wrap: func(family v1.IPFamily, engine proxier.Engine) (proxier.Engine, error) {
		if family == v1.IPv6Protocol {
			return engine, nil
		}
		e.fakeEngine, _ = engine.(*fakeEngine)
		return e, nil
	}}
	runWith(t, withoutRetries(), deps, func(t *testing.T, f *fixture) { test(t, f, e) })
}

func mustVerify(t *testing.T, f *fixture) map[v1.IPFamily]proxier.Verification {
	t.Helper()
	results, err := f.Verify(t.Context())
	if err != nil {
		t.Fatalf("Verify: %v", err)
	}
	return results
}

// TestVerifyComparesWhatIsProgrammed: the update has all programmed Services, not those of a
// sync that failed.
func TestVerifyComparesWhatIsProgrammed(t *testing.T) {
	verifyIn(t, func(t *testing.T, f *fixture, e *verifying) {
		var seen desired.Update
		e.verify = func(u desired.Update) (proxier.Verification, error) {
			seen = u
			return proxier.Verification{Checked: 3}, nil
		}
		if err := mustVerify(t, f)[v1.IPv4Protocol].Err; !errors.Is(err, proxier.ErrNotProgrammed) {
			t.Errorf("before the first sync: %v, want ErrNotProgrammed", err)
		}
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.OnServiceAdd(service("b", "10.0.0.2"))
		f.synced()
		pass(time.Second)
		f.OnServiceUpdate(service("b", "10.0.0.2"), service("b", "10.0.0.3"))
		pass(time.Second)
		f.v4.failWith(func(desired.Update) error { return errors.New("refused") })
		f.OnServiceAdd(service("c", "10.0.0.4"))
		pass(time.Second)
		results := mustVerify(t, f)
		if got := namesIn(seen); got != "a b" || !seen.Full || seen.Family != v1.IPv4Protocol {
			t.Errorf("verified %q, full %t, family %s, want all of the programmed Services", got, seen.Full, seen.Family)
		}
		if got := seen.Changes[1].After.Frontends[0].VIP.String(); got != "10.0.0.3" {
			t.Errorf("verified VIP %s, want the programmed one", got)
		}
		v4, v6 := results[v1.IPv4Protocol], results[v1.IPv6Protocol]
		if !v4.Agrees() || v4.Checked != 3 {
			t.Errorf("IPv4: %+v, want 3 objects that agree", v4)
		}
		if !errors.Is(v6.Err, errors.ErrUnsupported) || v6.Agrees() {
			t.Errorf("IPv6: %v, want ErrUnsupported", v6.Err)
		}
	})
}

// Verify lists the first differences, sorted, and says how many there are.
func TestVerifyListsTheFirstDifferences(t *testing.T) {
	verifyIn(t, func(t *testing.T, f *fixture, e *verifying) {
		f.synced()
		pass(time.Second)
		e.verify = func(desired.Update) (r proxier.Verification, err error) {
			for n := range proxier.MaxDifferences + 7 {
				r.Differences = append(r.Differences, proxier.Difference{Object: fmt.Sprintf("element %05d", 9999-n), Problem: proxier.DifferenceMissing, Want: "x"})
			}
			return r, nil
		}
		got := mustVerify(t, f)[v1.IPv4Protocol]
		if got.Total != proxier.MaxDifferences+7 || len(got.Differences) != proxier.MaxDifferences || got.Agrees() {
			t.Errorf("%d of %d differences, agrees: %t", len(got.Differences), got.Total, got.Agrees())
		}
		if !slices.IsSortedFunc(got.Differences, func(a, b proxier.Difference) int { return slices.Compare([]byte(a.Object), []byte(b.Object)) }) {
			t.Error("the differences are not sorted")
		}
		if text := got.Differences[0].String(); text != "element 08993: missing: want x" {
			t.Errorf("the first is %q", text)
		}
	})
}

// TestVerifyGivesWayToSyncs: none runs beside the other. Syncs go first, until three have; then they
// wait for Verify, which so comes to an end though events never pause. Both end with their contexts.
func TestVerifyGivesWayToSyncs(t *testing.T) {
	verifyIn(t, func(t *testing.T, f *fixture, e *verifying) {
		f.synced()
		pass(time.Second)
		e.busy = make(chan struct{})
		verified := make(chan error, 1)
		go func() { _, err := f.Verify(t.Context()); verified <- err }()
		synctest.Wait()
		const first = 3
		before := len(f.v4.updates())
		for i := range first + 2 {
			f.OnServiceAdd(service(fmt.Sprint("s", i), fmt.Sprint("10.0.0.", i+1)))
			pass(time.Second)
			if got, want := len(f.v4.updates())-before, min(i+1, first); got != want {
				t.Errorf("%d syncs after %d events during Verify, want %d", got, i+1, want)
			}
		}
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := f.Verify(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a second Verify: %v, want that its context ended", err)
		}
		close(e.busy)
		pass(time.Second)
		if err := <-verified; err != nil || len(f.v4.updates()) <= before+first {
			t.Errorf("Verify = %v, and %d syncs, want more than %d", err, len(f.v4.updates())-before, first)
		}
		mustVerify(t, f)
	})
}

// TestVerifyEndsWithRun: the engine is not used after its Close.
func TestVerifyEndsWithRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, withoutRetries(), proxier.Deps{Wrap: func(_ v1.IPFamily, engine proxier.Engine) (proxier.Engine, error) {
			inner, _ := engine.(*fakeEngine)
			return &verifying{fakeEngine: inner, busy: make(chan struct{})}, nil
		}})
		ended := make(chan error, 1)
		f.run(t, func(t *testing.T, f *fixture) {
			f.synced()
			pass(time.Second)
			go func() { _, err := f.Verify(t.Context()); ended <- err }()
			synctest.Wait()
		})
		if err := <-ended; !errors.Is(err, runner.ErrEnded) {
			t.Errorf("Verify during the end of Run = %v, want ErrEnded", err)
		}
		if _, err := f.Verify(t.Context()); !errors.Is(err, runner.ErrEnded) {
			t.Errorf("Verify after Run = %v, want ErrEnded", err)
		}
	})
}

// TestRunEndsWhileASyncWaitsForVerify: the sync gives up waiting, and then the end of Run waits.
func TestRunEndsWhileASyncWaitsForVerify(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended, end := make(chan error, 1), make(chan struct{})
		f := newFixture(t, withoutRetries(), proxier.Deps{Wrap: func(_ v1.IPFamily, engine proxier.Engine) (proxier.Engine, error) {
			inner, _ := engine.(*fakeEngine)
			return &verifying{fakeEngine: inner, verify: func(desired.Update) (proxier.Verification, error) {
				<-end // whatever its context says
				return proxier.Verification{}, nil
			}}, nil
		}})
		f.run(t, func(t *testing.T, f *fixture) {
			f.synced()
			pass(time.Second)
			go func() { _, err := f.Verify(t.Context()); ended <- err }()
			synctest.Wait()
			f.OnServiceAdd(service("a", "10.0.0.1"))
			pass(time.Second)
			time.AfterFunc(time.Minute, func() { close(end) })
		})
		if err := <-ended; !errors.Is(err, runner.ErrEnded) {
			t.Errorf("Verify = %v, want ErrEnded", err)
		}
	})
}
