package debughttp

import (
	"cmp"
	"errors"
	"net/http"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

type verifyAnswer struct {
	// Agrees is true if every IP family was compared and none has a difference.
	Agrees   bool             `json:"agrees"`
	Families []verifiedFamily `json:"families"`
}

type verifiedFamily struct {
	Family  v1.IPFamily `json:"family"`
	Checked int         `json:"checked"`
	// Total is the number of differences, of which Differences are the first.
	Total       int              `json:"total"`
	Differences []differenceText `json:"differences"`
	// Error is why the family was not compared.
	Error string `json:"error,omitempty"`
}

type differenceText struct {
	Object  string `json:"object"`
	Problem string `json:"problem"`
	Want    string `json:"want,omitempty"`
	Have    string `json:"have,omitempty"`
	// Service is "namespace/name:port/protocol".
	Service string `json:"service,omitempty"`
}

// errBusy is for requests that would hold up syncs once more.
var errBusy = errors.New("another request compares the kernel: try again when it has ended")

// verify compares the kernel for one request at a time, since syncs wait for it.
func (h *handler) verify(r *http.Request, _ query) (any, error) {
	if !h.verifying.TryLock() {
		return nil, errBusy
	}
	defer h.verifying.Unlock()
	results, err := h.source.Verify(r.Context())
	if err != nil {
		return nil, err
	}
	a := verifyAnswer{Agrees: true, Families: []verifiedFamily{}}
	for family, v := range results {
		a.Agrees = a.Agrees && v.Agrees()
		a.Families = append(a.Families, verifiedFamily{
			Family: family, Checked: v.Checked, Total: v.Total, Error: errorText(v.Err), Differences: converted(v.Differences, differenceOf),
		})
	}
	slices.SortFunc(a.Families, func(a, b verifiedFamily) int { return cmp.Compare(a.Family, b.Family) })
	return a, nil
}

func differenceOf(d proxier.Difference) differenceText {
	t := differenceText{Object: d.Object, Problem: d.Problem, Want: d.Want, Have: d.Have}
	if d.Service != (changetracker.ServicePortName{}) {
		t.Service = d.Service.String() + "/" + string(d.Service.Protocol)
	}
	return t
}
