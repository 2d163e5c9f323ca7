package proxier

import "slices"

// historyLength is how many reports History returns at most.
const historyLength = 128

// history holds the last reports, oldest first.
type history struct{ reports []SyncReport }

func (h *history) add(r SyncReport) {
	r.Triggers = nil // there may be thousands
	if len(h.reports) == historyLength {
		h.reports = slices.Delete(h.reports, 0, 1)
	}
	h.reports = append(h.reports, r)
}

// History returns the reports of the last syncs of all families, oldest first and
// at most 128, without their Triggers. Syncs that waited because somebody keeps
// changing our objects are left out.
func (p *Proxier) History() []SyncReport {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.history.reports)
}
