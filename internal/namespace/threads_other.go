//go:build !linux

package namespace

// Threads runs functions in a network namespace like Visit.
type Threads struct{ netNS string }

// NewThreads starts nothing.
func NewThreads(netNS string) *Threads { return &Threads{netNS} }

// Visit is the function Visit.
func (t *Threads) Visit(f func() error) error { return Visit(t.netNS, f) }

// Close does nothing.
func (t *Threads) Close() {}
