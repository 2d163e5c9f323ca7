package proxier

import (
	"context"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// The tests are outside the package, since proxiertest imports it. They also use these.
const (
	MaxModuleWaits = maxModuleWaits
	HistoryLength  = historyLength
)

func (p *Proxier) SyncNow(ctx context.Context) error {
	_, err := p.sync(ctx)
	return err
}

// SyncAll is SyncNow for somebody who waits: all that failed is tried again.
func (p *Proxier) SyncAll(ctx context.Context) error {
	p.awaited.Store(true)
	return p.SyncNow(ctx)
}

func (p *Proxier) ProblemCounts() map[changetracker.Reason]int {
	return problemCounts(p.tracker, p.families)
}

func (p *Proxier) WaitForModule(ctx context.Context, err error) bool {
	return p.families[0].waitForModule(ctx, err)
}

// Lookups is how many addresses of endpoints were asked for and are remembered.
func (p *Proxier) Lookups(family v1.IPFamily) int {
	l := &p.family(family).lookups
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.names)
}
