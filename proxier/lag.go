package proxier

import "time"

// lag measures since when the data plane of a family may be out of date. A time is zero if
// there is no such event.
type lag struct {
	// running is the start of the running sync, failing that of the first of the latest
	// syncs that failed in a row. A sync that failed for single service ports counts as a
	// success.
	running, failing time.Time
}

func (l *lag) syncStarted(now time.Time) { l.running = now }

func (l *lag) syncEnded(programmed bool) {
	if programmed {
		l.failing = time.Time{}
	} else if l.failing.IsZero() {
		l.failing = l.running
	}
	l.running = time.Time{}
}

// since returns FamilyStatus.StaleSince, if the oldest change that no sync has taken came then.
func (l *lag) since(pending time.Time) time.Time {
	return earliest(earliest(l.failing, l.running), pending)
}

// latest returns the later one of two times.
func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// earliest returns the earlier one of two times, ignoring zero times.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
