package debughttp

import (
	"cmp"
	"errors"
	"net/http"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/answers"
	"github.com/serviceplane/serviceplane/proxier"
)

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
	a := answers.Verification{Agrees: true, Families: []answers.VerifiedFamily{}}
	for family, v := range results {
		a.Agrees = a.Agrees && v.Agrees()
		a.Families = append(a.Families, answers.VerifiedFamily{
			Family: string(family), Checked: v.Checked, Total: v.Total, Error: errorText(v.Err), Differences: converted(v.Differences, differenceOf),
		})
	}
	slices.SortFunc(a.Families, func(a, b answers.VerifiedFamily) int { return cmp.Compare(a.Family, b.Family) })
	return a, nil
}

func differenceOf(d proxier.Difference) answers.Difference {
	t := answers.Difference{Object: d.Object, Problem: d.Problem, Want: d.Want, Have: d.Have}
	if d.Service != (changetracker.ServicePortName{}) {
		t.Service = d.Service.String() + "/" + string(d.Service.Protocol)
	}
	return t
}
