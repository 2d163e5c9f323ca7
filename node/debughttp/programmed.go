package debughttp

import (
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/answers"
	"github.com/serviceplane/serviceplane/node/programmed"
)

// programmedAnswer is the Report of the node, and what it lacks of a Change.
type programmedAnswer struct {
	programmed.NodeReport
	answers.Change
}

// programmedUpTo answers whether the node has programmed a change of a Service.
func (h *handler) programmedUpTo(_ *http.Request, q query) (any, error) {
	texts := map[string]string{}
	for _, name := range []string{"namespace", "name", "services", "endpointslices"} {
		text, err := q.text(name)
		if err != nil {
			return nil, err
		}
		texts[name] = text
	}
	change := programmed.ServiceChange{
		Service:  types.NamespacedName{Namespace: texts["namespace"], Name: texts["name"]},
		Versions: changetracker.Versions{Services: texts["services"], EndpointSlices: texts["endpointslices"]},
	}
	for _, text := range q.values["endpoint"] {
		endpoint, err := programmed.ParseEndpoint(text)
		if err != nil {
			return nil, &parameterError{"endpoint", "want ADDRESS or ADDRESS:PORT"}
		}
		change.Left = append(change.Left, endpoint)
	}
	asks := change.Versions != (changetracker.Versions{}) || len(change.Left) > 0
	if err := change.Validate(); asks && err != nil {
		return nil, &parameterError{"services, endpointslices or endpoint", err.Error()}
	}
	a := programmedAnswer{NodeReport: programmed.NewReport(h.source.Status().Node.Name, h.source, time.Now(), change.Left...)}
	if missing := a.NodeReport.Missing(change); asks && missing != nil {
		a.Change.Missing = missing.Error()
	} else {
		a.Programmed = asks
	}
	a.Limit(defaultLimit, errorBytes)
	return a, nil
}
