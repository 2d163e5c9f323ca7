package cluster

import (
	"fmt"
	"slices"
	"time"
)

// change is a write to the API, on its way to the kernels.
type change struct {
	position int // in the log
	at       time.Time
}

// stats counts what a run does.
type stats struct {
	touched []int                 // by node: service ports that watched changes have made different
	writes  []int                 // by node: without full syncs
	full    []int                 // by node: full syncs
	delays  []time.Duration       // from a change to one node
	slowest map[int]time.Duration // from a change to its last node
	// happened counts what went wrong.
	happened map[string]int
}

// The faults that must happen for a property to mean something.
const (
	watchBroke    = "watches that broke"
	watchResumed  = "watches that resumed where they were"
	listedAgain   = "lists of a running proxy"
	listedOld     = "first lists of a proxy that are older than what its kernel has"
	missedDelete  = "objects that a list shows to be deleted"
	claimed       = "checks of a Service on a node that said it has programmed all that it had received"
	missedReplace = "objects that a list shows to be replaced by others of the same name"
	rivals        = "Services that claim the same for a moment"
	applyFailed   = "Applies that failed"
	applyPartly   = "Applies that failed for some service ports"
	applyCut      = "Applies during which the proxy was stopped"
	nodeLost      = "nodes that went down"
	proxyStarted  = "starts of proxies"
)

var mustHappen = []string{
	watchBroke, watchResumed, listedAgain, listedOld, missedDelete, missedReplace, claimed, rivals, applyFailed, applyPartly, applyCut, nodeLost, proxyStarted,
}

func newStats(nodes int) *stats {
	return &stats{touched: make([]int, nodes), writes: make([]int, nodes), full: make([]int, nodes), slowest: map[int]time.Duration{}, happened: map[string]int{}}
}

// applied takes in a successful Apply.
func (s *stats) applied(node int, seen seen, writes int, now time.Time) {
	if seen.full {
		s.full[node]++
	} else {
		s.writes[node] += writes
	}
	for _, c := range seen.pending {
		d := now.Sub(c.at)
		s.delays = append(s.delays, d)
		s.slowest[c.position] = max(s.slowest[c.position], d)
	}
}

// distribution describes a list of values.
func distribution[T int | time.Duration](values []T) string {
	if len(values) == 0 {
		return "none"
	}
	values = slices.Sorted(slices.Values(values))
	at := func(share float64) T { return values[int(share*float64(len(values)-1))] }
	return fmt.Sprintf("p50 %v, p99 %v, max %v of %d", at(0.5), at(0.99), at(1), len(values))
}

func (s *stats) String() string {
	var slowest []time.Duration
	for _, d := range s.slowest {
		slowest = append(slowest, d)
	}
	return fmt.Sprintf("from a change to its last node: %s\nfrom a change to one node: %s\nwrites of a node: %s\nchanged service ports of a node: %s\nfull syncs of a node: %s",
		distribution(slowest), distribution(s.delays), distribution(s.writes), distribution(s.touched), distribution(s.full))
}
