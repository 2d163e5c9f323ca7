package nftrace

import (
	"context"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// A new socket is writable, before it connects, and the runtime may learn of that late. That is no answer.
func TestNoAnswerIsNoConnection(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	netnstest.Connect(t, ns, []string{"10.9.0.1/24"}, netnstest.New(t), nil)
	netnstest.Run(t, ns, "ip", "neigh", "add", "10.9.0.2", "lladdr", "02:00:00:00:00:01", "dev", "eth0") // nobody
	packet := desired.Packet{Source: netip.MustParseAddr("10.9.0.1"), Destination: netip.MustParseAddrPort("10.9.0.2:80"), Protocol: desired.TCP}
	for range 20 {
		ctx, stop := context.WithTimeout(t.Context(), 20*time.Millisecond)
		var sending sync.WaitGroup
		for range 100 {
			sending.Go(func() {
				s, err := newSender(ns.Path(), packet)
				if err != nil {
					t.Error(err)
					return
				}
				defer s.close()
				if got := outcome(s.send(ctx)); got != sentUnanswered {
					t.Errorf("sent: %s, want %s", got, sentUnanswered)
				}
			})
		}
		sending.Wait()
		stop()
	}
}
