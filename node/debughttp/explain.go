package debughttp

import (
	"net/http"
	"net/netip"
	"strings"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/answers"
)

func (h *handler) explain(r *http.Request, q query) (any, error) {
	packet, err := q.packet()
	if err != nil {
		return nil, err
	}
	e, err := h.source.Explain(r.Context(), packet)
	if err != nil {
		return nil, err
	}
	return explanationOf(&e), nil
}

func explanationOf(e *desired.Explanation) answers.Explanation {
	a := answers.Explanation{
		Packet: answers.Packet{
			Protocol: e.Packet.Protocol.String(), Source: e.Packet.Source.String(), Destination: e.Packet.Destination.String(),
			Origin: e.Packet.Origin.String(), Interface: e.Packet.Interface,
		},
		Verdict: e.Verdict.String(), Reasons: listed(e.Reasons), Scope: e.Scope.String(), Masquerade: e.Masquerade, BySocket: e.BySocket,
		AffinitySeconds: e.Affinity.Seconds(), Balancing: balancing(e.Balancing), Scheduler: e.Scheduler, Limit: e.Limit,
		Endpoints: converted(e.Endpoints, func(p desired.ExplainedEndpoint) answers.ExplainedEndpoint {
			return answers.ExplainedEndpoint{Endpoint: endpointOf(&p.Endpoint, p.Local), Excluded: string(p.Excluded), Masquerade: p.Masquerade}
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
