package ipvs

import (
	"net/netip"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/desired"
)

// TestAVIPStaysWhileItsConnectionsDrain (PKT-80).
func TestAVIPStaysWhileItsConnectionsDrain(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t, func(c *Config) { c.Drain = time.Hour })
	mustApply(t, e, full(service("web", webVIP, pod1)))
	n.kernel.connect(tcpKey("198.51.100.1:80"), netip.MustParseAddrPort(pod1))
	mustApply(t, e, removal("web"))
	deleteDrainedAfter(e, time.Minute)
	n.mustHold(t, "198.51.100.1:80/TCP="+pod1+"*0")
	n.mustBind(t, webVIP)
	deleteDrainedAfter(e, time.Hour)
	n.mustHold(t)
	n.mustBind(t)
}

// TestASuccessorFinishesDraining: it recognizes draining real servers by weight 0.
func TestASuccessorFinishesDraining(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t)
	mustApply(t, e, full(service("web", webVIP, pod1, pod2)))
	n.kernel.connect(tcpKey(webVIP+":80"), netip.MustParseAddrPort(pod2))
	mustApply(t, e, partial(service("web", webVIP, pod1)))
	e = n.engine(t)
	mustApply(t, e, full(service("web", webVIP, pod1)))
	deleteDrainedAfter(e, 0)
	n.mustHold(t, webVIP+":80/TCP="+pod1+"*1,"+pod2+"*0")
	n.kernel.hangUp(tcpKey(webVIP+":80"), netip.MustParseAddrPort(pod2))
	deleteDrainedAfter(e, 0)
	n.mustHold(t, webVIP+":80/TCP="+pod1+"*1")
}

// TestRulesRefuseDrainingServers until they are deleted, because of the VIP's other ports and
// of a successor. A service port can take such a virtual server back.
func TestRulesRefuseDrainingServers(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t, func(c *Config) { c.Drain = time.Hour })
	web := withFrontend(service("web", webVIP, pod1), desired.NodePort, "", 30080)
	mustApply(t, e, full(web))
	for key := range n.kernel.virtuals {
		n.kernel.connect(key, netip.MustParseAddrPort(pod1))
	}
	mustApply(t, e, removal("web"))
	if !n.rules.closes(webVIP) {
		t.Error("the rules do not refuse other ports of the VIP that drains")
	}
	e = n.engine(t, func(c *Config) { c.Drain = time.Hour })
	mustApply(t, e, full())
	e = n.engine(t, func(c *Config) { c.Drain = time.Hour })
	mustApply(t, e, full())
	if got := len(n.kernel.virtuals); got != 2 {
		t.Errorf("after two restarts %d virtual servers drain, want that of the VIP and that of the node port", got)
	}
	mustApply(t, e, partial(service("web", webVIP, pod1)))
	n.mustHold(t, webVIP+":80/TCP="+pod1+"*1", nodeAddr+":30080/TCP="+pod1+"*0")
	n.kernel.hangUp(tcpKey(nodeAddr+":30080"), netip.MustParseAddrPort(pod1))
	deleteDrainedAfter(e, 0)
	n.mustHold(t, webVIP+":80/TCP="+pod1+"*1")
	if keys, err := n.rules.Frontends(t.Context()); err != nil || len(keys) != 1 {
		t.Errorf("the rules know %v, %v, want web's VIP only", keys, err)
	}
}
