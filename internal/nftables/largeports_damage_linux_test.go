package nftables

import (
	"strings"
	"sync/atomic"
	"testing"

	"github.com/serviceplane/serviceplane/internal/poll"
)

// TestDamageWhileOnlySlotsChangeIsNoticed: all endpoints of a large Service are replaced, which changes its slots and
// nothing else. Another program changes the table while the listeners pause for that.
func TestDamageWhileOnlySlotsChangeIsNoticed(t *testing.T) {
	t.Parallel()
	w := startWatchedAside(t, 1, loadWrites)
	w.OnEndpointSliceUpdate(nil, newSlice(w.cluster.services[0].ObjectMeta, 100_000, 1500))
	w.sync(t)
	const clusterIP = "10.0.0.0" // of the Service
	has := func() bool {
		return strings.Contains(nftOutput(t, w.ns, "list", "set", "ip", "serviceplane", "cluster-ips"), clusterIP)
	}
	poll.Until(t, "the ClusterIP", has)
	var commits atomic.Int64
	w.engine.mu.Lock()
	w.engine.kernel = &saboteur{kernel: w.engine.kernel, at: 3, commits: &commits, do: func() {
		mustNFT(t, w.ns, "flush set ip serviceplane cluster-ips")
	}}
	w.engine.mu.Unlock()
	w.OnEndpointSliceUpdate(nil, newSlice(w.cluster.services[0].ObjectMeta, 200_000, 1500))
	w.sync(t)
	if n := commits.Load(); n < 3 {
		t.Fatalf("%d transactions", n)
	}
	poll.Until(t, "the ClusterIP again", has)
}
