package hybrid

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// journal is an engine that records its Updates in a list that it shares with others.
type journal struct {
	name    string
	entries *[]string
	fail    error
	limited []*proxier.ServiceError
	has     map[string]bool
	traits  desired.Traits
}

func (j *journal) Apply(_ context.Context, u desired.Update) (proxier.Result, error) {
	if u.Full {
		clear(j.has)
	}
	var names []string
	for s := range u.Services() {
		names = append(names, "+"+s.Name.Name)
		j.has[s.Name.Name] = true
	}
	for name := range u.Removed() {
		names = append(names, "-"+name.Name)
		delete(j.has, name.Name)
	}
	*j.entries = append(*j.entries, fmt.Sprintf("%s full=%v %s", j.name, u.Full, strings.Join(names, " ")))
	if refused, ok := errors.AsType[*proxier.ServiceError](j.fail); ok {
		return proxier.Result{Failed: []*proxier.ServiceError{refused}, Limited: j.limited}, nil
	}
	return proxier.Result{Limited: j.limited}, j.fail
}

func (j *journal) Close() error                           { return nil }
func (j *journal) Traits(*desired.Service) desired.Traits { return j.traits }
func (j *journal) Abilities() proxier.Abilities           { return proxier.Abilities{} }

func (j *journal) Cleanup(context.Context) error { clear(j.has); return j.fail }

func pair(t *testing.T, choice map[string]string) (h *engine, a, b *journal, entries *[]string) {
	t.Helper()
	entries = &[]string{}
	a = &journal{name: "a", entries: entries, has: map[string]bool{}}
	b = &journal{name: "b", entries: entries, has: map[string]bool{}}
	made, err := New(func(s *desired.Service, _ desired.Kind) string { return choice[s.Name.Name] }, Member{"a", a}, Member{"b", b})
	if err != nil {
		t.Fatal(err)
	}
	return made.(*engine), a, b, entries
}

func desiredOf(names ...string) []*desired.Service {
	var services []*desired.Service
	for _, name := range names {
		services = append(services, &desired.Service{Name: nameOf(name)})
	}
	return services
}

func nameOf(name string) changetracker.ServicePortName {
	var n changetracker.ServicePortName
	n.Name = name
	return n
}

// What any member limits is limited.
func TestWhatMembersLimitIsLimited(t *testing.T) {
	h, a, b, _ := pair(t, map[string]string{"x": "a", "y": "b"})
	a.limited = []*proxier.ServiceError{{Name: nameOf("x"), Err: errors.New("too many")}}
	b.limited = []*proxier.ServiceError{{Name: nameOf("y"), Err: errors.New("no room")}}
	result, err := h.Apply(t.Context(), desired.Update{Full: true, Changes: desired.ChangesTo(desiredOf("x", "y")...)})
	if err != nil || len(result.Limited) != 2 {
		t.Errorf("Apply = %+v, %v, want what both limit", result, err)
	}
}

// TestAServicePortIsMadeBeforeItIsBroken: the new member programs it before the old one
// removes it, in partial and in full updates, in both directions at once.
// TestClientLimitsNeedEachMemberThatHasSome: a service port has its client limit if all members that have its external addresses
// can limit clients, whoever has the ClusterIP.
func TestClientLimitsNeedEachMemberThatHasSome(t *testing.T) {
	port := &changetracker.ServicePort{ClientLimit: changetracker.ClientLimit{PerSecond: 1}}
	for _, c := range []struct {
		kinds []desired.Kind
		want  bool
	}{
		{[]desired.Kind{desired.ClusterIP, desired.ExternalIP}, true},
		{[]desired.Kind{desired.ClusterIP, desired.ExternalIP, desired.LoadBalancer}, false},
		{[]desired.Kind{desired.LoadBalancer, desired.ExternalIP}, false},
		{[]desired.Kind{desired.ClusterIP}, false},
	} {
		able, unable := &journal{traits: desired.Traits{ClientLimits: true}}, &journal{}
		h, err := New(func(_ *desired.Service, kind desired.Kind) string {
			return map[desired.Kind]string{desired.ExternalIP: "able"}[kind]
		}, Member{"unable", unable}, Member{"able", able})
		if err != nil {
			t.Fatal(err)
		}
		s := &desired.Service{Port: port}
		for _, kind := range c.kinds {
			s.Frontends = append(s.Frontends, desired.Frontend{Kind: kind})
		}
		if got := h.Traits(s).ClientLimits; got != c.want {
			t.Errorf("frontends %v: client limits %v, want %v", c.kinds, got, c.want)
		}
	}
}

func TestAServicePortIsMadeBeforeItIsBroken(t *testing.T) {
	for _, full := range []bool{false, true} {
		choice := map[string]string{"x": "a", "y": "b"}
		h, a, b, entries := pair(t, choice)
		if _, err := h.Apply(t.Context(), desired.Update{Full: true, Changes: desired.ChangesTo(desiredOf("x", "y", "z")...)}); err != nil {
			t.Fatal(err)
		}
		if !a.has["x"] || !a.has["z"] || !b.has["y"] || len(a.has) != 2 || len(b.has) != 1 {
			t.Fatalf("a has %v, b has %v, want x and z, and y", a.has, b.has)
		}
		*entries = nil
		choice["x"], choice["y"] = "b", "a"
		if _, err := h.Apply(t.Context(), desired.Update{Full: full, Changes: desired.ChangesTo(desiredOf("x", "y", "z")...)}); err != nil {
			t.Fatal(err)
		}
		removed := slices.IndexFunc(*entries, func(e string) bool { return strings.Contains(e, "-") })
		added := slices.IndexFunc(*entries, func(e string) bool { return strings.HasPrefix(e, "b") && strings.Contains(e, "+x") })
		if added < 0 || removed < added || !strings.Contains((*entries)[removed], "full=false") {
			t.Errorf("full %v: %q, want x added before anything is removed", full, *entries)
		}
		if full && !strings.Contains((*entries)[0], "+x") {
			t.Errorf("%q, want a to keep x while b adds it", *entries)
		}
		if a.has["x"] || !a.has["y"] || !b.has["x"] || b.has["y"] {
			t.Errorf("full %v: a has %v, b has %v, want y and z, and x", full, a.has, b.has)
		}
	}
}

func TestARefusedServicePortStaysWhereItIs(t *testing.T) {
	choice := map[string]string{}
	h, a, b, _ := pair(t, choice)
	if _, err := h.Apply(t.Context(), desired.Update{Full: true, Changes: desired.ChangesTo(desiredOf("x")...)}); err != nil {
		t.Fatal(err)
	}
	choice["x"] = "b"
	b.fail = &proxier.ServiceError{Name: nameOf("x"), Err: errors.New("no")}
	result, err := h.Apply(t.Context(), desired.Update{Changes: desired.ChangesTo(desiredOf("x")...)})
	if err != nil || len(result.Failed) != 1 || result.Failed[0].Name != nameOf("x") {
		t.Errorf("Apply = %v, %v, want x in Failed", result, err)
	}
	if !a.has["x"] {
		t.Error("the old member has removed x, want it kept")
	}
	b.fail = nil
	if _, err := h.Apply(t.Context(), desired.Update{Changes: desired.ChangesTo(desiredOf("x")...)}); err != nil || a.has["x"] || !b.has["x"] {
		t.Errorf("Apply = %v, a has %v, b has %v, want x with b", err, a.has, b.has)
	}
	if _, err := h.Apply(t.Context(), desired.Update{Changes: []desired.Change{{Name: nameOf("x")}}}); err != nil || b.has["x"] {
		t.Errorf("Apply = %v, b has %v, want nothing", err, b.has)
	}
	b.fail = errors.New("broken")
	if err := h.Cleanup(t.Context()); !errors.Is(err, b.fail) {
		t.Errorf("Cleanup = %v, want %v", err, b.fail)
	}
}

// Under the driver, a Service moves to another member when the embedder's payload changes.
func TestUnderTheDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := &able{}, &able{}
		h, err := New(func(s *desired.Service, _ desired.Kind) string {
			name, _ := changetracker.Ext[string](s.Port.Ext)
			return name
		}, Member{"first", first}, Member{"second", second})
		if err != nil {
			t.Fatal(err)
		}
		config := proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}, Tracker: changetracker.ObjectOptions{
			DecorateService: func(p *changetracker.ServicePort, s *v1.Service) { p.Ext = s.Annotations["engine"] },
		}}
		p, err := proxier.New(config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: h})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- p.Run(ctx) }()
		a := proxiertest.Service("test", "a", proxiertest.ClusterIPs("10.0.0.1"), proxiertest.Port("web", v1.ProtocolTCP, 80))
		p.OnServiceAdd(a)
		p.OnEndpointSliceAdd(proxiertest.Slice("test", "a", discovery.AddressTypeIPv4, proxiertest.SlicePort("web", v1.ProtocolTCP, 80), proxiertest.Endpoint("10.1.0.1")))
		p.OnServiceSynced()
		p.OnEndpointSlicesSynced()
		time.Sleep(time.Second) // fake
		synctest.Wait()
		if got := slices.Collect(maps.Keys(first.Services())); len(got) != 1 || got[0].Name != "a" {
			t.Errorf("the first engine has %v, want a", got)
		}
		moved := a.DeepCopy()
		moved.Annotations = map[string]string{"engine": "second"}
		p.OnServiceUpdate(a, moved)
		time.Sleep(time.Second)
		synctest.Wait()
		if len(second.Services()) != 1 || len(first.Services()) != 0 {
			t.Errorf("the second engine has %v, the first one %v, want a and nothing", second.Services(), first.Services())
		}
		updates := second.Updates()
		if last := updates[len(updates)-1].Changes; len(last) != 1 || last[0].Source == nil || len(last[0].Source.Added) != 1 {
			t.Errorf("the second engine gets %+v, want a as a new Service with its endpoint", last)
		}
		if first.watched.Load() != 1 || second.watched.Load() != 1 {
			t.Error("not all engines are watched")
		}
		cancel()
		if err := <-ended; err != nil || first.watched.Load()+second.watched.Load() != 0 {
			t.Errorf("Run = %v, want nil and no Watch that runs", err)
		}
	})
}

func TestNewNeedsEngines(t *testing.T) {
	choose := func(*desired.Service, desired.Kind) string { return "" }
	e := Member{"x", &able{}}
	for name, engines := range map[string][]Member{"none": nil, "twice": {e, e}, "nil": {{"x", nil}}} {
		if _, err := New(choose, engines...); !errors.Is(err, proxier.ErrInvalidConfig) {
			t.Errorf("%s: %v, want %v", name, err, proxier.ErrInvalidConfig)
		}
	}
	if _, err := New(nil, e); !errors.Is(err, proxier.ErrInvalidConfig) {
		t.Errorf("no choice: %v, want %v", err, proxier.ErrInvalidConfig)
	}
}

// able is an engine with all abilities.
type able struct {
	proxiertest.RecordingEngine
	watched atomic.Int32
}

func (a *able) Abilities() proxier.Abilities {
	return proxier.Abilities{
		OwnsNames: true,
		Part:      7,
		Watch: func(ctx context.Context, _ func(proxier.Damage)) error {
			a.watched.Add(1)
			defer a.watched.Add(-1)
			<-ctx.Done()
			return ctx.Err()
		},
		Plan:   func(desired.Update) (string, error) { return "the plan", nil },
		Dump:   func(_ context.Context, w io.Writer) error { _, err := io.WriteString(w, "the dump"); return err },
		Counts: func(context.Context) (connection.Counts, error) { return connection.Counts{}, nil },
		Verify: func(context.Context, desired.Update) (proxier.Verification, error) {
			return proxier.Verification{Checked: 7}, nil
		},
		Descriptors: func() connection.Descriptors { return connection.Descriptors{Limit: 7} },
		Conditions:  func() []proxier.Condition { return []proxier.Condition{{Message: "fault"}} },
	}
}

// wrapper is an engine that wraps another one.
type wrapper struct{ proxier.Engine }

// TestTheMembersAreAsked: the hybrid has the abilities of its members, and no others.
func TestTheMembersAreAsked(t *testing.T) {
	a, plain := &able{}, &journal{}
	for name, c := range map[string]struct {
		members []Member
		can     bool
	}{
		"one can":              {[]Member{{"plain", plain}, {"able", a}}, true},
		"one wraps such":       {[]Member{{"plain", plain}, {"able", wrapper{a}}}, true},
		"none can":             {[]Member{{"plain", plain}}, false},
		"a hybrid of one that": {[]Member{{"plain", of(t, Member{"able", a})}}, true},
		"a hybrid of none":     {[]Member{{"plain", of(t, Member{"plain", plain})}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			can := of(t, c.members...).Abilities()
			for what, has := range map[string]bool{
				"OwnsNames": can.OwnsNames, "Watch": can.Watch != nil, "Plan": can.Plan != nil, "Dump": can.Dump != nil, "Counts": can.Counts != nil,
				"Verify": can.Verify != nil, "Descriptors": can.Descriptors != nil, "Conditions": can.Conditions != nil,
			} {
				if has != c.can {
					t.Errorf("%s: %t, want %t", what, has, c.can)
				}
			}
			if c.can {
				mustBeAsked(t, &can)
			}
		})
	}
}

// TestAnUpdateIsAsLargeAsEachMemberLikes: a member for which an Update costs more than its changes wants no parts.
func TestAnUpdateIsAsLargeAsEachMemberLikes(t *testing.T) {
	a, plain := Member{"able", &able{}}, Member{"plain", &journal{}}
	for _, c := range []struct {
		members []Member
		want    int
	}{{[]Member{a}, 7}, {[]Member{a, plain}, 0}, {[]Member{plain, a}, 0}} {
		if part := of(t, c.members...).Abilities().Part; part != c.want {
			t.Errorf("Part = %d, want %d", part, c.want)
		}
	}
}

func mustBeAsked(t *testing.T, can *proxier.Abilities) {
	t.Helper()
	ended, end := context.WithCancel(t.Context())
	end()
	plan, err := can.Plan(desired.Update{})
	var dump strings.Builder
	report, verifyErr := can.Verify(t.Context(), desired.Update{})
	_, countErr := can.Counts(t.Context())
	if err := errors.Join(err, verifyErr, countErr, can.Dump(ended, &dump)); err != nil {
		t.Error(err)
	}
	if err := can.Watch(ended, func(proxier.Damage) {}); !errors.Is(err, context.Canceled) {
		t.Errorf("Watch = %v, want that of the member", err)
	}
	if !strings.Contains(plan, "the plan") || !strings.Contains(dump.String(), "the dump") || report.Checked != 7 {
		t.Errorf("plan %q, dump %q, report %v", plan, dump.String(), report)
	}
	if can.Descriptors().Limit != 7 || len(can.Conditions()) != 1 {
		t.Errorf("Descriptors = %v, Conditions = %v, want those of the engine", can.Descriptors(), can.Conditions())
	}
}

func of(t *testing.T, members ...Member) *engine {
	t.Helper()
	h, err := New(func(*desired.Service, desired.Kind) string { return "able" }, members...)
	if err != nil {
		t.Fatal(err)
	}
	return h.(*engine)
}

// counter is an engine that counts, or says that it does not.
type counter struct {
	journal

	counts connection.Counts
	err    error
}

func (c *counter) Abilities() proxier.Abilities {
	return proxier.Abilities{Counts: func(context.Context) (connection.Counts, error) { return c.counts, c.err }}
}

func TestCountsAreThoseOfAllMembersThatCount(t *testing.T) {
	early := time.Unix(1_000_000_000, 0)
	of := func(since time.Time, names ...string) *counter {
		c := &counter{counts: connection.Counts{Since: since}}
		for i, name := range names {
			c.counts.ServicePorts = append(c.counts.ServicePorts, connection.ServicePortCounts{Name: nameOf(name), Connections: uint64(i + 1)})
		}
		return c
	}
	off := &counter{err: fmt.Errorf("off: %w", errors.ErrUnsupported)}
	failing := &counter{err: errors.New("no kernel")}
	for name, c := range map[string]struct {
		members []proxier.Engine
		names   string
		err     string
	}{
		"all":              {[]proxier.Engine{of(early.Add(time.Hour), "b", "d"), of(early, "a", "c")}, "a b c d", ""},
		"one is off":       {[]proxier.Engine{off, of(early, "a"), &journal{}}, "a", ""},
		"not yet begun":    {[]proxier.Engine{of(early, "a"), of(time.Time{})}, "a", ""},
		"a member fails":   {[]proxier.Engine{of(early, "a"), failing}, "a", "no kernel"},
		"no member counts": {[]proxier.Engine{off, &journal{}}, "", "unsupported operation"},
	} {
		var members []Member
		for i, e := range c.members {
			members = append(members, Member{Name: fmt.Sprint(i), Engine: e})
		}
		h, err := New(func(*desired.Service, desired.Kind) string { return "0" }, members...)
		if err != nil {
			t.Fatal(err)
		}
		got, err := h.Abilities().Counts(t.Context())
		var names []string
		for _, p := range got.ServicePorts {
			names = append(names, p.Name.Name)
		}
		if all := strings.Join(names, " "); all != c.names || all != "" && !got.Since.Equal(early) {
			t.Errorf("%s: counts of %q since %v, want those of %q since %v", name, all, got.Since, c.names, early)
		}
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: error %v, want %q", name, err, c.err)
		}
	}
}

// shelf is an engine that has the frontends of service ports, and refuses some of them.
type shelf struct {
	journal

	has     map[changetracker.ServicePortName][]desired.Kind
	refuses map[changetracker.ServicePortName]bool
	after   func() // each Apply
}

func (s *shelf) Apply(_ context.Context, u desired.Update) (result proxier.Result, err error) {
	had := s.has
	if u.Full {
		s.has = map[changetracker.ServicePortName][]desired.Kind{}
	}
	for _, c := range u.Changes {
		switch {
		case c.After == nil:
			delete(s.has, c.Name)
		case s.refuses[c.Name]:
			if kinds, ok := had[c.Name]; ok {
				s.has[c.Name] = kinds
			}
			result.Failed = append(result.Failed, &proxier.ServiceError{Name: c.Name, Err: errors.New("no room")})
		default:
			s.has[c.Name] = kindsOf(c.After)
		}
	}
	s.after()
	return result, nil
}

// TestEachFrontendIsSomewhere: whatever is chosen for each kind, changes, fails and is tried again, a frontend that
// there was and is has a member at each moment, and when nothing fails it has the chosen one alone.
func TestEachFrontendIsSomewhere(t *testing.T) {
	t.Parallel()
	moved := 0
	for seed := range uint64(300) {
		dice := rand.New(rand.NewPCG(seed, 3))
		shelves := []*shelf{{}, {}, {}}
		var members []Member
		for i, s := range shelves {
			s.has, s.refuses = map[changetracker.ServicePortName][]desired.Kind{}, map[changetracker.ServicePortName]bool{}
			members = append(members, Member{string(rune('a' + i)), s})
		}
		choose := func(s *desired.Service, kind desired.Kind) string { return s.Port.Ext.(string)[kind-1 : kind] }
		h, err := New(choose, members...)
		if err != nil {
			t.Fatal(err)
		}
		had := map[changetracker.ServicePortName]*desired.Service{} // as programmed
		mixed := map[changetracker.ServicePortName]bool{}           // failed: members may have different versions
		for step := range 40 {
			refuses := step%4 < 2 && dice.IntN(2) == 0
			u := desired.Update{Full: step == 0 || dice.IntN(5) == 0}
			now := maps.Clone(had)
			for _, name := range []changetracker.ServicePortName{nameOf("x"), nameOf("y"), nameOf("z")} {
				for _, s := range shelves {
					s.refuses[name] = refuses && dice.IntN(2) == 0
				}
				var after *desired.Service
				if dice.IntN(6) > 0 {
					choice := []byte("aaaa")
					for i := range choice {
						choice[i] += byte(dice.IntN(len(shelves)))
					}
					after = &desired.Service{Name: name, Port: &changetracker.ServicePort{Ext: string(choice)}}
					for kind := desired.ClusterIP; kind <= desired.NodePort; kind++ {
						if kind == desired.ClusterIP || dice.IntN(2) == 0 {
							after.Frontends = append(after.Frontends, desired.Frontend{Kind: kind})
						}
					}
				}
				if now[name] = after; after == nil {
					delete(now, name)
				}
				if after != nil || had[name] != nil {
					u.Changes = append(u.Changes, desired.Change{Name: name, Before: had[name], After: after})
				}
			}
			there := func(name changetracker.ServicePortName, kind desired.Kind) (at string) {
				for i, s := range shelves {
					if slices.Contains(s.has[name], kind) {
						at += members[i].Name
					}
				}
				return at
			}
			for _, s := range shelves {
				s.after = func() {
					for name, was := range had {
						for _, kind := range kindsOf(was) {
							if is := now[name]; !mixed[name] && is != nil && slices.Contains(kindsOf(is), kind) && there(name, kind) == "" {
								t.Errorf("seed %d, step %d: no member has the %v of %v", seed, step, kind, name)
							}
						}
					}
				}
			}
			result, err := h.Apply(t.Context(), u)
			if err != nil {
				t.Fatal(err)
			}
			clear(mixed)
			failed := map[changetracker.ServicePortName]bool{}
			for _, e := range result.Failed {
				failed[e.Name] = true
			}
			for name, s := range now {
				if failed[name] {
					continue
				}
				for _, kind := range kindsOf(s) {
					if want := choose(s, kind); there(name, kind) != want {
						t.Fatalf("seed %d, step %d: %q have the %v of %v, want %s", seed, step, there(name, kind), kind, name, want)
					}
				}
				if was := had[name]; was != nil && was.Port.Ext != s.Port.Ext {
					moved++
				}
			}
			for name := range failed {
				mixed[name] = true
				if now[name] = had[name]; had[name] == nil {
					delete(now, name)
				}
			}
			had = now
		}
	}
	t.Logf("%d service ports moved", moved)
}
