package ebpf

import "errors"

// SocketCounts returns the counts of the programs. It is an error if there are none, because nothing
// was applied yet, or because sockets are not translated.
func (e *Engine) SocketCounts() (SocketCounts, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.programs == nil {
		return SocketCounts{}, errors.Join(errors.New("no programs: sync first"), e.without)
	}
	var counts SocketCounts
	if e.datagrams != nil {
		counts.Ended = e.datagrams.ended.Load()
	}
	err := sumCounts(e.programs.shared[mapCounts], &counts.Translated, &counts.Namespace, &counts.Bound, &counts.Empty, &counts.NoMemory)
	return counts, err
}
