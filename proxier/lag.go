package proxier

import "time"

// lag knows since when a family may be behind.
type lag struct {
	// running is when the sync under way began, failing when the first of a row of
	// failures did, and programmed when the last sync did that programmed something.
	running, failing, programmed time.Time
}

// began notes the begin of a sync.
func (l *lag) began(now time.Time) { l.running = now }

// ended notes the end of a sync. One that failed for some service ports only has
// programmed all others.
func (l *lag) ended(o *outcome) {
	if o.programmed {
		l.programmed, l.failing = l.running, time.Time{}
	} else if l.failing.IsZero() {
		l.failing = l.running
	}
	l.running = time.Time{}
}

// since is FamilyStatus.StaleSince. A change that has been pending since before
// the last sync that programmed something is one of a service port that failed.
func (l *lag) since(pending time.Time) time.Time {
	oldest := earliest(l.failing, l.running)
	if pending.After(l.programmed) {
		oldest = earliest(oldest, pending)
	}
	return oldest
}

// earliest is the earlier one of two times, of which the zero time is none.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
