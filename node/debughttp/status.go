package debughttp

import (
	"cmp"
	"maps"
	"net/http"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/answers"
	"github.com/serviceplane/serviceplane/proxier"
)

func nameOf(n changetracker.ServicePortName) answers.ServicePortName {
	return answers.ServicePortName{Namespace: n.Namespace, Name: n.Name, PortName: n.Port, Protocol: string(n.Protocol)}
}

func (h *handler) status(_ *http.Request, q query) (any, error) {
	limit, err := q.limit()
	if err != nil {
		return nil, err
	}
	s := h.source.Status()
	return h.statusOf(&s, limit), nil
}

func (h *handler) statusOf(s *proxier.Status, limit int) answers.Status {
	a := answers.Status{
		Title: h.title, Version: h.version, Answers: slices.Sorted(maps.Keys(h.answers)),
		Now: moment(time.Now()), Synced: s.Synced, LastQueued: moment(s.LastQueued),
		Waiting: converted(s.Waiting, func(i changetracker.Input) string { return string(i) }),
		Without: s.Without,
		Node: answers.Node{
			Name: s.Node.Name, Zone: s.Node.Zone, Addresses: texts(s.Node.Addresses), PodCIDRs: texts(s.Node.PodCIDRs),
		},
		Tracked: answers.Tracked{
			ServiceEvents: s.Tracked.Services, EndpointSliceEvents: s.Tracked.EndpointSlices,
			PendingServices: s.Tracked.PendingServices, PendingEndpointSlices: s.Tracked.PendingEndpointSlices,
		},
		Families: make([]answers.Family, 0, len(s.Families)),
		Conditions: converted(s.Conditions, func(c proxier.Condition) answers.Condition {
			return answers.Condition{Type: c.Type, Family: string(c.Family), Since: moment(c.Since), Message: c.Message}
		}),
		Problems: converted(first(limit, s.Problems), func(p changetracker.Problem) answers.Problem {
			return answers.Problem{Object: p.Object, Field: p.Field, Value: p.Value, Reason: string(p.Reason)}
		}),
		ProblemsTotal: len(s.Problems),
	}
	for name, family := range s.Families {
		a.Families = append(a.Families, familyText(name, &family, limit))
	}
	slices.SortFunc(a.Families, func(a, b answers.Family) int { return cmp.Compare(a.Family, b.Family) })
	return a
}

func familyText(name v1.IPFamily, f *proxier.FamilyStatus, limit int) answers.Family {
	s := answers.Family{
		Family: string(name), Synced: f.Synced, LastAttempt: moment(f.LastAttempt), LastSuccess: moment(f.LastSuccess),
		LastError: errorText(f.LastError), PendingSince: moment(f.PendingSince), StaleSince: moment(f.StaleSince), ServicePorts: f.ServicePorts,
		NoLocalInternal: f.NoLocalInternal, NoLocalExternal: f.NoLocalExternal,
		Damaged: f.Damaged, FailedTotal: len(f.Failed),
		Failed: converted(first(limit, f.Failed), func(e *proxier.ServiceError) answers.Failure {
			return answers.Failure{ServicePortName: nameOf(e.Name), Error: errorText(e.Err)}
		}),
	}
	if f.Damaged > 0 {
		s.LastDamage = &answers.Damage{Object: f.LastDamage.Object, By: f.LastDamage.By, Time: moment(f.LastDamageTime)}
	}
	return s
}

func first[T any](n int, list []T) []T { return list[:min(n, len(list))] }
