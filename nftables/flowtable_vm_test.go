//go:build vm

package nftables_test

import (
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestPacketsBesideAFlowtable: another program has all established connections forwarded without
// rules.
func TestPacketsBesideAFlowtable(t *testing.T) {
	features := proxiertest.Features{FirstPriorityLost: true, ClientLimits: true}
	features.Prepare = func(node string, _ []string) { netnstest.Offload(t, node) }
	proxiertest.Conformance(t, features, provider)
}
