package proxier

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// journal is an engine that writes down what it is told, in one list with others.
type journal struct {
	name    string
	entries *[]string
	fail    error
	has     map[string]bool
}

func (j *journal) Apply(_ context.Context, u desired.Update) (Result, error) {
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
	return resultOf(j.fail)
}

func (j *journal) Close() error                           { return nil }
func (j *journal) Traits(*desired.Service) desired.Traits { return desired.Traits{} }

func (j *journal) Cleanup(context.Context) error { clear(j.has); return j.fail }

func hybrid(t *testing.T, choice map[string]string) (h *Hybrid, a, b *journal, entries *[]string) {
	t.Helper()
	entries = &[]string{}
	a = &journal{name: "a", entries: entries, has: map[string]bool{}}
	b = &journal{name: "b", entries: entries, has: map[string]bool{}}
	h, err := NewHybrid(func(s *desired.Service) string { return choice[s.Name.Name] }, HybridEngine{"a", a}, HybridEngine{"b", b})
	if err != nil {
		t.Fatal(err)
	}
	return h, a, b, entries
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

// TestAServicePortIsMadeBeforeItIsBroken, in partial and in full updates, in both
// directions at once.
func TestAServicePortIsMadeBeforeItIsBroken(t *testing.T) {
	for _, full := range []bool{false, true} {
		choice := map[string]string{"x": "a", "y": "b"}
		h, a, b, entries := hybrid(t, choice)
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
		broken := slices.IndexFunc(*entries, func(e string) bool { return strings.Contains(e, "-") })
		made := slices.IndexFunc(*entries, func(e string) bool { return strings.HasPrefix(e, "b") && strings.Contains(e, "+x") })
		if made < 0 || broken < made || !strings.Contains((*entries)[broken], "full=false") {
			t.Errorf("full %v: %q, want x made before anything is broken", full, *entries)
		}
		if full && !strings.Contains((*entries)[0], "+x") {
			t.Errorf("%q, want x to stay with a while b gets it", *entries)
		}
		if a.has["x"] || !a.has["y"] || !b.has["x"] || b.has["y"] {
			t.Errorf("full %v: a has %v, b has %v, want y and z, and x", full, a.has, b.has)
		}
	}
}

// TestARefusedServicePortStaysWhereItIs.
func TestARefusedServicePortStaysWhereItIs(t *testing.T) {
	choice := map[string]string{}
	h, a, b, _ := hybrid(t, choice)
	if _, err := h.Apply(t.Context(), desired.Update{Full: true, Changes: desired.ChangesTo(desiredOf("x")...)}); err != nil {
		t.Fatal(err)
	}
	choice["x"] = "b"
	b.fail = someError{{Name: nameOf("x"), Err: errors.New("no")}}
	result, err := h.Apply(t.Context(), desired.Update{Changes: desired.ChangesTo(desiredOf("x")...)})
	if err != nil || len(result.Failed) != 1 || result.Failed[0].Name != nameOf("x") {
		t.Errorf("Apply = %v, %v, want that x failed", result, err)
	}
	if !a.has["x"] {
		t.Error("x was taken away from the engine that had it")
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

// TestAHybridUnderTheDriver moves a Service when an embedder's payload says so.
func TestAHybridUnderTheDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second, v6 := &fakeEngine{}, &fakeEngine{}, &fakeEngine{}
		h, err := NewHybrid(func(s *desired.Service) string {
			name, _ := changetracker.Ext[string](s.Port.Ext)
			return name
		}, HybridEngine{"first", first}, HybridEngine{"second", second})
		if err != nil {
			t.Fatal(err)
		}
		config := Config{Tracker: changetracker.Options{
			DecorateService: func(p *changetracker.ServicePort, s *v1.Service) { p.Ext = s.Annotations["engine"] },
		}}
		p, err := New(config, Deps{}, map[v1.IPFamily]Engine{v1.IPv4Protocol: h, v1.IPv6Protocol: v6})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- p.Run(ctx) }()
		p.OnServiceAdd(service("a", "10.0.0.1"))
		p.OnServiceSynced()
		p.OnEndpointSlicesSynced()
		synctest.Wait()
		if got := namesIn(first.last()); got != "a" {
			t.Errorf("the first engine has %q, want a", got)
		}
		p.OnServiceUpdate(nil, service("a", "10.0.0.1", func(s *v1.Service) { s.Annotations = map[string]string{"engine": "second"} }))
		time.Sleep(time.Second)
		synctest.Wait()
		if got, gone := namesIn(second.last()), first.last().Changes; got != "a" || len(gone) != 1 || gone[0].After != nil {
			t.Errorf("the second engine has %q, the first one lost %v, want a and a", got, gone)
		}
		if !first.watched() || !second.watched() {
			t.Error("not all engines are watched")
		}
		cancel()
		if err := <-ended; err != nil || first.closed == 0 || second.closed == 0 {
			t.Errorf("Run = %v, closed %d and %d times, want nil and all closed", err, first.closed, second.closed)
		}
	})
}

func TestAHybridNeedsEngines(t *testing.T) {
	choose := func(*desired.Service) string { return "" }
	e := HybridEngine{"x", &fakeEngine{}}
	for name, engines := range map[string][]HybridEngine{"none": nil, "twice": {e, e}, "nil": {{"x", nil}}} {
		if _, err := NewHybrid(choose, engines...); !errors.Is(err, ErrInvalidConfig) {
			t.Errorf("%s: %v, want %v", name, err, ErrInvalidConfig)
		}
	}
	if _, err := NewHybrid(nil, e); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("no choice: %v, want %v", err, ErrInvalidConfig)
	}
}
