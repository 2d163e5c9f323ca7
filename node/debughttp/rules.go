package debughttp

import (
	"cmp"
	"net/http"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/internal/answers"
)

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
	a := answers.Rules{Namespace: namespace, Name: name}
	for family, text := range texts {
		a.Families = append(a.Families, answers.FamilyRules{Family: string(family), Text: text})
	}
	slices.SortFunc(a.Families, func(a, b answers.FamilyRules) int { return cmp.Compare(a.Family, b.Family) })
	return a, nil
}
