package netnstest

import (
	"net"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// MustGo closes a namespace and waits until the kernel has deleted it. That requires that
// no socket, thread or open file keeps it. The kernel then deletes its end of a cable,
// and with it the other end.
func MustGo(tb testing.TB, ns *netns.NS) {
	tb.Helper()
	witness := New(tb)
	Check(tb, netns.Connect(netns.Plug{NS: ns, Link: "cable"}, netns.Plug{NS: witness, Link: "cable"}))
	Check(tb, ns.Close())
	poll.Until(tb, "nothing keeps the network namespace", func() bool {
		return witness.Do(func() error { _, err := net.InterfaceByName("cable"); return err }) != nil
	})
}
