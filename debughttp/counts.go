package debughttp

import (
	"cmp"
	"errors"
	"net/http"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/connection"
)

type countsAnswer struct {
	// Since is omitted before the first sync.
	Since time.Time `json:"since,omitzero"`
	// Traffic says that traffic is counted, and TrafficProblem why not, if that was asked for.
	Traffic        bool   `json:"traffic,omitempty"`
	TrafficProblem string `json:"trafficProblem,omitempty"`
	TrafficLosses  uint64 `json:"trafficLosses,omitempty"`
	// Total is the number of service ports that match.
	Total        int           `json:"total"`
	ServicePorts []countedPort `json:"servicePorts"`
}

type countedPort struct {
	servicePortName

	countedTraffic

	Family    v1.IPFamily       `json:"family"`
	Endpoints []countedEndpoint `json:"endpoints"`
}

type countedEndpoint struct {
	countedTraffic

	Address string `json:"address"`
}

// countedTraffic are the connections, and a connection.Traffic. What is not counted is omitted.
type countedTraffic struct {
	Connections *uint64 `json:"connections,omitempty"`

	PacketsIn  *uint64 `json:"packetsIn,omitempty"`
	PacketsOut *uint64 `json:"packetsOut,omitempty"`
	BytesIn    *uint64 `json:"bytesIn,omitempty"`
	BytesOut   *uint64 `json:"bytesOut,omitempty"`
}

// trafficOf omits packets where only bytes are counted.
func trafficOf(connections uint64, t connection.Traffic, counted *connection.Counts) (c countedTraffic) {
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

func (t *countedTraffic) connections() uint64 {
	if t.Connections == nil {
		return 0
	}
	return *t.Connections
}

func (t *countedTraffic) bytes() uint64 {
	if t.BytesIn == nil {
		return 0
	}
	return *t.BytesIn + *t.BytesOut
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
	all := countsAnswer{ServicePorts: []countedPort{}}
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
		all.add(family, &counts, namespace, name)
	}
	if !counting && unsupported != nil {
		return nil, unsupported
	}
	slices.SortFunc(all.ServicePorts, func(a, b countedPort) int {
		return cmp.Or(cmp.Compare(b.connections(), a.connections()), cmp.Compare(b.bytes(), a.bytes()), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name),
			cmp.Compare(a.PortName, b.PortName), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Family, b.Family))
	})
	all.Total = len(all.ServicePorts)
	all.ServicePorts = all.ServicePorts[:min(limit, all.Total)]
	return all, nil
}

// add adds the service ports of a family that have the namespace and the name, where they are
// not empty.
func (a *countsAnswer) add(family v1.IPFamily, counts *connection.Counts, namespace, name string) {
	if since := moment(counts.Since); a.Since.IsZero() || !since.IsZero() && since.Before(a.Since) {
		a.Since = since
	}
	a.Traffic = a.Traffic || counts.Traffic
	a.TrafficProblem, a.TrafficLosses = cmp.Or(a.TrafficProblem, counts.TrafficProblem), max(a.TrafficLosses, counts.TrafficLosses)
	for _, p := range counts.ServicePorts {
		if namespace != "" && p.Name.Namespace != namespace || name != "" && p.Name.Name != name {
			continue
		}
		a.ServicePorts = append(a.ServicePorts, countedPort{
			servicePortName: nameOf(p.Name), countedTraffic: trafficOf(p.Connections, p.Traffic, counts), Family: family,
			Endpoints: converted(p.Endpoints, func(e connection.EndpointCounts) countedEndpoint {
				return countedEndpoint{countedTraffic: trafficOf(e.Connections, e.Traffic, counts), Address: e.Endpoint.String()}
			}),
		})
	}
}
