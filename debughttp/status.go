package debughttp

import (
	"cmp"
	"maps"
	"net/http"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

type statusAnswer struct {
	Title   string `json:"title"`
	Version string `json:"version,omitempty"`
	// Answers are the paths of the JSON that the Handler has, sorted.
	Answers []string `json:"answers"`
	// Now is the proxy's time, for the computation of ages.
	Now        time.Time       `json:"now"`
	Synced     bool            `json:"synced"`
	Waiting    []string        `json:"waiting,omitempty"`
	Without    []string        `json:"without,omitempty"`
	Node       nodeStatus      `json:"node"`
	Families   []familyStatus  `json:"families"`
	Tracked    trackedStatus   `json:"tracked"`
	Conditions []conditionText `json:"conditions"`
	// Problems has at most limit entries; ProblemsTotal counts all.
	Problems      []problemText `json:"problems"`
	ProblemsTotal int           `json:"problemsTotal"`
	LastQueued    time.Time     `json:"lastQueued,omitzero"`
}

type nodeStatus struct {
	Name      string   `json:"name"`
	Zone      string   `json:"zone,omitempty"`
	Addresses []string `json:"addresses"`
	PodCIDRs  []string `json:"podCIDRs"`
}

type trackedStatus struct {
	ServiceEvents         uint64 `json:"serviceEvents"`
	EndpointSliceEvents   uint64 `json:"endpointSliceEvents"`
	PendingServices       int    `json:"pendingServices"`
	PendingEndpointSlices int    `json:"pendingEndpointSlices"`
}

type familyStatus struct {
	Family       v1.IPFamily `json:"family"`
	Synced       bool        `json:"synced"`
	LastAttempt  time.Time   `json:"lastAttempt,omitzero"`
	LastSuccess  time.Time   `json:"lastSuccess,omitzero"`
	LastError    string      `json:"lastError,omitempty"`
	PendingSince time.Time   `json:"pendingSince,omitzero"`
	StaleSince   time.Time   `json:"staleSince,omitzero"`
	ServicePorts int         `json:"servicePorts"`
	// NoLocalInternal and NoLocalExternal count the service ports whose traffic this node
	// drops.
	NoLocalInternal int           `json:"noLocalEndpointsInternal"`
	NoLocalExternal int           `json:"noLocalEndpointsExternal"`
	Damaged         int           `json:"damaged"`
	LastDamage      *damageText   `json:"lastDamage,omitempty"`
	Failed          []failureText `json:"failed"`
	FailedTotal     int           `json:"failedTotal"`
}

type damageText struct {
	Object string    `json:"object,omitempty"`
	By     string    `json:"by,omitempty"`
	Time   time.Time `json:"time,omitzero"`
}

type failureText struct {
	servicePortName

	Error string `json:"error"`
}

type servicePortName struct {
	Namespace string      `json:"namespace"`
	Name      string      `json:"name"`
	PortName  string      `json:"portName,omitempty"`
	Protocol  v1.Protocol `json:"protocol"`
}

func nameOf(n changetracker.ServicePortName) servicePortName {
	return servicePortName{Namespace: n.Namespace, Name: n.Name, PortName: n.Port, Protocol: n.Protocol}
}

type conditionText struct {
	Type    string      `json:"type"`
	Family  v1.IPFamily `json:"family,omitempty"`
	Since   time.Time   `json:"since,omitzero"`
	Message string      `json:"message"`
}

type problemText struct {
	Object string `json:"object"`
	Field  string `json:"field"`
	Value  string `json:"value"`
	Reason string `json:"reason"`
}

func (h *handler) status(_ *http.Request, q query) (any, error) {
	limit, err := q.limit()
	if err != nil {
		return nil, err
	}
	s := h.source.Status()
	return h.statusOf(&s, limit), nil
}

func (h *handler) statusOf(s *proxier.Status, limit int) statusAnswer {
	a := statusAnswer{
		Title: h.title, Version: h.version, Answers: slices.Sorted(maps.Keys(h.answers)),
		Now: moment(time.Now()), Synced: s.Synced, LastQueued: moment(s.LastQueued),
		Waiting: converted(s.Waiting, func(i changetracker.Input) string { return string(i) }),
		Without: s.Without,
		Node: nodeStatus{
			Name: s.Node.Name, Zone: s.Node.Zone, Addresses: texts(s.Node.Addresses), PodCIDRs: texts(s.Node.PodCIDRs),
		},
		Tracked: trackedStatus{
			ServiceEvents: s.Tracked.Services, EndpointSliceEvents: s.Tracked.EndpointSlices,
			PendingServices: s.Tracked.PendingServices, PendingEndpointSlices: s.Tracked.PendingEndpointSlices,
		},
		Families: make([]familyStatus, 0, len(s.Families)),
		Conditions: converted(s.Conditions, func(c proxier.Condition) conditionText {
			return conditionText{Type: c.Type, Family: c.Family, Since: moment(c.Since), Message: c.Message}
		}),
		Problems: converted(first(limit, s.Problems), func(p changetracker.Problem) problemText {
			return problemText{Object: p.Object, Field: p.Field, Value: p.Value, Reason: string(p.Reason)}
		}),
		ProblemsTotal: len(s.Problems),
	}
	for name, family := range s.Families {
		a.Families = append(a.Families, familyText(name, &family, limit))
	}
	slices.SortFunc(a.Families, func(a, b familyStatus) int { return cmp.Compare(a.Family, b.Family) })
	return a
}

func familyText(name v1.IPFamily, f *proxier.FamilyStatus, limit int) familyStatus {
	s := familyStatus{
		Family: name, Synced: f.Synced, LastAttempt: moment(f.LastAttempt), LastSuccess: moment(f.LastSuccess),
		LastError: errorText(f.LastError), PendingSince: moment(f.PendingSince), StaleSince: moment(f.StaleSince), ServicePorts: f.ServicePorts,
		NoLocalInternal: f.NoLocalInternal, NoLocalExternal: f.NoLocalExternal,
		Damaged: f.Damaged, FailedTotal: len(f.Failed),
		Failed: converted(first(limit, f.Failed), func(e *proxier.ServiceError) failureText {
			return failureText{servicePortName: nameOf(e.Name), Error: errorText(e.Err)}
		}),
	}
	if f.Damaged > 0 {
		s.LastDamage = &damageText{Object: f.LastDamage.Object, By: f.LastDamage.By, Time: moment(f.LastDamageTime)}
	}
	return s
}

func first[T any](n int, list []T) []T { return list[:min(n, len(list))] }
