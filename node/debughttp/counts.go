package debughttp

import (
	"cmp"
	"errors"
	"net/http"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/answers"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// trafficOf omits packets where only bytes are counted.
func trafficOf(connections uint64, t connection.Traffic, counted *connection.Counts) (c answers.Traffic) {
	if counted.Connections {
		c.Connections = &connections
	}
	if !counted.Traffic && t == (connection.Traffic{}) {
		return c
	}
	c.BytesIn, c.BytesOut = &t.BytesIn, &t.BytesOut
	if t.PacketsIn+t.PacketsOut > 0 || t.BytesIn+t.BytesOut == 0 {
		c.PacketsIn, c.PacketsOut = &t.PacketsIn, &t.PacketsOut
	}
	return c
}

func orZero(n *uint64) uint64 {
	if n == nil {
		return 0
	}
	return *n
}

// counts is the number of connections of service ports, and their traffic, those with the most
// first.
func (h *handler) counts(r *http.Request, q query) (any, error) {
	namespace, nsErr := q.text("namespace")
	name, nameErr := q.text("name")
	limit, limitErr := q.limit()
	if err := errors.Join(nsErr, nameErr, limitErr); err != nil {
		return nil, err
	}
	all := answers.Counts{ServicePorts: []answers.CountedPort{}}
	var unsupported error
	counting := false
	for family := range h.source.Status().Families {
		counts, err := h.source.Counts(r.Context(), family)
		if errors.Is(err, errors.ErrUnsupported) {
			unsupported = err
			continue
		}
		if err != nil {
			return nil, err
		}
		counting = true
		addCounts(&all, family, &counts, namespace, name)
	}
	if !counting && unsupported != nil {
		return nil, unsupported
	}
	slices.SortFunc(all.ServicePorts, func(a, b answers.CountedPort) int {
		return cmp.Or(cmp.Compare(orZero(b.Connections), orZero(a.Connections)), cmp.Compare(orZero(b.BytesIn)+orZero(b.BytesOut), orZero(a.BytesIn)+orZero(a.BytesOut)),
			cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.PortName, b.PortName), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Family, b.Family))
	})
	all.Total = len(all.ServicePorts)
	all.ServicePorts = all.ServicePorts[:min(limit, all.Total)]
	return all, nil
}

// addCounts adds the service ports of a family that have the namespace and the name, where they are
// not empty.
func addCounts(a *answers.Counts, family v1.IPFamily, counts *connection.Counts, namespace, name string) {
	if since := moment(counts.Since); a.Since.IsZero() || !since.IsZero() && since.Before(a.Since) {
		a.Since = since
	}
	a.Traffic = a.Traffic || counts.Traffic
	a.TrafficProblem, a.TrafficLosses = cmp.Or(a.TrafficProblem, counts.TrafficProblem), max(a.TrafficLosses, counts.TrafficLosses)
	for _, p := range counts.ServicePorts {
		if namespace != "" && p.Name.Namespace != namespace || name != "" && p.Name.Name != name {
			continue
		}
		a.ServicePorts = append(a.ServicePorts, answers.CountedPort{
			ServicePortName: nameOf(p.Name), Traffic: trafficOf(p.Connections, p.Traffic, counts), Refused: p.Refused, Family: string(family),
			Endpoints: converted(p.Endpoints, func(e connection.EndpointCounts) answers.CountedEndpoint {
				return answers.CountedEndpoint{Traffic: trafficOf(e.Connections, e.Traffic, counts), Address: e.Endpoint.String()}
			}),
		})
	}
}
