package chaos

import (
	"fmt"
	"sync"
	"time"
)

// counts are what became of the clients' packets.
type counts struct {
	connections int // new ones: of TCP, and sockets of UDP
	answers     int // requests over connections that stay open
	failed      int // new connections that were refused, reset, or not answered for patience
	reset       int // open connections that ended
	moved       int // clients with session affinity that got another endpoint
	deaf        int // clients of UDP that got no answer, however often they sent again
	again       int // requests of which a packet was sent again
}

func (c counts) since(before counts) counts {
	return counts{
		connections: c.connections - before.connections, answers: c.answers - before.answers, failed: c.failed - before.failed,
		reset: c.reset - before.reset, moved: c.moved - before.moved, deaf: c.deaf - before.deaf, again: c.again - before.again,
	}
}

func (c counts) plus(more counts) counts {
	return counts{
		connections: c.connections + more.connections, answers: c.answers + more.answers, failed: c.failed + more.failed,
		reset: c.reset + more.reset, moved: c.moved + more.moved, deaf: c.deaf + more.deaf, again: c.again + more.again,
	}
}

// ledger is where all clients write what they see.
type ledger struct {
	mu        sync.Mutex
	sum       counts
	disturbed time.Time // when the last request began that did not succeed at once
	notes     []string  // about what did not succeed, since the last call of begin
}

// maxNotes is how many notes a ledger keeps.
const maxNotes = 30

func (l *ledger) add(c *client, start time.Time, seen counts, fault error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sum = l.sum.plus(seen)
	if seen.failed+seen.reset+seen.again > 0 && start.After(l.disturbed) {
		l.disturbed = start
	}
	if seen.failed+seen.reset+seen.moved > 0 && len(l.notes) < maxNotes {
		what := "failed"
		switch {
		case seen.reset > 0:
			what = "reset"
		case seen.moved > 0:
			what = "moved"
		}
		l.notes = append(l.notes, fmt.Sprintf("%s, after %v: %s: %s: %v", start.Format("15:04:05.000"), time.Since(start).Round(time.Millisecond), what, c.name, fault))
	}
}

// begin forgets the notes, and returns the counts so far.
func (l *ledger) begin() counts {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.notes = nil
	return l.sum
}

// read returns the counts so far, when clients were disturbed last, and the notes.
func (l *ledger) read() (sum counts, disturbed time.Time, notes []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sum, l.disturbed, l.notes
}
