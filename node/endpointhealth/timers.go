package endpointhealth

import (
	"container/heap"
	"slices"
	"time"
)

// timer calls a function at a time. One timer of the operating system serves them all.
type timer struct {
	at time.Time
	// slack is how much later it may be, so that one awakening serves several.
	slack time.Duration
	fire  func(now time.Time)
	index int // in the heap, from 1; 0 means not in it
}

// latest is when it must be served.
func (t *timer) latest() time.Time { return t.at.Add(t.slack) }

// timers is a heap, the one first that must be served first.
type timers []*timer

// Len implements heap.Interface.
func (h timers) Len() int { return len(h) }

// Less implements heap.Interface.
func (h timers) Less(i, j int) bool { return h[i].latest().Before(h[j].latest()) }

// Swap implements heap.Interface.
func (h timers) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i+1, j+1
}

// Push implements heap.Interface.
func (h *timers) Push(x any) {
	t, ok := x.(*timer)
	if !ok {
		return
	}
	*h = append(*h, t)
	t.index = len(*h)
}

// Pop implements heap.Interface.
func (h *timers) Pop() any {
	last := len(*h) - 1
	t := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	t.index = 0
	return t
}

// set starts a timer, or changes its time.
func (h *timers) set(t *timer, at time.Time) {
	t.at = at
	if t.index == 0 {
		heap.Push(h, t)
		return
	}
	heap.Fix(h, t.index-1)
}

func (h *timers) stop(t *timer) {
	if t.index != 0 {
		heap.Remove(h, t.index-1)
	}
}

// due removes and returns a timer whose time has come, or nil.
func (h *timers) due(now time.Time) *timer {
	if len(*h) == 0 || (*h)[0].at.After(now) {
		return nil
	}
	t, _ := heap.Pop(h).(*timer)
	return t
}

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

// began and ended count a check of a namespace.
func (w *turns) began(of string) { w.running[of]++ }

func (w *turns) ended(of string) {
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
