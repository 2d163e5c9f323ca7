package proxiertest

import (
	"testing"

	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// Run gives the provider complete first lists, and runs it until the test ends. The test fails
// if Run of the provider does.
func Run(tb testing.TB, p proxier.Provider) {
	tb.Helper()
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	poll.Background(tb, p.Run)
}
