package proxier_test

import (
	"context"
	"errors"
	"io"
	"slices"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/userspace/connection"
)

// ableEngine is an engine with all abilities.
type ableEngine struct{ fakeEngine }

func (*ableEngine) Traits(*desired.Service) desired.Traits { return desired.Traits{SourceLost: true} }
func (*ableEngine) Plan(desired.Update) (string, error)    { return "the plan", nil }
func (*ableEngine) Dump(_ context.Context, w io.Writer) error {
	_, err := io.WriteString(w, "the dump")
	return err
}

func (*ableEngine) Verify(context.Context, desired.Update) (proxier.VerifyReport, error) {
	return proxier.VerifyReport{}, nil
}

func (*ableEngine) Counts(context.Context) (proxier.Counts, error) { return proxier.Counts{}, nil }
func (*ableEngine) OwnsNames() bool                                { return false }
func (*ableEngine) Descriptors() connection.Descriptors            { return connection.Descriptors{Limit: 7} }

func (*ableEngine) Conditions() []proxier.Condition {
	return []proxier.Condition{{Type: proxier.ConditionSockets, Message: "no BPF file system"}}
}

// embedding has the methods of Engine, and no others.
type embedding struct{ proxier.Engine }

// unwrapping is the same with a method Unwrap.
type unwrapping struct{ proxier.Engine }

func (u unwrapping) Unwrap() proxier.Engine { return u.Engine }

// TestWhatAWrappedEngineCanDo: a wrapper with Unwrap keeps all abilities; one without it
// loses them, and New logs them.
func TestWhatAWrappedEngineCanDo(t *testing.T) {
	all := []string{"Watcher", "Planner", "Dumper", "Counter", "Verifier", "OwnsNames", "Descriptors", "Conditions"}
	able := &ableEngine{}
	for name, c := range map[string]struct {
		engine      proxier.Engine
		can, hidden []string
	}{
		"itself":                     {able, all, nil},
		"unwraps":                    {unwrapping{able}, all, nil},
		"unwraps twice":              {&unwrapping{unwrapping{able}}, all, nil},
		"embeds":                     {embedding{able}, nil, all},
		"a pointer that embeds":      {&embedding{able}, nil, all},
		"embeds what unwraps":        {embedding{unwrapping{able}}, nil, all},
		"unwraps what embeds":        {unwrapping{embedding{able}}, nil, nil}, // only one level is checked
		"embeds what can do nothing": {embedding{embedding{able}}, nil, nil},
		"wraps nothing":              {embedding{}, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			if got := proxier.Abilities(c.engine); !slices.Equal(got, c.can) {
				t.Errorf("abilities %v, want %v", got, c.can)
			}
			core, logs := observer.New(zap.WarnLevel)
			newProxier(t, proxier.Deps{Logger: zap.New(core)}, c.engine)
			var got []string
			for _, entry := range logs.FilterMessageSnippet("engine wrapper hides abilities").All() {
				for _, name := range entry.ContextMap()["hidden"].([]any) {
					got = append(got, name.(string))
				}
			}
			if !slices.Equal(got, c.hidden) {
				t.Errorf("New logs hidden abilities %v, want %v", got, c.hidden)
			}
		})
	}
}

// TestConditionsOfTheEngine are in Status, with their IP family.
func TestConditionsOfTheEngine(t *testing.T) {
	p := newProxier(t, proxier.Deps{}, unwrapping{&ableEngine{}})
	conditions := p.Status().Conditions
	if len(conditions) == 0 {
		t.Error("Status has no Condition of the engine")
	}
	for _, c := range conditions {
		if c.Type != proxier.ConditionSockets || c.Family == "" || c.Message != "no BPF file system" {
			t.Errorf("condition %+v, want that of the engine with a family", c)
		}
	}
}

// TestAWrapperKeepsWhatEngineHas checks Close and Traits.
func TestAWrapperKeepsWhatEngineHas(t *testing.T) {
	able := &ableEngine{}
	w := embedding{able}
	if err := w.Close(); err != nil || able.closed != 1 {
		t.Errorf("Close = %v, the engine was closed %d times, want once", err, able.closed)
	}
	if !w.Traits(nil).SourceLost {
		t.Error("Traits of the wrapper are not those of the engine")
	}
}

// TestWhatFailedOutsideTheUpdateIsRetried by a partial update, without another change. ipvs,
// for example, may displace another service port.
func TestWhatFailedOutsideTheUpdateIsRetried(t *testing.T) {
	run(t, proxier.Config{}, func(t *testing.T, f *fixture) {
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.OnServiceAdd(service("b", "10.0.0.2"))
		f.synced()
		pass(time.Second)
		a := f.v4.last().Changes[0].Name
		f.v4.failWith(func(u desired.Update) error {
			if namesIn(u) == "b" {
				return someError{{Name: a, Err: errors.New("displaced")}}
			}
			return nil
		})
		f.OnServiceUpdate(nil, service("b", "10.0.0.3"))
		pass(time.Minute)
		if u := f.v4.last(); u.Full || namesIn(u) != "a" {
			t.Errorf("the last update: full %v of %q, want a partial one of a", u.Full, namesIn(u))
		}
		if failed := f.Status().Families[v1.IPv4Protocol].Failed; len(failed) != 0 {
			t.Errorf("failed = %v, want none after the retry", failed)
		}
	})
}
