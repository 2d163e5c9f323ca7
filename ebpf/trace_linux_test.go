package ebpf_test

import (
	"net/netip"
	"testing"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nftrace"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// A trace beside sockets shows what docs/DEBUGGING.md says: a socket that is translated sends nothing to the VIP,
// so a trace of the VIP sees no packet, and a trace of the endpoint sees it. Rules translate what the node's bound
// socket sends.
func TestTracesBesideSockets(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pod, node, endpoint := n.world.LocalPods[0], n.world.Node, n.world.RemotePods[0]
	n.start(t, endpoint)
	netnstest.Check(t, proxiertest.Sync(t.Context(), n))
	for _, family := range families {
		for _, c := range []struct {
			name   string
			from   *proxiertest.Host
			origin desired.Origin
			to     netip.AddrPort
			want   int
		}{
			{"a pod, to the VIP", pod, desired.FromPod, vip(family), 0},
			{"a pod, to the endpoint", pod, desired.FromPod, netip.AddrPortFrom(endpoint.Addr(family), 8080), 1},
			{"the node, to the VIP", node, desired.FromNode, vip(family), 1},
		} {
			result, err := nftrace.Trace(t.Context(), nftrace.Options{
				NetNS: node.NetNS(), Send: true, SendFrom: c.from.NetNS(),
				Packet: desired.Packet{Protocol: desired.TCP, Source: c.from.Addr(family), Destination: c.to, Origin: c.origin},
			})
			if err != nil || len(result.Packets) != c.want || result.Sent != "answered" {
				t.Errorf("%v, %s: %d packets, sent: %q, error %v; want %d, answered", family, c.name, len(result.Packets), result.Sent, err, c.want)
			}
		}
	}
}
