package proxier

import (
	"container/heap"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/runner"
)

// port is what a family knows of a service port that is not as it should be: it failed, or another
// program has changed its objects. All others are as the State says, and have no record.
type port struct {
	name changetracker.ServicePortName
	// failed is why it is not programmed, after so many tries in a row; nil: it is. The engine has it as
	// has then, nil: not at all.
	failed *ServiceError
	has    *desired.Service
	// limited is why it is not programmed in full.
	limited *ServiceError
	tries   int // in a row, that failed or were limited
	// triggers are those of its changes that are not programmed, as in SyncReport.
	triggers []time.Time
	damage   portDamage
	// due is when a sync tries it again. It is in the queue at this index, or in none (-1): then it
	// waits for a change, or a sync has it.
	due   time.Time
	index int
}

// ports has the records of a family. family.mu guards it.
type ports struct {
	retry   runner.Backoff
	byName  map[changetracker.ServicePortName]*port
	queue   portQueue
	failing int
	limited int
}

func newPorts(retry runner.Backoff) ports {
	return ports{retry: retry, byName: map[changetracker.ServicePortName]*port{}}
}

// get returns the record of a service port, which may be new.
func (p *ports) get(name changetracker.ServicePortName) *port {
	r := p.byName[name]
	if r == nil {
		r = &port{name: name, index: -1}
		p.byName[name] = r
	}
	return r
}

// schedule sets when to try a service port again; the zero time is never.
func (p *ports) schedule(r *port, due time.Time) {
	r.due = due
	switch {
	case due.IsZero() && r.index >= 0:
		heap.Remove(&p.queue, r.index)
	case due.IsZero():
	case r.index >= 0:
		heap.Fix(&p.queue, r.index)
	default:
		heap.Push(&p.queue, r)
	}
}

// next is when the first service port is due; zero if none is.
func (p *ports) next() time.Time {
	if len(p.queue) == 0 {
		return time.Time{}
	}
	return p.queue[0].due
}

// takeDue returns the service ports that a sync must try again, of which some are damaged: those that
// are due, or all that will be.
func (p *ports) takeDue(now time.Time, all bool) (due, damaged []changetracker.ServicePortName) {
	for len(p.queue) > 0 && (all || !p.queue[0].due.After(now)) {
		r := p.queue[0]
		p.schedule(r, time.Time{})
		due = append(due, r.name)
		if r.damage.consume() {
			damaged = append(damaged, r.name)
		}
	}
	return due, damaged
}

// failedNow records that a sync at now could not program a service port, which the engine has otherwise.
func (p *ports) failedNow(e *ServiceError, has *desired.Service, now, started time.Time) (before *ServiceError) {
	r := p.get(e.Name)
	before = r.failed
	failed := *e
	if failed.Since = started; before != nil {
		failed.Since = before.Since
	} else {
		p.failing++
	}
	r.failed, r.has, r.damage.taken = &failed, has, false
	p.tryAgain(r, e, now)
	return before
}

// tryAgain schedules the next try of a service port after a failure.
func (p *ports) tryAgain(r *port, e *ServiceError, now time.Time) {
	r.tries++
	switch {
	case r.damage.waiting: // since the sync began: it is due already
	case e.Terminal:
		p.schedule(r, time.Time{})
	default:
		p.schedule(r, now.Add(p.retry.Pause(r.tries)))
	}
}

// programmed records that a sync has programmed a service port, perhaps not in full. It returns its
// last failure and the triggers that it had; nil if there are none.
func (p *ports) programmed(name changetracker.ServicePortName, limited *ServiceError, now time.Time) (before *ServiceError, triggers []time.Time) {
	r := p.byName[name]
	if r == nil && limited == nil {
		return nil, nil
	}
	r = p.get(name)
	before, triggers = r.failed, r.triggers
	if before != nil {
		p.failing--
	}
	p.limit(r, limited)
	if r.failed, r.has, r.triggers = nil, nil, nil; limited != nil {
		p.tryAgain(r, limited, now)
		return before, triggers
	}
	if r.tries = 0; !r.damage.waiting {
		p.schedule(r, time.Time{})
	}
	p.forgetIfWell(r)
	return before, triggers
}

func (p *ports) limit(r *port, e *ServiceError) {
	if r.limited != nil {
		p.limited--
	}
	if r.limited = e; e != nil {
		p.limited++
	}
}

// limits are the service ports that are not programmed in full, in no particular order.
func (p *ports) limits() (all []changetracker.Problem) {
	for _, r := range p.byName {
		if r.limited != nil {
			all = append(all, changetracker.Problem{
				Object: "Service " + r.name.NamespacedName.String(), Field: "port " + r.name.Port, Value: r.limited.Err.Error(), Reason: changetracker.ReasonTooMany,
			})
		}
	}
	return all
}

func (p *ports) forgetIfWell(r *port) {
	if r.failed == nil && r.limited == nil && r.damage.last.IsZero() {
		p.schedule(r, time.Time{})
		delete(p.byName, r.name)
	}
}

// failures returns the failures, in no particular order.
func (p *ports) failures() []*ServiceError {
	all := make([]*ServiceError, 0, p.failing)
	for _, r := range p.byName {
		if r.failed != nil {
			all = append(all, r.failed)
		}
	}
	return all
}

func compareFailures(a, b *ServiceError) int { return a.Name.Compare(b.Name) }

// portQueue is a heap by due.
type portQueue []*port

func (q portQueue) Len() int           { return len(q) }
func (q portQueue) Less(i, j int) bool { return q[i].due.Before(q[j].due) }
func (q portQueue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

func (q *portQueue) Push(x any) {
	r, _ := x.(*port)
	r.index = len(*q)
	*q = append(*q, r)
}

func (q *portQueue) Pop() any {
	last := len(*q) - 1
	r := (*q)[last]
	(*q)[last], *q = nil, (*q)[:last]
	r.index = -1
	return r
}
