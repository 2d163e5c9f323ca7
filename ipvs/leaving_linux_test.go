package ipvs

import (
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// TestLeavingAgainWithoutTheModule: the virtual servers that an earlier attempt has seen are gone with it.
func TestLeavingAgainWithoutTheModule(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	n := newFakeNode()
	e := n.engine(t, func(c *Config) { c.NetNS = ns.Path() })
	mustApply(t, e, full(service("web", webVIP, pod1)))
	netnstest.Check(t, e.Close())
	e.system.loaded = func() (bool, error) { return false, nil }
	e.system.left = func() (*left, error) { return openLeft(&e.config, v1.IPv4Protocol) }
	f := &leavingFamily{engine: e}
	netnstest.Check(t, f.begin(t.Context()))
	if got := len(f.left.servers.keys); got != 0 {
		t.Errorf("%d virtual servers are left, want none", got)
	}
	if n, done, err := f.step(0); n != 0 || !done || err != nil {
		t.Errorf("step = %d connections, %t, %v, want the end", n, done, err)
	}
	netnstest.Check(t, f.Close())
}
