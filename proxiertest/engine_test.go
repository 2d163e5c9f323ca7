package proxiertest_test

import (
	"errors"
	"maps"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func service(name string) *desired.Service {
	return &desired.Service{Name: portName(name), Protocol: desired.TCP}
}

func portName(name string) changetracker.ServicePortName {
	return changetracker.ServicePortName{
		NamespacedName: types.NamespacedName{Namespace: "default", Name: name}, Protocol: v1.ProtocolTCP,
	}
}

func held(e *proxiertest.RecordingEngine) []string {
	var names []string
	for name := range maps.Keys(e.Services()) {
		names = append(names, name.Name)
	}
	slices.Sort(names)
	return names
}

func TestRecordingEngineHoldsWhatADataPlaneWould(t *testing.T) {
	var e proxiertest.RecordingEngine
	steps := []struct {
		rule   string
		update desired.Update
		want   []string
	}{
		{"full is everything", desired.Update{Full: true, Changes: desired.ChangesTo(service("a"), service("b"))}, []string{"a", "b"}},
		{"partial adds", desired.Update{Changes: desired.ChangesTo(service("c"))}, []string{"a", "b", "c"}},
		{"removed goes", desired.Update{Changes: []desired.Change{{Name: portName("a")}}}, []string{"b", "c"}},
		{"full forgets the rest", desired.Update{Full: true, Changes: desired.ChangesTo(service("d"))}, []string{"d"}},
	}
	for _, step := range steps {
		if _, err := e.Apply(t.Context(), step.update); err != nil {
			t.Fatalf("%s: Apply: %v", step.rule, err)
		}
		if got := held(&e); !slices.Equal(got, step.want) {
			t.Errorf("%s: holds %v, want %v", step.rule, got, step.want)
		}
	}
	if got := len(e.Updates()); got != len(steps) {
		t.Errorf("recorded %d updates, want %d", got, len(steps))
	}
	if err := e.Cleanup(t.Context()); err != nil || len(e.Services()) != 0 || e.Cleanups() != 1 {
		t.Errorf("Cleanup = %v, leaves %v after %d calls, want nothing after 1", err, held(&e), e.Cleanups())
	}
}

func TestRecordingEngineThatFailsTakesNothingOver(t *testing.T) {
	var e proxiertest.RecordingEngine
	boom := errors.New("boom")
	e.Fail(boom)
	if _, err := e.Apply(t.Context(), desired.Update{Full: true, Changes: desired.ChangesTo(service("a"))}); !errors.Is(err, boom) {
		t.Errorf("Apply = %v, want %v", err, boom)
	}
	if got := held(&e); len(got) != 0 {
		t.Errorf("holds %v after a failure, want nothing", got)
	}
	e.Fail(nil)
	if _, err := e.Apply(t.Context(), desired.Update{Full: true, Changes: desired.ChangesTo(service("a"))}); err != nil {
		t.Errorf("Apply after the failure has ended: %v", err)
	}
}

func TestRecordingEngineThatRefusesAServiceTakesTheOthers(t *testing.T) {
	var e proxiertest.RecordingEngine
	old := service("a")
	if _, err := e.Apply(t.Context(), desired.Update{Full: true, Changes: desired.ChangesTo(old)}); err != nil {
		t.Fatalf("Apply: %v", err)
	}
	boom := errors.New("boom")
	e.Refuse(portName("a"), boom)
	for _, full := range []bool{false, true} {
		result, err := e.Apply(t.Context(), desired.Update{
			Family: v1.IPv6Protocol, Full: full, Changes: []desired.Change{{Name: portName("a"), Before: old, After: service("a")}, {Name: portName("b"), After: service("b")}},
		})
		failed := result.Failed
		if err != nil || len(failed) != 1 || failed[0].Name != portName("a") || !errors.Is(failed[0], boom) {
			t.Errorf("full %v: Apply = %v, %v, want that a failed", full, failed, err)
		}
		if got := held(&e); !slices.Equal(got, []string{"a", "b"}) || e.Services()[portName("a")] != old {
			t.Errorf("full %v: holds %v, want the old a and b", full, got)
		}
	}
}
