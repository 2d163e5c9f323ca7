package debughttp

import (
	"cmp"
	"fmt"
	"net/http"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

type serviceAnswer struct {
	Namespace    string              `json:"namespace"`
	Name         string              `json:"name"`
	ServicePorts []servicePortInFull `json:"servicePorts"`
	// UnmatchedSlices serve no port of the Service, mostly because a port's name is misspelt.
	UnmatchedSlices []unmatchedSlice `json:"unmatchedSlices,omitempty"`
}

type unmatchedSlice struct {
	Family    v1.IPFamily `json:"family"`
	Name      string      `json:"name"`
	Ports     []string    `json:"ports"`
	Endpoints int         `json:"endpoints"`
}

type servicePortInFull struct {
	servicePortText

	// Error is why the service port's last sync failed.
	Error     string         `json:"error,omitempty"`
	Frontends []frontendText `json:"frontends"`
	Endpoints []usedEndpoint `json:"endpoints"`
}

type frontendText struct {
	Kind desired.Kind `json:"kind"`
	// Text is "address:port/PROTOCOL" or "node port N/PROTOCOL".
	Text string `json:"text"`
	// VIP is omitted for a node port.
	VIP          string             `json:"vip,omitempty"`
	Port         uint16             `json:"port"`
	Action       desired.Action     `json:"action"`
	Scope        desired.Scope      `json:"scope"`
	Masquerade   desired.Masquerade `json:"masquerade"`
	ShortCircuit bool               `json:"shortCircuit"`
	Restricted   bool               `json:"restricted"`
	SourceRanges []string           `json:"sourceRanges"`
}

// usedEndpoint is an endpoint from the view of its service port.
type usedEndpoint struct {
	endpointText

	// Used means that some frontend may send connections to the endpoint.
	Used bool `json:"used"`
	// Excluded is why none does.
	Excluded changetracker.Exclusion `json:"excluded,omitempty"`
}

type endpointText struct {
	Address string `json:"address"`
	// State is "ready", "terminating" (and serving), "gone" (terminating and not serving),
	// "ejected" (by an Override) or "not ready".
	State       string `json:"state"`
	Ready       bool   `json:"ready"`
	Serving     bool   `json:"serving"`
	Terminating bool   `json:"terminating"`
	Local       bool   `json:"local"`
	// Weight is omitted if it is 1, the default.
	Weight    uint16   `json:"weight,omitempty"`
	Node      string   `json:"node,omitempty"`
	Zone      string   `json:"zone,omitempty"`
	NodeHints []string `json:"nodeHints"`
	ZoneHints []string `json:"zoneHints"`
}

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
			a.UnmatchedSlices = append(a.UnmatchedSlices, unmatchedSlice(s))
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
func (p *resolved) inFull(name types.NamespacedName, failed failures) serviceAnswer {
	a := serviceAnswer{Namespace: name.Namespace, Name: name.Name, ServicePorts: []servicePortInFull{}}
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
func inFull(family *desired.Resolved, name changetracker.ServicePortName) (p servicePortInFull, ok bool) {
	s, ok := family.Service(name)
	if !ok {
		return p, false
	}
	state := family.State()
	endpoints := state.Endpoints(name)
	p = servicePortInFull{
		servicePortText: portText(s.Port, endpoints),
		Frontends:       make([]frontendText, len(s.Frontends)),
		Endpoints:       make([]usedEndpoint, len(endpoints)),
	}
	for i := range s.Frontends {
		p.Frontends[i] = frontendOf(s.Key(&s.Frontends[i]), &s.Frontends[i])
	}
	view := state.For(state.Node())
	why := exclusions(view, s.Port, endpoints)
	for i := range endpoints {
		e := usedEndpoint{endpointText: endpointOf(&endpoints[i], view.Local(&endpoints[i])), Used: s.Cluster.Has(endpoints[i].Addr) || s.Local.Has(endpoints[i].Addr)}
		if !e.Used {
			e.Excluded = cmp.Or(why[i], changetracker.ExcludedByHook)
		}
		p.Endpoints[i] = e
	}
	return p, true
}

// exclusions returns why endpoints are excluded from the wider scope that a service port
// uses.
func exclusions(view changetracker.View, p *changetracker.ServicePort, endpoints []changetracker.Endpoint) []changetracker.Exclusion {
	if !p.UsesClusterEndpoints() {
		why, _ := changetracker.ExplainLocal(endpoints, view.Node())
		return why
	}
	why, _ := changetracker.ExplainCluster(endpoints, view.Node())
	return why
}

func frontendOf(key desired.Key, f *desired.Frontend) frontendText {
	t := frontendText{
		Kind: f.Kind, Text: key.String(), Port: f.Port, Action: f.Action, Scope: f.Scope, Masquerade: f.Masquerade,
		ShortCircuit: f.ShortCircuit, Restricted: f.Restricted, SourceRanges: texts(f.SourceRanges),
	}
	if f.VIP.IsValid() {
		t.VIP = f.VIP.String()
	}
	return t
}

func endpointOf(e *changetracker.Endpoint, local bool) endpointText {
	return endpointText{
		Address: e.Addr.String(), State: stateOf(e), Ready: e.Ready, Serving: e.Serving, Terminating: e.Terminating,
		Local: local, Weight: e.Weight, Node: e.Node, Zone: e.Zone, NodeHints: listed(e.NodeHints), ZoneHints: listed(e.ZoneHints),
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
