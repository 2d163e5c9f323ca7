package ebpf

import (
	"errors"
	"fmt"
)

// SocketCounts returns the counts of the programs. It is an error if there are none, because nothing
// was applied yet, or because sockets are not translated.
func (e *Engine) SocketCounts() (SocketCounts, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.programs == nil {
		return SocketCounts{}, errors.Join(errors.New("no programs: sync first"), e.without)
	}
	var counts SocketCounts
	for what, to := range []*uint64{&counts.Translated, &counts.Namespace, &counts.Bound, &counts.Empty, &counts.NoMemory} { // as in sockets.c
		var perCPU []uint64
		if err := e.programs.shared[mapCounts].Lookup(uint32(what), &perCPU); err != nil {
			return SocketCounts{}, fmt.Errorf("read the counts of the programs: %w", err)
		}
		for _, n := range perCPU {
			*to += n
		}
	}
	if e.datagrams != nil {
		counts.Ended = e.datagrams.ended.Load()
	}
	return counts, nil
}
