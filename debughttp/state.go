package debughttp

import (
	"cmp"
	"net/http"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// stateAnswer is everything that is programmed, for comparison.
type stateAnswer struct {
	Node     string         `json:"node"`
	Services []serviceState `json:"services"`
}

type serviceState struct {
	Namespace    string             `json:"namespace"`
	Name         string             `json:"name"`
	ServicePorts []servicePortState `json:"servicePorts"`
}

type servicePortState struct {
	servicePortText

	Endpoints []endpointState `json:"endpoints"`
}

// endpointState is what does not depend on the node that is asked.
type endpointState struct {
	Address string `json:"address"`
	State   string `json:"state"`
	// Weight is omitted if it is 1, the default.
	Weight uint16 `json:"weight,omitempty"`
}

func (h *handler) state(_ *http.Request, q query) (any, error) {
	namespace, err := q.text("namespace")
	if err != nil {
		return nil, err
	}
	ports := map[types.NamespacedName][]servicePortState{}
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
	a := stateAnswer{Node: h.source.Status().Node.Name, Services: make([]serviceState, 0, len(ports))}
	for name, list := range ports {
		slices.SortFunc(list, func(a, b servicePortState) int {
			return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.PortName, b.PortName), cmp.Compare(a.Protocol, b.Protocol))
		})
		a.Services = append(a.Services, serviceState{name.Namespace, name.Name, list})
	}
	slices.SortFunc(a.Services, func(a, b serviceState) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return a, nil
}

func portState(port *changetracker.ServicePort, endpoints []changetracker.Endpoint) servicePortState {
	return servicePortState{portText(port, endpoints), converted(endpoints, func(e changetracker.Endpoint) endpointState {
		return endpointState{e.Addr.String(), stateOf(&e), e.Weight}
	})}
}
