package nodeproxy

import (
	"context"
	"runtime/debug"
	"time"

	"github.com/serviceplane/serviceplane/proxier"
)

// returnMemory gives memory back to the system after the first sync, which needs more than all
// that follow: the collector alone would keep it for minutes.
func returnMemory(p *proxier.Proxier) func(context.Context) error {
	return func(ctx context.Context) error {
		every := time.NewTicker(time.Second)
		defer every.Stop()
		for !p.Status().Synced {
			select {
			case <-ctx.Done():
				return nil
			case <-every.C:
			}
		}
		debug.FreeOSMemory()
		return nil
	}
}
