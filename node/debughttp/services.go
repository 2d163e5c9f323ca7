package debughttp

import (
	"math"
	"net/http"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/answers"
)

func (h *handler) services(_ *http.Request, q query) (any, error) {
	wanted, err := h.selection(q)
	if err != nil {
		return nil, err
	}
	now := h.resolved()
	f := wanted.from(h.index.services(now), &now)
	return answers.Services{
		Total: f.total(), Offset: wanted.offset, Counts: f.countsByName(),
		Services: converted(f.window(wanted.offset, wanted.limit), func(s *listedService) answers.ServiceSummary {
			summary := now.summary(s)
			if wanted.failed[s.name] {
				summary.Verdict = string(verdictFailed)
			}
			return summary
		}),
	}, nil
}

func (h *handler) selection(q query) (s selection, err error) {
	if s.limit, err = q.limit(); err != nil {
		return s, err
	}
	if s.offset, err = q.number("offset", 0, 0, math.MaxInt32); err != nil {
		return s, err
	}
	text, err := q.text("q")
	if err != nil {
		return s, err
	}
	if s.namespace, err = q.text("namespace"); err != nil {
		return s, err
	}
	if s.filters, err = q.filters(); err != nil {
		return s, err
	}
	s.needle, s.failed = newNeedle(text), map[types.NamespacedName]bool{}
	for _, family := range h.source.Status().Families {
		for _, failed := range family.Failed {
			s.failed[failed.Name.NamespacedName] = true
		}
	}
	return s, nil
}

func (p *resolved) summary(l *listedService) answers.ServiceSummary {
	s := answers.ServiceSummary{Namespace: l.name.Namespace, Name: l.name.Name, Verdict: string(l.verdict), ServicePorts: []answers.ServicePort{}}
	p.servicePorts(l.name, func(family *desired.Resolved, name changetracker.ServicePortName) {
		if port, ok := family.State().Service(name); ok {
			s.ServicePorts = append(s.ServicePorts, portText(port, family.State().Endpoints(name)))
		}
	})
	return s
}

type namespacesAnswer struct {
	Namespaces []namespaceText `json:"namespaces"`
}

type namespaceText struct {
	Name string `json:"name"`
	// Services counts the programmed ones.
	Services int `json:"services"`
}

func (h *handler) namespaces(*http.Request, query) (any, error) {
	a := namespacesAnswer{Namespaces: []namespaceText{}}
	for _, s := range h.index.services(h.resolved()) {
		if n := len(a.Namespaces); n == 0 || a.Namespaces[n-1].Name != s.name.Namespace {
			a.Namespaces = append(a.Namespaces, namespaceText{Name: s.name.Namespace})
		}
		a.Namespaces[len(a.Namespaces)-1].Services++
	}
	return a, nil
}

func portText(p *changetracker.ServicePort, endpoints []changetracker.Endpoint) answers.ServicePort {
	s := answers.ServicePort{
		Family: string(p.Family), PortName: p.Name.Port, Protocol: string(p.Name.Protocol), Port: p.Port,
		NodePort: p.NodePort, HealthCheckPort: p.HealthCheckNodePort,
		ExternalIPs: texts(p.ExternalIPs), LoadBalancerVIPs: texts(p.LoadBalancerVIPs),
		AffinitySeconds: p.SessionAffinity.Seconds(), Balancing: balancing(p.Balancing), EndpointsAll: len(endpoints),
		ExposeOn: string(p.ExposeOn),
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

// balancing is empty for Random.
func balancing(b changetracker.Balancing) string {
	if b == changetracker.Random {
		return ""
	}
	return b.String()
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
