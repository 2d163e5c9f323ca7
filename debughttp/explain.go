package debughttp

import (
	"net/http"
	"net/netip"
	"strings"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

type explainAnswer struct {
	Packet  packetText      `json:"packet"`
	Verdict desired.Verdict `json:"verdict"`
	Reasons []string        `json:"reasons"`
	// ServicePort and Frontend are omitted if the packet matches none.
	ServicePort *servicePortName `json:"servicePort,omitempty"`
	Frontend    *frontendText    `json:"frontend,omitempty"`
	// Scope is omitted if the verdict does not depend on endpoints.
	Scope      desired.Scope `json:"scope,omitzero"`
	Masquerade bool          `json:"masquerade"`
	// BySocket means that the client's socket is translated when it connects; omitted if rules do it.
	BySocket bool `json:"bySocket,omitempty"`
	// AffinitySeconds is the timeout of session affinity.
	AffinitySeconds float64 `json:"affinitySeconds,omitempty"`
	// Balancing is the load balancing policy; random is omitted.
	Balancing changetracker.Balancing `json:"loadBalancing,omitempty"`
	// Scheduler is that of IPVS, omitted with other engines.
	Scheduler string              `json:"scheduler,omitempty"`
	Endpoints []explainedEndpoint `json:"endpoints"`
}

type packetText struct {
	Protocol    desired.Protocol `json:"protocol"`
	Source      string           `json:"source"`
	Destination string           `json:"destination"`
	Origin      desired.Origin   `json:"origin"`
	Interface   string           `json:"interface,omitempty"`
}

// explainedEndpoint is an endpoint from the view of one packet.
type explainedEndpoint struct {
	endpointText

	// Excluded is why the packet cannot go to the endpoint; empty if it can.
	Excluded   changetracker.Exclusion `json:"excluded,omitempty"`
	Masquerade bool                    `json:"masquerade"`
}

func (h *handler) explain(r *http.Request, q query) (any, error) {
	packet, err := q.packet()
	if err != nil {
		return nil, err
	}
	e, err := h.source.Explain(r.Context(), packet)
	if err != nil {
		return nil, err
	}
	return explainAnswerOf(&e), nil
}

func explainAnswerOf(e *desired.Explanation) explainAnswer {
	a := explainAnswer{
		Packet: packetText{
			Protocol: e.Packet.Protocol, Source: e.Packet.Source.String(), Destination: e.Packet.Destination.String(),
			Origin: e.Packet.Origin, Interface: e.Packet.Interface,
		},
		Verdict: e.Verdict, Reasons: listed(e.Reasons), Scope: e.Scope, Masquerade: e.Masquerade, BySocket: e.BySocket,
		AffinitySeconds: e.Affinity.Seconds(), Balancing: e.Balancing, Scheduler: e.Scheduler,
		Endpoints: converted(e.Endpoints, func(p desired.ExplainedEndpoint) explainedEndpoint {
			return explainedEndpoint{endpointText: endpointOf(&p.Endpoint, p.Local), Excluded: p.Excluded, Masquerade: p.Masquerade}
		}),
	}
	if e.Service != nil && e.Frontend != nil {
		name := nameOf(*e.Service)
		key := desired.Key{VIP: e.Frontend.VIP, Protocol: e.Packet.Protocol, Port: e.Frontend.Port}
		frontend := frontendOf(key, e.Frontend)
		a.ServicePort, a.Frontend = &name, &frontend
	}
	return a
}

// packet parses the parameters of explain.
func (q query) packet() (p desired.Packet, err error) {
	if err := p.Protocol.UnmarshalText([]byte(strings.ToUpper(q.values.Get("protocol")))); err != nil {
		return p, &parameterError{"protocol", "want TCP, UDP or SCTP"}
	}
	if p.Source, err = netip.ParseAddr(strings.TrimSpace(q.values.Get("source"))); err != nil {
		return p, &parameterError{"source", "want an IP address"}
	}
	p.Destination, err = netip.ParseAddrPort(strings.TrimSpace(q.values.Get("destination")))
	if err != nil || p.Destination.Port() == 0 {
		return p, &parameterError{"destination", "want an IP address and a port, as in 10.96.0.10:80 or [fd00::10]:80"}
	}
	if p.Source.Unmap().Is4() != p.Destination.Addr().Unmap().Is4() {
		return p, &parameterError{"source", "want an address of the destination's IP family"}
	}
	if err := p.Origin.UnmarshalText([]byte(strings.ToLower(q.values.Get("origin")))); err != nil {
		return p, &parameterError{"origin", "want outside, pod or node"}
	}
	p.Interface, err = q.text("interface")
	return p, err
}
