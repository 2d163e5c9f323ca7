package endpointhealth

import (
	"container/heap"
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
