//go:build vm

package ipvs_test

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestADatagramAfterItsServerWentIsLost: IPVS drops the next datagram of a flow whose real server is
// gone, and its sender on the node gets EPERM. The flow gets another endpoint with the datagram after
// that. A moment later the kernel would have forgotten the flow by itself, and no datagram would be
// lost: a setting of the kernel keeps it here, so that the test has that moment. This test fails when
// a kernel can do better: docs/ENGINES.md says it.
func TestADatagramAfterItsServerWentIsLost(t *testing.T) {
	n := newNode(t)
	n.proxy.OnServiceAdd(proxiertest.Service("shop", "web", proxiertest.ClusterIPs(webVIP), proxiertest.Port("dns", v1.ProtocolUDP, 53)))
	slice := proxiertest.Slice("shop", "web", "IPv4", proxiertest.SlicePort("dns", v1.ProtocolUDP, 8080))
	pods := n.world.LocalPods[:2]
	for _, pod := range pods {
		proxiertest.Endpoint(pod.Addr(v1.IPv4Protocol).String(), proxiertest.OnNode("node"))(slice)
	}
	n.proxy.OnEndpointSliceAdd(slice)
	n.synced()
	flow, err := n.world.Node.Open(t.Context(), "udp", netip.MustParseAddrPort(webVIP+":53"), proxiertest.AskOptions{Timeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = flow.Close() }()
	before, err := flow.Ask(t.Context())
	if err != nil {
		t.Fatalf("with two endpoints: %v, want an answer", err)
	}
	gone, stays := pods[0], pods[1]
	if before.Server == stays.Name {
		gone, stays = stays, gone
	}
	n.run("sysctl", "-w", "net.ipv4.vs.expire_nodest_conn=0")
	n.run("ipvsadm", "-d", "-u", webVIP+":53", "-r", gone.Addr(v1.IPv4Protocol).String()+":8080")
	n.run("sysctl", "-w", "net.ipv4.vs.expire_nodest_conn=1")
	if _, err := flow.Ask(t.Context()); !errors.Is(err, proxiertest.ErrDroppedLocally) {
		t.Errorf("the first datagram without its real server: %v, want %v as of IPVS so far", err, proxiertest.ErrDroppedLocally)
	}
	for range 3 {
		if after, err := flow.Ask(t.Context()); err != nil || after.Server != stays.Name {
			t.Errorf("the datagrams after that are answered by %q, %v, want %s", after.Server, err, stays.Name)
		}
	}
}
