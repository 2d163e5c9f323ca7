//go:build vm

package conntrack

import (
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// Whoever asks for traffic learns which flowtable hides some of it.
func TestAFlowtableWithoutCounterIsNamed(t *testing.T) {
	ns := netnstest.New(t)
	traffic := newTraffic(ns.Path())
	nft := func(commands string) { netnstest.Run(t, ns, "nft", commands) }
	nft("add table inet foreign; add flowtable inet foreign counted { hook ingress priority 0; counter; }")
	if problem := traffic.uncounted(t.Context()); problem != "" {
		t.Errorf("with a counter: %s", problem)
	}
	nft("add flowtable inet foreign hidden { hook ingress priority 0; }")
	if problem := traffic.uncounted(t.Context()); !strings.Contains(problem, "hidden of table foreign") {
		t.Errorf("problem %q, want one about flowtable hidden", problem)
	}
}
