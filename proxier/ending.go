package proxier

import (
	"context"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
)

// EndGrace is how long an endpoint must be in no EndpointSlice until connections to it end.
// An endpoint that moves from one slice to another may be in neither for a moment. Later losses
// of the same family extend the wait, to endGraceLimit at most.
const (
	EndGrace      = 3 * time.Second
	endGraceLimit = 5 * EndGrace
)

// endTracker decides for which frontends the conntrack table must be searched for
// connections to endpoints that are gone for good. It is owned by the goroutine that syncs
// the family, except conntrack. A nil endTracker does nothing.
type endTracker struct {
	conntrack *Conntrack
	flows     *flowTracker
	// first and last are when the first and last of the pending flows came.
	first, last time.Time
	searched    bool
}

// newEndTracker returns nil if c cannot end connections.
func newEndTracker(c *Conntrack) *endTracker {
	if c == nil || c.RunEnding == nil {
		return nil
	}
	t := &endTracker{conntrack: c, flows: newFlowTracker(nil)}
	t.flows.tracks = func(s *desired.Service, terminates bool) bool {
		return s.EndsConnections() && !terminates // otherwise the engine ends its connections itself
	}
	t.flows.endsOf = func(s *desired.Service) desired.Endpoints { return s.Listed }
	return t
}

// update takes over what became of service ports.
func (t *endTracker) update(outcomes []desired.Applied, u *desired.Update, result *Result) {
	if t == nil {
		return
	}
	before := t.flows.added
	t.flows.update(outcomes, u, result)
	switch now := time.Now(); {
	case len(t.flows.pending) == 0:
		t.first = time.Time{}
	case t.first.IsZero():
		t.first, t.last = now, now
	case t.flows.added > before:
		t.last = now
	}
}

// next is when to search; zero if nothing is pending.
func (t *endTracker) next() time.Time {
	if t == nil || t.first.IsZero() {
		return time.Time{}
	}
	return t.deadline()
}

func (t *endTracker) deadline() time.Time {
	end, limit := t.last.Add(EndGrace), t.first.Add(endGraceLimit)
	if limit.Before(end) {
		return limit
	}
	return end
}

// due returns the frontends to search for now. The first search comes at once, also without
// any: the ender then removes what an earlier process has left.
func (t *endTracker) due(now time.Time) (ends []desired.Flows, due bool) {
	switch {
	case t == nil:
		return nil, false
	case !t.first.IsZero() && !now.Before(t.deadline()):
		for _, f := range t.flows.pending {
			ends = append(ends, f)
		}
		return ends, true
	default:
		return nil, !t.searched
	}
}

// done is called after a successful search that began at now.
func (t *endTracker) done(now time.Time) {
	if t == nil {
		return
	}
	t.searched = true
	if !t.first.IsZero() && !now.Before(t.deadline()) {
		t.flows.done()
		t.first = time.Time{}
	}
}

func (t *endTracker) cleanup(ctx context.Context, family v1.IPFamily) error {
	if t == nil {
		return nil
	}
	if err := t.conntrack.CleanupEnding(ctx, family); err != nil {
		return fmt.Errorf("clean up the ending of connections: %w", err)
	}
	return nil
}
