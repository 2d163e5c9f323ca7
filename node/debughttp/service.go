package debughttp

import (
	"cmp"
	"fmt"
	"net/http"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/answers"
	"github.com/serviceplane/serviceplane/proxier"
)

func (h *handler) service(_ *http.Request, q query) (any, error) {
	name, err := q.serviceName()
	if err != nil {
		return nil, err
	}
	status, now := h.source.Status(), h.resolved()
	a := now.inFull(name, failuresOf(&status))
	if len(a.ServicePorts) == 0 {
		return nil, fmt.Errorf("%w: %s", errNotFound, name)
	}
	if tracking, ok := h.source.(interface{ Tracker() *changetracker.Tracker }); ok {
		for _, s := range tracking.Tracker().Unmatched(name) {
			a.UnmatchedSlices = append(a.UnmatchedSlices, answers.UnmatchedSlice{Family: string(s.Family), Name: s.Name, Ports: s.Ports, Endpoints: s.Endpoints})
		}
	}
	return a, nil
}

// failures are the errors of the service ports that could not be programmed.
type failures map[v1.IPFamily]map[changetracker.ServicePortName]error

func failuresOf(s *proxier.Status) failures {
	all := failures{}
	for family, status := range s.Families {
		all[family] = make(map[changetracker.ServicePortName]error, len(status.Failed))
		for _, failed := range status.Failed {
			all[family][failed.Name] = failed.Err
		}
	}
	return all
}

// inFull returns a Service with all its service ports.
func (p *resolved) inFull(name types.NamespacedName, failed failures) answers.Service {
	a := answers.Service{Namespace: name.Namespace, Name: name.Name, ServicePorts: []answers.ServicePortInFull{}}
	p.servicePorts(name, func(family *desired.Resolved, name changetracker.ServicePortName) {
		if port, ok := inFull(family, name); ok {
			port.Error = errorText(failed[family.State().Family()][name])
			a.ServicePorts = append(a.ServicePorts, port)
		}
	})
	return a
}

// serviceName requires both parameters. The namespace may be empty, since programs may
// create Services without one.
func (q query) serviceName() (name types.NamespacedName, err error) {
	if !q.values.Has("namespace") {
		return name, &parameterError{"namespace", "is missing"}
	}
	if name.Namespace, err = q.text("namespace"); err != nil {
		return name, err
	}
	if name.Name, err = q.text("name"); err == nil && name.Name == "" {
		err = &parameterError{"name", "is missing"}
	}
	return name, err
}

// inFull returns one service port.
func inFull(family *desired.Resolved, name changetracker.ServicePortName) (p answers.ServicePortInFull, ok bool) {
	s, ok := family.Service(name)
	if !ok {
		return p, false
	}
	state := family.State()
	endpoints := state.Endpoints(name)
	p = answers.ServicePortInFull{
		ServicePort: portText(s.Port, endpoints),
		Frontends:   make([]answers.Frontend, len(s.Frontends)),
		Endpoints:   make([]answers.UsedEndpoint, len(endpoints)),
	}
	for i := range s.Frontends {
		p.Frontends[i] = frontendOf(s.Key(&s.Frontends[i]), &s.Frontends[i])
	}
	view := state.For(state.Node())
	why := exclusions(view, s.Port, endpoints)
	for i := range endpoints {
		e := answers.UsedEndpoint{Endpoint: endpointOf(&endpoints[i], view.Local(&endpoints[i])), Used: s.Cluster.Has(endpoints[i].Addr) || s.Local.Has(endpoints[i].Addr)}
		if !e.Used {
			e.Excluded = string(cmp.Or(why[i], changetracker.ExcludedByHook))
		}
		p.Endpoints[i] = e
	}
	return p, true
}

// exclusions returns why endpoints are excluded from the wider scope that a service port
// uses.
func exclusions(view changetracker.View, p *changetracker.ServicePort, endpoints []changetracker.Endpoint) []changetracker.Exclusion {
	if !p.UsesClusterEndpoints() {
		why, _ := changetracker.ExplainLocal(p, endpoints, view.Node())
		return why
	}
	why, _ := changetracker.ExplainCluster(p, endpoints, view.Node())
	return why
}

func frontendOf(key desired.Key, f *desired.Frontend) answers.Frontend {
	t := answers.Frontend{
		Kind: f.Kind.String(), Text: key.String(), Port: f.Port, Action: f.Action.String(), Scope: f.Scope.String(), Masquerade: f.Masquerade.String(),
		ShortCircuit: f.ShortCircuit, Restricted: f.Restricted, SourceRanges: texts(f.SourceRanges),
	}
	if f.VIP.IsValid() {
		t.VIP = f.VIP.String()
	}
	return t
}

func endpointOf(e *changetracker.Endpoint, local bool) answers.Endpoint {
	return answers.Endpoint{
		Address: e.Addr.String(), State: stateOf(e), Ready: e.Ready, Serving: e.Serving, Terminating: e.Terminating,
		Local: local, Weight: e.Weight, Priority: e.Priority, Node: e.Node, Zone: e.Zone, NodeHints: listed(e.NodeHints), ZoneHints: listed(e.ZoneHints),
	}
}

func stateOf(e *changetracker.Endpoint) string {
	switch {
	case e.Ready:
		return "ready"
	case e.Terminating && e.Serving:
		return "terminating"
	case e.Terminating:
		return "gone"
	case e.Ejected:
		return "ejected"
	case e.Maintenance:
		return "maintenance"
	default:
		return "not ready"
	}
}

// listed never returns nil, which JSON encodes as null.
func listed(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}
