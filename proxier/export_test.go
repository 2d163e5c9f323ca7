package proxier

import (
	"context"

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

func (p *Proxier) ProblemCounts() map[changetracker.Reason]int {
	return problemCounts(p.tracker, p.families)
}

func (p *Proxier) WaitForModule(ctx context.Context, err error) bool {
	return p.families[0].waitForModule(ctx, err)
}
