package proxier

import (
	"slices"
	"sync"
)

// historyLength is how many reports History returns at most.
const historyLength = 128

// history holds the last reports, oldest first.
type history struct {
	mu      sync.Mutex // guards reports
	reports []SyncReport
}

func (h *history) add(r SyncReport) {
	r.Triggers = nil // there may be thousands
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.reports) == historyLength {
		h.reports = slices.Delete(h.reports, 0, 1)
	}
	h.reports = append(h.reports, r)
}

func (h *history) list() []SyncReport {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.reports)
}
