package proxiertest_test

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestNoLateAnswerCountsAsSilence asks servers that answer, beside busy loops on all processors: whoever
// expects no answer hears it all the same. Then a rule drops the same packets, and nobody hears anything.
func TestNoLateAnswerCountsAsSilence(t *testing.T) {
	world := proxiertest.NewTopology(t)
	for range 2 * runtime.NumCPU() {
		loop := exec.CommandContext(t.Context(), "sh", "-c", "while kill -0 $PPID; do :; done") // ends with the test, also if that is killed
		netnstest.Check(t, loop.Start())
		t.Cleanup(func() { _ = loop.Wait() })
	}
	const rounds, atOnce = 20, 24
	all := func(check func(answer proxiertest.Answer, err error) string) {
		for range rounds {
			var asking sync.WaitGroup
			for range atOnce {
				asking.Go(func() {
					from, network, to := someway(world)
					answer, err := from.Ask(t.Context(), network, to, proxiertest.AskOptions{Flusher: world})
					if wrong := check(answer, err); wrong != "" {
						t.Errorf("%s from %s to %s: %+v, %v, want %s", network, from.Name, to, answer, err, wrong)
					}
				})
			}
			asking.Wait()
		}
	}
	all(func(answer proxiertest.Answer, err error) string {
		if err != nil || answer.Server == "" {
			return "an answer"
		}
		return ""
	})
	for _, pod := range slices.Concat(world.LocalPods, world.RemotePods) {
		netnstest.Check(t, pod.Do(func() error {
			rules := exec.CommandContext(t.Context(), "nft", "-f", "-")
			rules.Stdin = strings.NewReader(`table inet t {
				chain in { type filter hook input priority 0; iifname != "lo" meta l4proto { tcp, udp } th dport 8080 drop; }
			}`)
			return rules.Run()
		}))
	}
	all(func(_ proxiertest.Answer, err error) string {
		if !errors.Is(err, proxiertest.ErrTimeout) {
			return "none"
		}
		return ""
	})
}

// someway returns a random way to a server of a pod.
func someway(world *proxiertest.Topology) (from *proxiertest.Host, network string, to netip.AddrPort) {
	from = []*proxiertest.Host{world.Client, world.Node, world.Router, world.LocalPods[0]}[rand.IntN(4)]
	network = []string{"tcp", "udp"}[rand.IntN(2)]
	pod := []*proxiertest.Host{world.LocalPods[1], world.LocalPods[2], world.RemotePods[0], world.RemotePods[1]}[rand.IntN(4)]
	return from, network, netip.AddrPortFrom(pod.Addr([]v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}[rand.IntN(2)]), 8080)
}
