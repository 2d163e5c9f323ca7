package proxiertest

import (
	"context"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/canary"
)

// canaryScenarios are about the proxy's own test of its data plane.
func canaryScenarios() []scenario {
	const rule = "The canary's connections reach its endpoint on the node, and fail without its rules; those of other Services do not change."
	return []scenario{plays("PKT-86", rule, playCanary, service{endpoints: ready(pod1)})}
}

func playCanary(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	const interval = 400 * time.Millisecond // a quarter between the first tests
	c, err := canary.New(canary.Options{NetNS: s.world.Node.NetNS(), Interval: interval, Threshold: time.Nanosecond})
	netnstest.Check(t, err)
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx, s.provider) }()
	expect := func(what string, want canary.TestState) {
		t.Helper()
		if !poll.Soon(func() bool {
			status := c.Status()
			return status[v1.IPv4Protocol].State == want && status[v1.IPv6Protocol].State == want
		}) {
			t.Errorf("%s: the canary is %+v, want %v in both families", what, c.Status(), want)
		}
	}
	expect("with rules", canary.StatePassing)
	s.publish(ctx, t, service{endpoints: ready(pod0)})
	for _, family := range families() {
		meta := metav1.ObjectMeta{Namespace: canary.Namespace, Name: "canary-" + strings.ToLower(string(family))}
		s.provider.OnServiceDelete(&v1.Service{ObjectMeta: meta})
	}
	expect("without rules", canary.StateFailing)
	stop()
	netnstest.Check(t, <-ended)
}
