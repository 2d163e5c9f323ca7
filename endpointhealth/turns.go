package endpointhealth

import (
	"slices"
	"time"
)

// turns are the targets that wait for a check. Namespaces take turns, and one has at most as many checks
// running as are free, so that the endpoints of one do not delay those of others.
type turns struct {
	queues  map[string][]*target
	order   []string // of the namespaces with a queue
	length  int
	running map[string]int // checks, by namespace
}

func (w *turns) add(t *target) {
	of := t.user().name.Namespace
	if len(w.queues[of]) == 0 {
		w.order = append(w.order, of)
	}
	w.queues[of] = append(w.queues[of], t)
	w.length++
}

// next removes and returns the next target, and its namespace, if so many checks are free. t is nil if
// none may begin.
func (w *turns) next(free int) (t *target, of string) {
	i := slices.IndexFunc(w.order, func(of string) bool { return w.running[of] < free })
	if i < 0 {
		return nil, ""
	}
	of = w.order[i]
	w.order = slices.Delete(w.order, i, i+1)
	t, rest := w.queues[of][0], w.queues[of][1:]
	if w.length--; len(rest) > 0 {
		w.queues[of] = rest
		w.order = append(w.order, of)
	} else {
		delete(w.queues, of)
	}
	return t, of
}

// begin and end count a check of a namespace.
func (w *turns) begin(of string) { w.running[of]++ }

func (w *turns) end(of string) {
	if w.running[of]--; w.running[of] == 0 {
		delete(w.running, of)
	}
}

// pace lets so many checks begin in a second, and a tenth of them at once.
type pace struct {
	gap  time.Duration // between two checks
	next time.Time
}

// burst is for how long a pace makes up for what was not used.
const burst = time.Second / 10

// free is when the next check may begin.
func (p *pace) free(now time.Time) time.Time {
	if earliest := now.Add(-burst); p.next.Before(earliest) {
		p.next = earliest
	}
	return p.next
}

func (p *pace) begin() { p.next = p.next.Add(p.gap) }
