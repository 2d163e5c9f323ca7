package debughttp

import (
	"cmp"
	"net/http"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/answers"
)

func (h *handler) state(_ *http.Request, q query) (any, error) {
	namespace, err := q.text("namespace")
	if err != nil {
		return nil, err
	}
	ports := map[types.NamespacedName][]answers.ServicePortState{}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		state := h.source.Programmed(family)
		if state == nil {
			continue
		}
		for name, port := range state.All() {
			if namespace == "" || namespace == name.Namespace {
				ports[name.NamespacedName] = append(ports[name.NamespacedName], portState(port, state.Endpoints(name)))
			}
		}
	}
	a := answers.State{Node: h.source.Status().Node.Name, Services: make([]answers.ServiceState, 0, len(ports))}
	for name, list := range ports {
		slices.SortFunc(list, func(a, b answers.ServicePortState) int {
			return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.PortName, b.PortName), cmp.Compare(a.Protocol, b.Protocol))
		})
		a.Services = append(a.Services, answers.ServiceState{Namespace: name.Namespace, Name: name.Name, ServicePorts: list})
	}
	slices.SortFunc(a.Services, func(a, b answers.ServiceState) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return a, nil
}

func portState(port *changetracker.ServicePort, endpoints []changetracker.Endpoint) answers.ServicePortState {
	return answers.ServicePortState{ServicePort: portText(port, endpoints), Endpoints: converted(endpoints, func(e changetracker.Endpoint) answers.EndpointState {
		return answers.EndpointState{Address: e.Addr.String(), State: stateOf(&e), Weight: e.Weight, Priority: e.Priority}
	})}
}
