//go:build vm

package ebpf_test

import (
	"testing"

	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestPacketsBesideAFlowtable: another program has all established connections forwarded without
// rules.
func TestPacketsBesideAFlowtable(t *testing.T) {
	c := ebpf.Config{Sockets: sockets(t)}
	var node string
	proxiertest.Conformance(t, proxiertest.Features{
		FirstPriorityLost: true, ClientLimits: true, BySocket: true,
		Prepare: func(netNS string, pods []string) {
			node = netNS
			join(t, c.Sockets, append(pods, node)...)
			netnstest.Offload(t, node)
		},
	}, factory(t, c, &node))
}
