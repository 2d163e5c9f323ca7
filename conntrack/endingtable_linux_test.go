package conntrack

import (
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// manyConns are n connections from different clients, beginning with the first.
func manyConns(first, n int) (conns []*resettingConn) {
	for i := first; i < first+n; i++ {
		client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 1024)
		conns = append(conns, &resettingConn{
			handle: netlinkx.Handle{ReplyTo: client}, client: client, dialled: netip.MustParseAddrPort("10.96.0.1:80"),
			server: netip.MustParseAddrPort("10.244.0.1:8080"), listed: true,
		})
	}
	return conns
}

// An element that is deleted while connections are forgotten, as by a SYN of its client, is no failure.
func TestAnElementMayGoWhileConnectionsAreForgotten(t *testing.T) {
	ns := netnstest.New(t)
	k := &endingTable{netNS: ns.Path(), family: v1.IPv4Protocol}
	conns := manyConns(0, 2)
	netnstest.Check(t, k.list(conns))
	_, err := k.waiting()
	netnstest.Check(t, err)
	netnstest.Run(t, ns, "nft", "delete element ip "+defaultTable+" connections { 10.1.0.1 . 1024 . 10.96.0.1 . 80 }")
	if err := k.forget(conns); err != nil {
		t.Errorf("forget: %v", err)
	}
	if left, err := k.remove(); left || err != nil {
		t.Errorf("elements are left: %t, %v; want none", left, err)
	}
}

// Elements of earlier processes leave room in the table: the kernel limits the size of its set.
func TestEarlierProcessesLeaveRoom(t *testing.T) {
	ns := netnstest.New(t)
	const left = 0xffff / 2
	netnstest.Check(t, (&endingTable{netNS: ns.Path(), family: v1.IPv4Protocol}).list(manyConns(0, left)))
	k := &endingTable{netNS: ns.Path(), family: v1.IPv4Protocol}
	for i := 0; i < maxResetting; i += roundSize {
		netnstest.Check(t, k.list(manyConns(left+i, min(roundSize, maxResetting-i))))
	}
}
