package proxier

import (
	"fmt"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Tracker returns the change tracker of the Proxier, for programs that add values of their
// own instead of API objects, or look something up. Call Trigger after changing anything
// in it. Its Apply returns changetracker.ErrLent: the Proxier applies the changes.
func (p *Proxier) Tracker() *changetracker.Tracker { return p.lent }

// History returns the reports of the last syncs of all families, oldest first and
// at most 128, without their Triggers. It omits syncs that were postponed with
// ErrContested.
func (p *Proxier) History() []SyncReport { return p.history.list() }

// Status implements Provider.
func (p *Proxier) Status() Status {
	s := Status{
		Synced: true, Families: map[v1.IPFamily]FamilyStatus{}, Problems: p.tracker.Problems(),
		Conditions: p.health.Conditions(),
		Tracked:    p.tracker.Counts(), Waiting: p.tracker.Waiting(), Without: slices.Clone(p.without),
	}
	for _, a := range p.asked {
		s.Conditions = append(s.Conditions, a.conditions()...)
	}
	p.mu.Lock()
	s.Node = p.node
	nodeless := p.nodeless
	s.Conditions = append(s.Conditions, p.ended...)
	p.mu.Unlock()
	if !nodeless.IsZero() {
		s.Conditions = append(s.Conditions, Condition{Type: ConditionNode, Since: nodeless, Message: fmt.Sprintf(
			"neither addresses nor pod CIDRs of node %q are known: node ports at its primary address are not served, its pods are not recognized: is there a Node of this name, with status.addresses?", s.Node.Name)})
	}
	if queued := p.queued.Load(); queued != 0 {
		s.LastQueued = time.Unix(0, queued)
	}
	now := time.Now()
	for _, f := range p.families {
		family, conditions, conflicts := f.status(now)
		s.Families[f.name] = family
		s.Synced = s.Synced && family.Synced
		s.Conditions = append(s.Conditions, conditions...)
		s.Problems = append(s.Problems, conflicts...)
	}
	slices.SortStableFunc(s.Problems, func(a, b changetracker.Problem) int {
		return slices.Compare([]string{a.Object, a.Field, a.Value}, []string{b.Object, b.Field, b.Value})
	})
	slices.SortStableFunc(s.Conditions, func(a, b Condition) int {
		return slices.Compare([]string{a.Type, string(a.Family)}, []string{b.Type, string(b.Family)})
	})
	return s
}
