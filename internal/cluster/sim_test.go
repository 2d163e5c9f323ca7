package cluster

import (
	"container/heap"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"sync"
	"testing/synctest"
	"time"
)

// sim is the scheduler: it runs steps in the order of their times, on the fake clock of the
// bubble that it runs in. While a step runs nothing else does; between steps the goroutines
// of the proxies run until all of them wait.
type sim struct {
	seed   uint64
	window int // how many entries of the log a replica has for a watch that resumes
	quirks quirks
	begin  time.Time
	steps  stepQueue
	count  int
	stats  *stats

	mu         sync.Mutex // guards all below
	violations []violation
	digest     uint64 // of everything that was programmed, in any order
}

type step struct {
	at    time.Time
	order int
	run   func()
}

type stepQueue []step

func (q stepQueue) Len() int { return len(q) }
func (q stepQueue) Less(i, j int) bool {
	if c := q[i].at.Compare(q[j].at); c != 0 {
		return c < 0
	}
	return q[i].order < q[j].order
}
func (q stepQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *stepQueue) Push(x any)   { *q = append(*q, x.(step)) }
func (q *stepQueue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

func (s *sim) at(t time.Time, run func()) {
	s.count++
	heap.Push(&s.steps, step{t, s.count, run})
}

func (s *sim) after(d time.Duration, run func()) { s.at(time.Now().Add(d), run) }

// runUntil runs the steps up to a time.
func (s *sim) runUntil(end time.Time) {
	for len(s.steps) > 0 && !s.steps[0].at.After(end) {
		next := heap.Pop(&s.steps).(step)
		sleepUntil(next.at)
		next.run()
		synctest.Wait()
	}
	sleepUntil(end)
}

// sleepUntil returns after everything that other goroutines do at that time.
func sleepUntil(t time.Time) {
	if d := time.Until(t); d > 0 {
		time.Sleep(d)
		synctest.Wait()
	}
}

// number is a random number that depends only on the seed and on what it is for, so that a
// change of one part of a run leaves the others as they are.
func (s *sim) number(what string, parts ...int) uint64 {
	h := fnv.New64a()
	var b [8]byte
	for _, p := range append(parts, int(s.seed)) {
		binary.LittleEndian.PutUint64(b[:], uint64(p))
		h.Write(b[:])
	}
	h.Write([]byte(what))
	return rand.NewPCG(h.Sum64(), s.seed).Uint64()
}

// span is a random duration between two others.
func (s *sim) span(low, high time.Duration, what string, parts ...int) time.Duration {
	return low + time.Duration(s.number(what, parts...)%uint64(high-low))
}

// violation says that a property does not hold.
type violation struct {
	at             time.Duration
	property, text string
}

func (v violation) String() string { return fmt.Sprintf("%v: %s: %s", v.at, v.property, v.text) }

func (s *sim) violate(property, format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.violations = append(s.violations, violation{time.Since(s.begin), property, fmt.Sprintf(format, args...)})
}

// note counts that something happened.
func (s *sim) note(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.happened[what]++
}
