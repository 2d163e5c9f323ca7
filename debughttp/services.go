package debughttp

import (
	"math"
	"net/http"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

type servicesAnswer struct {
	// Total is the number of matches, and Offset how many of them precede Services.
	Total    int              `json:"total"`
	Offset   int              `json:"offset"`
	Services []serviceSummary `json:"services"`
}

type serviceSummary struct {
	Namespace    string            `json:"namespace"`
	Name         string            `json:"name"`
	ServicePorts []servicePortText `json:"servicePorts"`
}

type servicePortText struct {
	Family           v1.IPFamily `json:"family"`
	PortName         string      `json:"portName,omitempty"`
	Protocol         v1.Protocol `json:"protocol"`
	ClusterIP        string      `json:"clusterIP,omitempty"`
	Port             uint16      `json:"port"`
	NodePort         uint16      `json:"nodePort,omitempty"`
	HealthCheckPort  uint16      `json:"healthCheckNodePort,omitempty"`
	ExternalIPs      []string    `json:"externalIPs"`
	LoadBalancerVIPs []string    `json:"loadBalancerVIPs"`
	InternalPolicy   string      `json:"internalTrafficPolicy"`
	// ExternalPolicy is omitted if the Service has no external frontends.
	ExternalPolicy  string  `json:"externalTrafficPolicy,omitempty"`
	AffinitySeconds float64 `json:"sessionAffinitySeconds,omitempty"`
	// Balancing is the load balancing policy; random is omitted.
	Balancing changetracker.Balancing `json:"loadBalancing,omitempty"`
	// EndpointsUsable counts the endpoints that are ready, or terminating and serving.
	EndpointsUsable int `json:"endpointsUsable"`
	EndpointsAll    int `json:"endpointsAll"`
}

func (h *handler) services(_ *http.Request, q query) (any, error) {
	limit, err := q.limit()
	if err != nil {
		return nil, err
	}
	offset, err := q.number("offset", 0, 0, math.MaxInt32)
	if err != nil {
		return nil, err
	}
	text, err := q.text("q")
	if err != nil {
		return nil, err
	}
	states := h.states()
	names, total := search(states, newNeedle(text), offset, limit)
	return servicesAnswer{
		Total: total, Offset: offset,
		Services: converted(names, func(name types.NamespacedName) serviceSummary { return summary(states, name) }),
	}, nil
}

// states returns the programmed State of each IP family that has one.
func (h *handler) states() (states []*changetracker.State) {
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		if state := h.source.Programmed(family); state != nil {
			states = append(states, state)
		}
	}
	return states
}

func summary(states []*changetracker.State, name types.NamespacedName) serviceSummary {
	s := serviceSummary{Namespace: name.Namespace, Name: name.Name, ServicePorts: []servicePortText{}}
	for _, state := range states {
		for _, name := range state.ServicePorts(name) {
			if port, ok := state.Service(name); ok {
				s.ServicePorts = append(s.ServicePorts, portText(port, state.Endpoints(name)))
			}
		}
	}
	return s
}

func portText(p *changetracker.ServicePort, endpoints []changetracker.Endpoint) servicePortText {
	s := servicePortText{
		Family: p.Family, PortName: p.Name.Port, Protocol: p.Name.Protocol, Port: p.Port,
		NodePort: p.NodePort, HealthCheckPort: p.HealthCheckNodePort,
		ExternalIPs: texts(p.ExternalIPs), LoadBalancerVIPs: texts(p.LoadBalancerVIPs),
		AffinitySeconds: p.SessionAffinity.Seconds(), Balancing: p.Balancing, EndpointsAll: len(endpoints),
	}
	if p.ClusterIP.IsValid() {
		s.ClusterIP = p.ClusterIP.String()
	}
	s.InternalPolicy, s.ExternalPolicy = policies(p)
	for i := range endpoints {
		if endpoints[i].Usable() {
			s.EndpointsUsable++
		}
	}
	return s
}

// policies returns the traffic policies; the external one is empty if the Service has no
// external frontends.
func policies(p *changetracker.ServicePort) (internal, external string) {
	internal = desired.ScopeCluster.String()
	if p.InternalPolicyLocal {
		internal = desired.ScopeLocal.String()
	}
	switch {
	case !p.ExternallyAccessible():
		return internal, ""
	case p.ExternalPolicyLocal:
		return internal, desired.ScopeLocal.String()
	default:
		return internal, desired.ScopeCluster.String()
	}
}
