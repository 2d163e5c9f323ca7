package proxiertest

import (
	"context"
	"testing"

	"github.com/serviceplane/serviceplane/proxier"
)

// Run gives the provider complete first lists, and runs it until the test ends. The test fails
// if Run of the provider does.
func Run(tb testing.TB, p proxier.Provider) {
	tb.Helper()
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	ctx, stop := context.WithCancel(tb.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	tb.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			tb.Errorf("Run = %v", err)
		}
	})
}
