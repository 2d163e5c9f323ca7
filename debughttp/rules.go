package debughttp

import (
	"cmp"
	"net/http"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

type rulesAnswer struct {
	Namespace string        `json:"namespace"`
	Name      string        `json:"name"`
	Families  []familyRules `json:"families"`
}

type familyRules struct {
	Family v1.IPFamily `json:"family"`
	Text   string      `json:"text"`
}

// rules answers with what the engine programs for one Service.
func (h *handler) rules(r *http.Request, q query) (any, error) {
	namespace, err := q.text("namespace")
	if err != nil {
		return nil, err
	}
	name, err := q.text("name")
	if err != nil {
		return nil, err
	}
	texts, err := h.source.Rules(r.Context(), types.NamespacedName{Namespace: namespace, Name: name})
	if err != nil {
		return nil, err
	}
	if len(texts) == 0 {
		return nil, errNotFound
	}
	a := rulesAnswer{Namespace: namespace, Name: name}
	for family, text := range texts {
		a.Families = append(a.Families, familyRules{family, text})
	}
	slices.SortFunc(a.Families, func(a, b familyRules) int { return cmp.Compare(a.Family, b.Family) })
	return a, nil
}
