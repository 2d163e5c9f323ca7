package proxier_test

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// dice generate random trees of errors.
type dice struct{ *rand.Rand }

// tree wraps and joins leaves, some of them nil or repeated.
func (r dice) tree(leaves []error) error {
	for range r.IntN(3) {
		leaves = append(leaves, nil)
	}
	if len(leaves) > 0 && r.IntN(2) == 0 {
		leaves = append(leaves, leaves[r.IntN(len(leaves))])
	}
	r.Shuffle(len(leaves), func(i, j int) { leaves[i], leaves[j] = leaves[j], leaves[i] })
	for len(leaves) > 1 {
		n := 1 + r.IntN(len(leaves))
		leaves = append(leaves[n:], r.node(leaves[:n]))
	}
	if len(leaves) == 0 {
		return nil
	}
	return r.wrapped(leaves[0])
}

func (r dice) node(children []error) error {
	err := errors.Join(children...)
	if len(children) == 2 && children[0] != nil && children[1] != nil && r.IntN(2) == 0 {
		err = fmt.Errorf("%w, and %w", children[0], children[1])
	}
	return r.wrapped(err)
}

func (r dice) wrapped(err error) error {
	for err != nil && r.IntN(2) == 0 {
		err = fmt.Errorf("wrapped: %w", err)
	}
	return err
}

// total returns an error of the whole Update, which may look like one of a service port.
func (r dice) total(u *desired.Update) error {
	one := &proxier.ServiceError{Err: errors.New("of one service port")}
	if len(u.Changes) > 0 {
		one.Name = u.Changes[0].Name
	}
	return []error{errors.New("socket died"), fmt.Errorf("nothing wrapped: %w", error(nil)), one, someError{one}, emptyJoinError{}}[r.IntN(5)]
}

// emptyJoinError joins nothing.
type emptyJoinError struct{}

func (emptyJoinError) Error() string   { return "joins nothing" }
func (emptyJoinError) Unwrap() []error { return nil }

// TestNothingCountsAsProgrammedThatIsNot compares the status of the Proxier to what its
// engine has programmed, whatever failed and however the engine reports it.
func TestNothingCountsAsProgrammedThatIsNot(t *testing.T) {
	for seed := range uint64(300) {
		r := dice{rand.New(rand.NewPCG(seed, 0))}
		run(t, withoutRetries(), func(t *testing.T, f *fixture) {
			has := map[string]uint16{} // what the engine has, by Service
			f.v4.become(func(u desired.Update) (proxier.Result, error) { return r.apply(&u, has) })
			f.synced()
			synctest.Wait() // the engine has dice of ours
			names, ports := []string{"a", "b", "c", "d"}, map[string]uint16{}
			for range 6 {
				for i, name := range names {
					if ports[name] == 0 || r.IntN(2) == 0 {
						ports[name]++
						f.Tracker().Services.Update(nil, service(name, fmt.Sprintf("10.0.0.%d", i+1), portIs(ports[name])))
					}
				}
				err := f.Sync(t.Context())
				synctest.Wait()
				for _, name := range names {
					if has[name] != ports[name] && f.countsAsProgrammed(name, ports[name]) {
						t.Errorf("seed %d: %s counts as programmed after %q", seed, name, err)
					}
				}
			}
			f.v4.become(func(u desired.Update) (proxier.Result, error) {
				record(&u, has, nil)
				return proxier.Result{}, nil
			})
			if err := f.Sync(t.Context()); err != nil {
				t.Fatalf("seed %d: Sync = %v, want nil when nothing fails", seed, err)
			}
			for _, name := range names {
				if has[name] != ports[name] {
					t.Errorf("seed %d: the engine has port %d of %s in the end, want %d", seed, has[name], name, ports[name])
				}
			}
		})
	}
}

// apply fails for some service ports or for all, and reports that in a random way.
func (r dice) apply(u *desired.Update, has map[string]uint16) (proxier.Result, error) {
	var result proxier.Result
	failed := map[string]bool{}
	for s := range u.Services() {
		if r.IntN(3) == 0 {
			failed[s.Name.Name] = true
			for range 1 + r.IntN(2) {
				one := &proxier.ServiceError{Name: s.Name, Err: r.tree([]error{errors.New("refused")}), Partial: r.IntN(2) == 0}
				result.Failed = append(result.Failed, one, nil)
			}
		}
	}
	if r.IntN(4) == 0 { // a service port that does not exist
		result.Failed = append(result.Failed, &proxier.ServiceError{Name: nameOf("unknown")})
	}
	r.Shuffle(len(result.Failed), func(i, j int) {
		result.Failed[i], result.Failed[j] = result.Failed[j], result.Failed[i]
	})
	if r.IntN(3) == 0 {
		return result, r.tree([]error{r.total(u)})
	}
	record(u, has, failed)
	return result, nil
}

// record programs the service ports that did not fail.
func record(u *desired.Update, has map[string]uint16, failed map[string]bool) {
	for s := range u.Services() {
		if !failed[s.Name.Name] {
			has[s.Name.Name] = s.Port.Port
		}
	}
}

// countsAsProgrammed reports whether the Proxier presents a Service's port as programmed.
func (f *fixture) countsAsProgrammed(name string, port uint16) bool {
	key := serviceName(name)
	status := f.Status().Families[v1.IPv4Protocol]
	failed := slices.ContainsFunc(status.Failed, func(e *proxier.ServiceError) bool { return e.Name == key })
	if !slices.IsSortedFunc(status.Failed, func(a, b *proxier.ServiceError) int { return cmp.Or(a.Name.Compare(b.Name), -1) }) {
		return true
	}
	if state := f.Programmed(v1.IPv4Protocol); state != nil && !failed {
		if s, ok := state.Service(key); ok && s.Port == port {
			return true
		}
	}
	return !failed && (status.PendingSince.IsZero() || status.LastError == nil)
}

// TestAnErrorIsATotalFailure: it names the family, without the layers of the program. Service ports
// that failed are listed.
func TestAnErrorIsATotalFailure(t *testing.T) {
	died := errors.New("socket died")
	for name, c := range map[string]struct {
		services []string
		total    error
		want     string
		failed   string
	}{
		"one":         {[]string{"a"}, nil, "", "[service port test/a:web (TCP): refused]"},
		"two":         {[]string{"a", "b"}, nil, "", "[service port test/a:web (TCP): refused service port test/b:web (TCP): refused]"},
		"one and all": {[]string{"a"}, died, "IPv4: socket died", "[]"},
		"all":         {nil, died, "IPv4: socket died", "[]"},
		"nothing":     {nil, nil, "", "[]"},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, withoutRetries(), func(t *testing.T, f *fixture) {
				f.synced()
				synctest.Wait()
				f.v4.become(func(u desired.Update) (result proxier.Result, err error) {
					for s := range u.Services() {
						result.Failed = append(result.Failed, &proxier.ServiceError{Name: s.Name, Err: errors.New("refused")})
					}
					return result, c.total
				})
				for i, name := range c.services {
					f.Tracker().Services.Update(nil, service(name, fmt.Sprintf("10.0.0.%d", i+1)))
				}
				err := f.Sync(t.Context())
				status := f.Status().Families[v1.IPv4Protocol]
				reports := f.History()
				if got := fmt.Sprint(status.Failed); got != c.failed {
					t.Errorf("Failed = %s, want %s", got, c.failed)
				}
				if r := reports[slices.IndexFunc(reports, func(r proxier.SyncReport) bool {
					return r.Started.Equal(status.LastAttempt) && r.Family == v1.IPv4Protocol && !r.Full
				})]; fmt.Sprint(r.Failures) != c.failed || textOf(r.Err) != c.want {
					t.Errorf("the history has %v and %v, want %s and %q", r.Failures, r.Err, c.failed, c.want)
				}
				for what, err := range map[string]error{"Sync": err, "LastError": status.LastError} {
					if text := textOf(err); text != c.want {
						t.Errorf("%s = %q, want %q", what, text, c.want)
					}
				}
			})
		})
	}
}

func textOf(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func portIs(port uint16) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.Ports[0].Port = int32(port) }
}

// TestAFailedServicePortThatIsAsBefore: a Service changes, fails, and changes back. It is
// retried although the tracker has no change, and other Services keep their VIPs.
func TestAFailedServicePortThatIsAsBefore(t *testing.T) {
	run(t, withoutRetries(), func(t *testing.T, f *fixture) {
		sync := func(set ...*v1.Service) error {
			for _, s := range set {
				f.Tracker().Services.Update(nil, s)
			}
			return f.Sync(t.Context())
		}
		f.synced()
		if err := sync(service("a", "10.0.0.1"), service("b", "10.0.0.2")); err != nil {
			t.Fatal(err)
		}
		f.v4.failWith(func(u desired.Update) error { return someError{{Name: u.Changes[0].Name, Err: errors.New("refused")}} })
		if err := sync(service("a", "10.0.0.1", proxiertest.ExternalIPs("198.51.100.1"))); err != nil || len(f.Status().Families[v1.IPv4Protocol].Failed) != 1 {
			t.Fatalf("Sync = %v, Failed = %v, want nil and one", err, f.Status().Families[v1.IPv4Protocol].Failed)
		}
		f.v4.failWith(nil)
		if err := sync(service("a", "10.0.0.1"), service("b", "10.0.0.2", proxiertest.ExternalIPs("198.51.100.1"))); err != nil {
			t.Fatal(err)
		}
		if got, want := namesIn(f.v4.last()), "a b"; got != want {
			t.Errorf("the Update has %q, want %q", got, want)
		}
		if problems := f.Status().Problems; len(problems) != 0 {
			t.Errorf("Problems = %v, want none: only b asks for the address", problems)
		}
	})
}
