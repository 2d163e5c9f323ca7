package history

import (
	"context"
	"maps"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// planted is an engine with a bug.
type planted struct {
	proxier.Engine

	bug bug
	// applied counts the calls of Apply.
	applied int
}

// bug changes what the engine gets and returns. A nil function changes nothing.
type bug struct {
	update func(p *planted, u *desired.Update) (skip bool)
	result func(p *planted, u *desired.Update, err error) error
	deaf   bool // it does not report damage
}

// Apply implements proxier.Engine.
func (p *planted) Apply(ctx context.Context, u desired.Update) (result proxier.Result, err error) {
	p.applied++
	u.Changes = slices.Clone(u.Changes)
	if p.bug.update != nil && p.bug.update(p, &u) {
		return proxier.Result{}, nil
	}
	result, err = p.Engine.Apply(ctx, u)
	if p.bug.result != nil {
		err = p.bug.result(p, &u, err)
	}
	return result, err
}

// Abilities are those of the engine, but for Watch, if it is deaf.
func (p *planted) Abilities() proxier.Abilities {
	can := p.Engine.Abilities()
	if p.bug.deaf {
		can.Watch = nil
	}
	return can
}

// plantedPlane is a plane whose engines have a bug.
type plantedPlane struct {
	Plane

	bug bug
}

// Engines implements Plane.
func (p plantedPlane) Engines(config proxier.Config, calls *Calls) (map[v1.IPFamily]proxier.Engine, error) {
	engines, err := p.Plane.Engines(config, calls)
	for family, e := range engines {
		engines[family] = &planted{Engine: e, bug: p.bug}
	}
	return engines, err
}

// edit returns a bug that changes the last service port of an Update.
func edit(do func(s *desired.Service)) bug {
	return bug{update: func(_ *planted, u *desired.Update) bool {
		for i := len(u.Changes) - 1; i >= 0; i-- {
			if u.Changes[i].After != nil {
				s := *u.Changes[i].After
				do(&s)
				u.Changes[i].After = &s
				break
			}
		}
		return false
	}}
}

func plants() map[string]bug {
	return map[string]bug{
		"the last change of an Update is lost": {update: func(_ *planted, u *desired.Update) bool {
			if !u.Full && len(u.Changes) > 0 {
				u.Changes = u.Changes[:len(u.Changes)-1]
			}
			return false
		}},
		"a deleted service port stays": {update: func(_ *planted, u *desired.Update) bool {
			u.Changes = slices.DeleteFunc(u.Changes, func(c desired.Change) bool { return c.After == nil })
			return false
		}},
		"a change is programmed as it was before": {update: func(_ *planted, u *desired.Update) bool {
			for i, c := range u.Changes {
				if was, ok := u.Was.Service(c.Name); ok && !u.Full && c.After != nil {
					u.Changes[i].After = was
				}
			}
			return false
		}},
		"each fifth Update is lost":      {update: func(p *planted, u *desired.Update) bool { return !u.Full && p.applied%5 == 0 }},
		"a failed Update counts as done": {result: func(*planted, *desired.Update, error) error { return nil }},
		"the answer of each second Update is lost, for ever": {result: func(p *planted, _ *desired.Update, err error) error {
			if p.applied > 1 {
				return errDead
			}
			return err
		}},
		"damage is not noticed": {deaf: true},
		"the last endpoint is lost": edit(func(s *desired.Service) {
			s.Cluster = desired.EndpointsOf(s.Cluster.Slice()[:max(0, s.Cluster.Len()-1)]...)
		}),
		"the last frontend is lost": edit(func(s *desired.Service) {
			s.Frontends = s.Frontends[:max(0, len(s.Frontends)-1)]
		}),
		"session affinity is lost": edit(func(s *desired.Service) { s.Affinity = 0 }),
		"source ranges are lost": edit(func(s *desired.Service) {
			s.Frontends = slices.Clone(s.Frontends)
			for i := range s.Frontends {
				s.Frontends[i].Restricted, s.Frontends[i].SourceRanges = false, nil
			}
		}),
		"policy Local is ignored": edit(func(s *desired.Service) {
			s.Frontends = slices.Clone(s.Frontends)
			for i := range s.Frontends {
				s.Frontends[i].Scope = desired.ScopeCluster
			}
		}),
	}
}

const (
	// plantedPatience is long enough to tell a bug from a busy machine: the same history
	// must pass without the bug, too.
	plantedPatience = 5 * time.Second
	// plantedSeeds is the number of histories of which one must catch a bug.
	plantedSeeds = 240
)

// TestPlanted gives bugs to the engine, and expects that histories catch each: a few of the bugs, of
// which each run draws others, or all with SERVICEPLANE_HISTORY_SEEDS.
func TestPlanted(t *testing.T, some int, planes Planes) {
	t.Helper()
	all := plants()
	for range max(0, len(all)-few(some, len(all))) { // a map's first key is random
		for what := range maps.Keys(all) {
			delete(all, what)
			break
		}
	}
	for what, bug := range all {
		t.Run(what, func(t *testing.T) { bug.mustBeCaught(t, planes) })
	}
}

func (b bug) mustBeCaught(t *testing.T, planes Planes) {
	t.Helper()
	first := newSeed()
	plane, fresh := planes(t, first)
	if b.deaf && hasSockets(plane) {
		t.Log("nobody else changes sockets")
		return
	}
	for seed := first; seed < first+plantedSeeds; seed++ {
		steps := New(seed, stepsPerHistory)
		if err := Run(t.Context(), plantedPlane{plane, b}, fresh, steps, plantedPatience); err == nil {
			continue
		}
		if err := Run(t.Context(), plane, fresh, steps, patience); err != nil {
			t.Fatalf("seed %d without the bug: %v", seed, err)
		}
		t.Logf("caught by history %d", seed-first+1)
		return
	}
	t.Errorf("not caught by %d histories from seed %d", plantedSeeds, first)
}
