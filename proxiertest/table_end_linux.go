package proxiertest

import (
	"context"
	"runtime"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// endScenarios are about the kernel objects that remain after a Provider.
func endScenarios() []scenario {
	const rule = "Nothing of a Provider that has ended keeps its network namespace: no socket and no thread."
	return []scenario{
		{name: "end", rule: rule, play: func(ctx context.Context, t *testing.T, s *stage) {
			s.elsewhere(ctx, t, func(other *suite) { other.end(t) })
		}},
		{name: "end/cleaned_up", rule: rule, play: func(ctx context.Context, t *testing.T, s *stage) {
			s.elsewhere(ctx, t, func(other *suite) { other.stop(ctx, t) })
		}},
	}
}

// elsewhere runs a Provider in a network namespace of its own, which must be deleted after
// the Provider ended.
func (s *suite) elsewhere(ctx context.Context, t *testing.T, end func(other *suite)) {
	t.Helper()
	ns := netnstest.New(t)
	netnstest.Check(t, ns.AddAddrs("lo", prefixes(s.world.Node.Addrs[:2], 32, 128)...))
	other := &suite{world: s.world, factory: s.factory, adjust: func(c *proxier.Config) { c.NetNS = ns.Path() }}
	st := &stage{suite: other, provider: other.use(ctx, t, setupDefault)}
	st.publish(ctx, t, service{external: true, options: []ServiceOption{healthChecked}, endpoints: ready(pod1)})
	end(other)
	netnstest.MustGo(t, ns)
	runtime.KeepAlive(st) // a finalizer would close its sockets
}
